"""Product surfaces: what each promises (first token, pace, patience), and what an operator may change of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from headrace.errors import RequestError

MOST_PRIORITY: Final = 10
PATIENCE_SERVICES: Final = 32.0
MOST_WEIGHT: Final = 1000.0


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    """What one product surface promises and may take."""

    ttft: float = math.inf  # objective: seconds from arrival to the first token
    itl: float = math.inf  # objective: seconds between two tokens
    # A step with long prompts in it lasts at most this many times as long as without them while a stream of this
    # surface waits for its next token. Short prompts may use the whole objective.
    stretch: float = math.inf
    weight: float = 1.0  # of its tokens in the fair share: twice the weight, half the charge
    # Seconds, or 32 times what the prompt takes by itself where that is more: where a longer wait is foreseen, a
    # request is refused rather than queued.
    patience: float = math.inf
    background: bool = False  # takes only what the others leave


SURFACES: Final[Mapping[str, Surface]] = MappingProxyType(
    {
        "chat": Surface(ttft=1.0, itl=0.1, stretch=1.7, patience=10.0),
        "voice": Surface(ttft=0.4, itl=0.06, stretch=1.5, weight=2.0, patience=3.0),
        "agent": Surface(ttft=2.0, itl=0.15, patience=30.0),  # nobody watches it write
        "embedded": Surface(ttft=0.3, itl=0.06, stretch=1.5, weight=2.0, patience=3.0),
        "batch": Surface(background=True),
    }
)


_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class SurfaceOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is to differ from a surface of SURFACES; see there for the meanings."""

    ttft: _Seconds | None = None
    itl: _Seconds | None = None
    weight: Annotated[float, msgspec.Meta(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)] | None = None
    patience: _Seconds | None = None


def surfaces_with(changes: Mapping[str, SurfaceOptions]) -> Mapping[str, Surface]:
    """SURFACES with what differs; RequestError for one that does not exist."""
    surfaces = dict(SURFACES)
    for name, options in changes.items():
        if name not in surfaces:
            known = ", ".join(surfaces)
            raise RequestError(f"there is no surface '{name}': surfaces are {known}", parameter="surfaces")
        given = {key: value for key, value in msgspec.structs.asdict(options).items() if value is not None}
        surfaces[name] = replace(surfaces[name], **given)
    return MappingProxyType(surfaces)
