"""The scheduler's preferences: its weights, when a first token is due, and how urgent a request is.

Every preference is a bounded lead in seconds over an earlier arrival, or a share of the turns, so nothing waits for
ever. Does not know the queue or the step.
"""

from __future__ import annotations

import math
import zlib
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
        0.85  # of the inter-token objective that a step is planned to take; steps vary, and the mean must hold
    )
    # A step with late short prompts may last this many times as long as its streams alone, but at most this many of
    # their objectives.
    late_stretch: float = 4.0
    late_objective: float = 4.0
    decode_weight: float = 2.0  # prompt tokens that a generated token is charged as; cached tokens are free
    background_share: float = 1 / 32  # of the served tokens, for background work that would otherwise stop
    # Seconds that a step may last while nothing but background work runs or waits; 0: as any other step.
    batch_step: float = 0.0
    # Background work that arrived within so many seconds goes in the order of its beginnings, so that prompts that
    # begin alike follow each other and reuse what is cached; 0: in order of arrival.
    batch_group: float = 0.0
    late_turns: int = 4  # one in this many of a tenant's turns goes to a request that can no longer meet its objective
    priority_lead: float = 5.0  # seconds of arrival that one step of priority is worth
    # seconds that a fully cached prompt is worth, so that requests with a hot prefix run together
    warm_lead: float = 0.5

    long_share: float = 0.15  # of the rows, reserved for long prompts while there are short ones

    share_cold: bool = True  # wait for a prefix that is being computed instead of computing it twice
    shared_tokens: int = 32  # fewest tokens of a shared prefix worth waiting for
    rescue: bool = True  # preempt tenants above their share if another's first token would be late
    most_rescues: int = 2  # times that one sequence may be preempted for another's first token
    refuse_unmet: bool = True  # reject at admission what cannot meet its deadline or its surface's patience

    def for_throughput(self) -> Policy:
        """Return this policy with the most tokens/s for background work that runs alone."""
        return msgspec.structs.replace(self, batch_step=1.0, batch_group=600.0)


_BEGINNING: Final = 32  # leading tokens by which background work is grouped


def grouped_urgency(request: GenerationRequest, urgency: float, seconds: float) -> float:
    """Return the urgency of background work in the order of beginnings, among what arrived within `seconds`."""
    beginning = repr((request.salt, request.prompt[:_BEGINNING])).encode()
    return seconds * (math.floor(urgency / seconds) + zlib.crc32(beginning) / 2**32)


def due_time(request: GenerationRequest, surface: Surface, service: float) -> float:
    """Return when the first token is due. A prompt that cannot meet the objective in traffic gets the time that it
    needs."""
    due = request.arrival + max(surface.ttft, 2.5 * service)
    return due if request.deadline is None else min(due, request.deadline)


def urgency(
    request: GenerationRequest, surface: Surface, policy: Policy, *, service: float, answer: float, warm: float
) -> float:
    """Return a request's urgency; lower goes first.

    Without deadlines it differs from the order of arrival by a few seconds at most, so nothing is overtaken for ever.
    `service` and `answer` are the predicted seconds of the prompt and of the output, `warm` the cached share.
    """
    lead = policy.priority_lead * request.priority + policy.warm_lead * warm
    patient = surface.ttft if surface.ttft < math.inf else 0.0
    # Short work first, within bounds: more of it is in time, and nothing waits much longer for it.
    latest_start = request.arrival + patient + 2.0 * min(service, 2.0 * patient)
    slack = math.inf
    if request.deadline is not None:
        by_deadline = max(request.deadline - service - answer, request.arrival)
        slack = max(by_deadline - latest_start, 0.0)
        latest_start = min(latest_start, by_deadline)
    # Among first tokens due at the same time, the request with the least time for its answer goes first.
    return latest_start + _SLACK_SHARE * min(slack, _MOST_SLACK) - lead
