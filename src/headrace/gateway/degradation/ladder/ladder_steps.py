"""What a level means for one request: which steps may be taken of it, what each changes, and how that is told.

Owns Allowed (what a request and its tenant let happen to it), Degraded (what is to be changed) and Telling (what was in
the end). Changes nothing itself but `max_tokens`: turns and sources are shaping's, variants the route's, cached answers
the caches'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from headrace.config.shaping_section import DegradeMode
from headrace.gateway.api_errors import ApiError
from headrace.gateway.degradation.ladder.ladder_options import ORDER, StepName, StepOptions
from headrace.gateway.degradation.ladder.levels import LadderLevel, PressureSignals
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.fast_profile import cap_max_tokens, has_fixed_format
from headrace.gateway.requests.text_request import TextRequest

HEADER: Final = "x-headrace-degraded"

MOST_WAIT: Final = 60.0  # seconds that a client is asked to stay away


class AllowedSteps(msgspec.Struct, frozen=True):
    """The steps that may be taken of a request. To be refused cannot be declined: it is what is left."""

    steps: frozenset[StepName] = frozenset(ORDER)

    @classmethod
    def of(cls, *wishes: DegradeMode | None) -> AllowedSteps:
        """What all of them allow: the request's, the tenant's. None allows everything."""
        found: set[StepName] = set(ORDER)
        for wish in wishes:
            if wish == "off":
                found.clear()
            elif wish is not None and wish != "on":
                found.intersection_update(wish)
        found.add("refuse")
        return cls(frozenset(found))


class DegradationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to change of a request. Nothing of it has happened yet."""

    level: LadderLevel
    history_tokens: int | None = None  # of the conversation without its sources
    sources_tokens: int | None = None
    max_tokens: int | None = None
    variants: tuple[str, ...] = ()  # MODEL@NAME, the first that is there
    stale_s: float | None = None  # a cached answer may have expired for so long; it comes before generating
    extract: bool = False  # where there are sources: answer from them, before generating
    refuse: bool = False  # where neither a stale nor an extracted answer was there

    @property
    def nothing(self) -> bool:
        return not (
            self.history_tokens
            or self.max_tokens
            or self.variants
            or self.stale_s is not None
            or self.extract
            or self.refuse
        )


def plan_degradation(level: LadderLevel, asked: TextRequest, allowed: AllowedSteps | None = None) -> DegradationPlan:
    """The steps of a level that may be taken of this request and that can mean something for it."""
    steps: dict[StepName, StepOptions] = {
        step.step: step for step in level.steps if allowed is None or step.step in allowed.steps
    }
    talk = asked.messages is not None
    trim = steps.get("trim") if talk else None
    cap_answer = steps.get("max_tokens")
    if cap_answer is not None and (has_fixed_format(asked) or (asked.max_tokens or math.inf) <= cap_answer.max_tokens):
        cap_answer = None
    # An answer that is read by a program, or is looked into, cannot be one that was made otherwise.
    plain = talk and not has_fixed_format(asked) and asked.n == 1 and asked.sampling.logprobs is None
    stale = steps.get("stale") if asked.cache == "on" else None
    return DegradationPlan(
        level=level,
        history_tokens=trim.history_tokens if trim is not None else None,
        sources_tokens=trim.sources_tokens if trim is not None else None,
        max_tokens=cap_answer.max_tokens if cap_answer is not None else None,
        variants=steps["variant"].variants if "variant" in steps and "@" not in asked.model else (),
        stale_s=stale.stale_s if stale is not None else None,
        extract=plain and "extract" in steps,
        refuse="refuse" in steps,
    )


def cap_answer(asked: TextRequest, degraded: DegradationPlan) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """With the answer's length cut, where that is asked for."""
    return (asked, ()) if degraded.max_tokens is None else cap_max_tokens(asked, degraded.max_tokens)


def find_smaller_variant(name: str, variants: Iterable[str], there: Mapping[str, object] | Sequence[str]) -> str | None:
    """The first of the declared variants of a model that is served; None where there is none but this one."""
    base = name.partition("@")[0]
    for variant in variants:
        found = f"{base}@{variant}"
        if found != name and found in there:
            return found
    return None


def overload_error(level: LadderLevel, signals: PressureSignals) -> ApiError:
    """For a request whose ladder has ended: 429 where the tenant's own budget ends it, 503 where the machine does."""
    if level.why == ("budget_left",):
        return ApiError(
            "the budget does not allow more for now",
            kind="rate_limit_error",
            code="budget_low",
            retry_after=MOST_WAIT,
            headers={HEADER: "refuse"},
        )
    return ApiError(
        "there is more to do than can be done in time; try again later",
        kind="overloaded_error",
        code="overloaded",
        retry_after=retry_after(level, signals),
        headers={HEADER: "refuse"},
    )


def retry_after(level: LadderLevel, signals: PressureSignals) -> float:
    """Seconds until the queue will be short enough for the hardest step to be left, if nobody else comes."""
    wait = signals.queue_s or 0.0
    threshold = level.steps[-1].queue_s if level.steps else None
    left = wait - (threshold.leave if threshold is not None else 0.0)
    return min(max(1.0, left), MOST_WAIT)


class DegradationRecord(msgspec.Struct):
    """What was done to one request, for whoever is told of it: its client, the log, the metrics."""

    done: list[tuple[StepName, ShapingChange]] = []

    def took(self, step: StepName, *shaped: ShapingChange) -> None:
        """Nothing is told of a step that changed nothing."""
        self.done.extend((step, each) for each in shaped)

    def clear(self, *steps: StepName) -> None:
        """Nothing came of these in the end; without any, of none."""
        self.done = [(step, each) for step, each in self.done if steps and step not in steps]

    @property
    def steps(self) -> tuple[StepName, ...]:
        """Labels for a metric, each once, in the ladder's order."""
        taken = {step for step, _ in self.done}
        return tuple(step for step in ORDER if step in taken)

    def headers(self) -> dict[str, str]:
        """Such as `x-headrace-degraded: trim; turns=5210>1980, max_tokens=1024>128`; none where nothing was done."""
        if not self.done:
            return {}
        done = sorted(self.done, key=lambda each: ORDER.index(each[0]))
        parts = [str(each) if each.step == step else f"{step}; {each}" for step, each in done]
        return {HEADER: ", ".join(parts)}
