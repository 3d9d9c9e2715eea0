"""Product surfaces: latency objectives, fair-share weight and patience of each, and what an operator may change."""

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
MOST_GATHER: Final = 0.05  # seconds


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives and limits of one product surface. Times are in seconds."""

    ttft: float = math.inf  # objective: from arrival to the first token
    itl: float = math.inf  # objective: between two tokens
    # While a stream of this surface waits for its next token, long prompts may make a step at most this many times
    # longer. Short prompts may use the whole objective.
    stretch: float = math.inf
    weight: float = 1.0  # in the fair share: twice the weight halves the charge per token
    # A request that would wait longer than this, or than 32 times its own prompt's computation if that is more, is
    # rejected rather than queued.
    patience: float = math.inf
    # A step of an idle engine may wait so long for more prompts, if the rate of arrivals says that they come.
    gather: float = 0.0
    background: bool = False  # runs only in the capacity that the others leave


SURFACES: Final[Mapping[str, Surface]] = MappingProxyType(
    {
        "chat": Surface(ttft=1.0, itl=0.1, stretch=1.7, patience=10.0),
        "voice": Surface(ttft=0.4, itl=0.06, stretch=1.5, weight=2.0, patience=3.0),
        "agent": Surface(ttft=2.0, itl=0.15, patience=30.0),  # no user reads along
        "embedded": Surface(ttft=0.3, itl=0.06, stretch=1.5, weight=2.0, patience=3.0),
        "batch": Surface(background=True),
    }
)


_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class SurfaceOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Overrides of the surface of the same name in SURFACES."""

    ttft: _Seconds | None = None
    itl: _Seconds | None = None
    weight: Annotated[float, msgspec.Meta(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)] | None = None
    patience: _Seconds | None = None
    gather: Annotated[float, msgspec.Meta(ge=0, le=MOST_GATHER)] | None = None


def surfaces_with(changes: Mapping[str, SurfaceOptions]) -> Mapping[str, Surface]:
    """Return SURFACES with the changes. Raise RequestError for an unknown surface."""
    surfaces = dict(SURFACES)
    for name, options in changes.items():
        if name not in surfaces:
            known = ", ".join(surfaces)
            raise RequestError(f"Unknown surface '{name}'. Surfaces: {known}.", parameter="surfaces")
        given = {key: value for key, value in msgspec.structs.asdict(options).items() if value is not None}
        surfaces[name] = replace(surfaces[name], **given)
    return MappingProxyType(surfaces)
