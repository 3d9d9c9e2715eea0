"""What the scheduler prefers: the numbers by which it weighs, when a first token is due, and how urgent a request is.

Every preference is a bounded lead in seconds over an earlier arrival, or a share of the turns, so none of them can make
anything wait for ever. Knows no queue and no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.engine.interface.request import GenerationRequest
from headrace.surfaces import SURFACES, Surface

_MOST_SLACK: Final = 60.0  # seconds
_SLACK_SHARE: Final = 1 / 60


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


def due_time(request: GenerationRequest, surface: Surface, service: float) -> float:
    """When the first token is due. A prompt that cannot meet the objective in traffic is given the time that it can."""
    due = request.arrival + max(surface.ttft, 2.5 * service)
    return due if request.deadline is None else min(due, request.deadline)


def urgency(
    request: GenerationRequest, surface: Surface, policy: Policy, *, service: float, answer: float, warm: float
) -> float:
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
