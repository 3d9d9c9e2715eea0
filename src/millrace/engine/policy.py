"""What is preferred to what: the surfaces' objectives and weights, and the numbers by which the scheduler weighs.

Owns Surface, what an operator may change of one, Policy, and the two instants that follow from them for a request: when
its first token is due, and how urgent it is. Every preference is a bounded lead in seconds over an earlier arrival, or
a share of the turns, so none of them can make anything wait for ever. Knows no queue and no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from millrace.engine.request import Request
from millrace.errors import RequestError

MOST_PRIORITY: Final = 10
PATIENCE_SERVICES: Final = 32.0
MOST_WEIGHT: Final = 1000.0
_MOST_SLACK: Final = 60.0  # seconds
_SLACK_SHARE: Final = 1 / 60


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


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    surfaces: Mapping[str, Surface] = msgspec.field(default_factory=lambda: SURFACES)

    pace: float = (
        0.85  # of the inter-token objective that a step is planned to take: steps differ, and the mean must hold
    )
    # A step with short prompts in it that are late may last this many times what the streams in it would take alone,
    # but no more than so many of their objectives.
    late_stretch: float = 4.0
    late_objective: float = 4.0
    decode_weight: float = 2.0  # a generated token is charged like this many prompt tokens; cached ones are free
    background_share: float = 1 / 32  # of the served tokens, for background work that would otherwise stand still
    late_turns: int = 4  # one in so many of a tenant's turns goes to a request whose objective cannot be met any more
    priority_lead: float = 5.0  # seconds of arrival that one step of priority is worth
    warm_lead: float = 0.5  # seconds that a wholly cached prompt is worth: requests with a hot prefix go together

    long_share: float = 0.15  # of the rows that long prompts may have, kept for them while there are short ones

    share_cold: bool = True  # a prefix that is being computed is waited for, not computed twice
    shared_blocks: int = 2  # least blocks that make waiting for another's prefix worth while
    rescue: bool = True  # preempt tenants above their share where another's first token would be late
    most_rescues: int = 2  # times that one sequence may be preempted for another's first token
    refuse_unmet: bool = True  # refuse at admission what cannot meet its deadline or its surface's patience


def due_time(request: Request, surface: Surface, service: float) -> float:
    """When the first token is due. A prompt that cannot meet the objective in traffic is given the time that it can."""
    due = request.arrival + max(surface.ttft, 2.5 * service)
    return due if request.deadline is None else min(due, request.deadline)


def urgency(request: Request, surface: Surface, policy: Policy, *, service: float, answer: float, warm: float) -> float:
    """The later, the less urgent. Between two requests without a deadline it differs from the order of arrival by a few
    seconds at most, so nothing is overtaken for ever.

    `service` and `answer` are the predicted seconds of the prompt and of what follows, `warm` the cached share.
    """
    lead = policy.priority_lead * request.priority + policy.warm_lead * warm
    patient = surface.ttft if surface.ttft < math.inf else 0.0
    # Short work first, within bounds: more of it is in time, and nobody waits much longer for it.
    latest_start = request.arrival + patient + 2.0 * min(service, 2.0 * patient)
    slack = math.inf
    if request.deadline is not None:
        by_deadline = max(request.deadline - service - answer, request.arrival)
        slack = max(by_deadline - latest_start, 0.0)
        latest_start = min(latest_start, by_deadline)
    # Of those whose first tokens are due at the same time, the one with least time for the rest goes first.
    return latest_start + _SLACK_SHARE * min(slack, _MOST_SLACK) - lead
