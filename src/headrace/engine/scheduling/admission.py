"""Whether a request may wait: what could never be served, and what could not be served in time.

Owns these checks and their words. Looks at numbers alone; changes nothing.
"""

from __future__ import annotations

import math

from headrace.engine.interface.request import GenerationRequest
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import Admission, SchedulerLimits
from headrace.engine.scheduling.waiting_queue import FairQueue, SequenceJob
from headrace.surfaces import MOST_PRIORITY, MOST_WEIGHT, PATIENCE_SERVICES

_MOST_SECONDS = 60.0  # of work that may wait in any case


def tokens_in_all(request: GenerationRequest) -> int:
    """That its sequences may reach."""
    return len(request.prompt) + (request.max_tokens if request.kind == "generate" else 0)


def impossible(
    request: GenerationRequest, made: int, limits: SchedulerLimits, policy: Policy, memory: int
) -> tuple[str, str] | None:
    """The parameter for which a request can never be served, and why. `made`: tokens of its answer that are there
    already; `memory`: tokens of a sequence that fits whatever is pinned."""
    count, total = len(request.prompt), tokens_in_all(request)
    most = min(limits.context, memory)
    if not count:
        return "prompt", "the prompt has no tokens"
    if request.surface not in policy.surfaces:
        return "surface", f"surface must be one of {', '.join(policy.surfaces)}, not '{request.surface}'"
    if request.kind == "generate" and request.max_tokens <= made:
        return "max_tokens", f"max_tokens must be more than {made}, not {request.max_tokens}"
    if total > most:
        what = f"a prompt of {count} tokens and what may follow, {total} together, do not fit {most}"
        return "max_tokens" if count < most else "prompt", what
    if not limits.causal and request.kind != "embed":
        return "kind", "this model makes embeddings only"
    if not limits.causal and count > limits.max_rows:
        return "prompt", f"a text of {count} tokens does not fit a step of {limits.max_rows}"
    if not 1 <= request.n <= limits.max_sequences or (request.n > 1 and request.kind != "generate"):
        return "n", f"n must be 1 to {limits.max_sequences}, and 1 where nothing is generated, not {request.n}"
    if not 1 / MOST_WEIGHT <= request.weight <= MOST_WEIGHT:
        return "weight", f"weight must be {1 / MOST_WEIGHT:g} to {MOST_WEIGHT:g}, not {request.weight:g}"
    if abs(request.priority) > MOST_PRIORITY:
        return "priority", f"priority must be -{MOST_PRIORITY} to {MOST_PRIORITY}, not {request.priority}"
    if request.deadline is not None and not math.isfinite(request.deadline):
        return "deadline", f"a deadline must be finite, not {request.deadline}"
    if not 0 <= request.score_from <= count:
        return "score_from", f"score_from must be 0 to {count}, not {request.score_from}"
    return None


def no_room(
    job: SequenceJob, queue: FairQueue, limits: SchedulerLimits, *, predicted: float, retry: float
) -> Admission | None:
    """A refusal where the queue is full. No tenant may hold more of it than what is left, so there is always room for
    another's first request."""
    request, account = job.request, job.account
    free = limits.queued_sequences - queue.queued
    most = min(limits.queued_per_tenant, free) if account.queued else free
    tokens = len(request.prompt) * request.n
    if (
        account.queued + request.n <= most
        and account.queued_tokens + tokens <= limits.queued_tokens - queue.queued_tokens
    ):
        return None
    return Admission(False, predicted, retry_after=retry, why="too many requests wait")


def too_late(
    job: SequenceJob, now: float, *, wait: float, most: float, least: float, margin: float
) -> Admission | None:
    """A refusal of what would get its first token after its deadline, or wait longer than its surface has patience.

    `wait`: seconds that are foreseen, `most`: if all that is there went first, `least`: what the prompt takes alone,
    `margin`: to wait longer than foreseen, to be sure.
    """
    predicted = wait + job.service
    left = job.deadline - now
    if predicted > left:
        why = f"its first token is foreseen in {predicted:.2f} s and its deadline is in {left:.2f} s"
        if least > left:
            return Admission(False, predicted, why=why, parameter="deadline")
        return Admission(False, predicted, retry_after=1.1 * (predicted - left) + margin, why=why)
    patience = max(job.surface.patience, PATIENCE_SERVICES * job.service)
    # Even where this one would be in time, those before it that are not must not become ever more.
    over = max(wait - patience, most - max(_MOST_SECONDS, 3.0 * patience))
    if over > 0.0:
        why = f"it would wait for {max(wait, most):.1f} s, and requests like it wait for {patience:.1f} s at most"
        return Admission(False, predicted, retry_after=1.1 * over + margin, why=why)
    return None
