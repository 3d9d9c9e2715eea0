"""Admission checks: rejects requests that can never be served, or not in time. Pure functions over numbers."""

from __future__ import annotations

import math

from headrace.engine.interface.request import GenerationRequest
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import AdmissionDecision, SchedulerLimits
from headrace.engine.scheduling.waiting_queue import FairQueue, SequenceJob
from headrace.surfaces import MOST_PRIORITY, MOST_WEIGHT, PATIENCE_SERVICES

_MOST_SECONDS = 60.0  # of work that may always wait


def tokens_in_all(request: GenerationRequest) -> int:
    """Return the most tokens that one of its sequences may reach."""
    return len(request.prompt) + (request.max_tokens if request.kind == "generate" else 0)


def impossible(
    request: GenerationRequest, made: int, limits: SchedulerLimits, policy: Policy, memory: int
) -> tuple[str, str] | None:
    """Return the parameter that makes a request impossible to serve, and why; None if it is possible. `made` counts
    tokens already generated elsewhere; `memory` is the tokens of a sequence that fits whatever is pinned."""
    count, total = len(request.prompt), tokens_in_all(request)
    most = min(limits.context, memory)
    if not count:
        return "prompt", "The prompt has no tokens."
    if request.surface not in policy.surfaces:
        return "surface", f"'surface' must be one of {', '.join(policy.surfaces)}, not '{request.surface}'."
    if request.kind == "generate" and request.max_tokens <= made:
        return "max_tokens", f"'max_tokens' must be more than {made}, not {request.max_tokens}."
    if total > most:
        what = f"A prompt of {count} tokens and its output, {total} together, do not fit in {most} tokens."
        return "max_tokens" if count < most else "prompt", what
    if not limits.causal and request.kind != "embed":
        return "kind", "This model only makes embeddings."
    if not limits.causal and count > limits.max_rows:
        return "prompt", f"A text of {count} tokens does not fit in a step of {limits.max_rows} tokens."
    if not 1 <= request.n <= limits.max_sequences or (request.n > 1 and request.kind != "generate"):
        return "n", f"'n' must be 1 to {limits.max_sequences}, and 1 if nothing is generated, not {request.n}."
    if not 1 / MOST_WEIGHT <= request.weight <= MOST_WEIGHT:
        return "weight", f"'weight' must be {1 / MOST_WEIGHT:g} to {MOST_WEIGHT:g}, not {request.weight:g}."
    if abs(request.priority) > MOST_PRIORITY:
        return "priority", f"'priority' must be -{MOST_PRIORITY} to {MOST_PRIORITY}, not {request.priority}."
    if request.deadline is not None and not math.isfinite(request.deadline):
        return "deadline", f"'deadline' must be finite, not {request.deadline}."
    if not 0 <= request.score_from <= count:
        return "score_from", f"'score_from' must be 0 to {count}, not {request.score_from}."
    return None


def no_room(
    job: SequenceJob, queue: FairQueue, limits: SchedulerLimits, *, predicted: float, retry: float
) -> AdmissionDecision | None:
    """Return a rejection if the queue is full. A tenant may fill only what is left of the queue, so every other
    tenant's first request still fits."""
    request, account = job.request, job.account
    free = limits.queued_sequences - queue.queued
    most = min(limits.queued_per_tenant, free) if account.queued else free
    tokens = len(request.prompt) * request.n
    if (
        account.queued + request.n <= most
        and account.queued_tokens + tokens <= limits.queued_tokens - queue.queued_tokens
    ):
        return None
    return AdmissionDecision(False, predicted, retry_after=retry, why="Too many requests are queued.")


def too_late(
    job: SequenceJob, now: float, *, wait: float, most: float, least: float, margin: float
) -> AdmissionDecision | None:
    """Return a rejection if the first token would come after the deadline, or the wait would exceed the surface's
    patience.

    All in seconds: `wait` is the predicted wait, `most` the wait if everything in the queue went first, `least` the
    prompt's computation alone, `margin` a safety margin for the retry.
    """
    predicted = wait + job.service
    left = job.deadline - now
    if predicted > left:
        why = f"The first token is predicted in {predicted:.2f} s, but the deadline is in {left:.2f} s."
        if least > left:
            return AdmissionDecision(False, predicted, why=why, parameter="deadline")
        return AdmissionDecision(False, predicted, retry_after=1.1 * (predicted - left) + margin, why=why)
    patience = max(job.surface.patience, PATIENCE_SERVICES * job.service)
    # Even if this request would be in time, the late ones before it must not grow without bound.
    over = max(wait - patience, most - max(_MOST_SECONDS, 3.0 * patience))
    if over > 0.0:
        why = f"The request would wait {max(wait, most):.1f} s; its surface allows {patience:.1f} s."
        return AdmissionDecision(False, predicted, retry_after=1.1 * over + margin, why=why)
    return None
