"""Turns a ladder level into changes of one request, and records which of them happened.

Owns AllowedSteps, DegradationPlan and DegradationRecord. Changes only `max_tokens` itself: shaping trims turns and
sources, routing picks variants, and the caches find stale answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from headrace.config.shaping_section import DegradeMode, LadderStepConfig, StepName
from headrace.gateway.api_errors import ApiError
from headrace.gateway.degradation.ladder.ladder_config import STEP_ORDER, threshold
from headrace.gateway.degradation.ladder.levels import LadderLevel, PressureSignals
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.fast_profile import cap_max_tokens, has_fixed_format
from headrace.gateway.requests.text_request import TextRequest

HEADER: Final = "x-headrace-degraded"

MAX_RETRY_S: Final = 60.0  # the longest `retry-after`


class AllowedSteps(msgspec.Struct, frozen=True):
    """The steps that may apply to a request. Clients cannot opt out of `refuse`."""

    steps: frozenset[StepName] = frozenset(STEP_ORDER)

    @classmethod
    def of(cls, *settings: DegradeMode | None) -> AllowedSteps:
        """Return the steps that every setting allows: the request's and the tenant's. None allows all steps."""
        allowed: set[StepName] = set(STEP_ORDER)
        for setting in settings:
            if setting == "off":
                allowed.clear()
            elif setting is not None and setting != "on":
                allowed.intersection_update(setting)
        allowed.add("refuse")
        return cls(frozenset(allowed))

    @property
    def degrades(self) -> bool:
        """True if the answer may be another than without pressure."""
        return bool(self.steps - {"refuse"})


class DegradationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that a level asks for. None of them has been made yet."""

    level: LadderLevel
    history_tokens: int | None = None  # of the conversation without its sources
    sources_tokens: int | None = None
    max_tokens: int | None = None
    variants: tuple[str, ...] = ()  # MODEL@NAME: the first that is served
    stale_s: float | None = None  # serve cached answers that expired up to this long ago, before generating
    extract: bool = False  # answer from the request's sources, if it has any, before generating
    refuse: bool = False  # reject if there is neither a stale nor an extracted answer

    @property
    def is_empty(self) -> bool:
        return not (
            self.history_tokens
            or self.max_tokens
            or self.variants
            or self.stale_s is not None
            or self.extract
            or self.refuse
        )


def plan_degradation(
    level: LadderLevel, text_request: TextRequest, allowed: AllowedSteps | None = None
) -> DegradationPlan:
    """Return the steps of a level that are allowed and that can have an effect on this request."""
    steps: dict[StepName, LadderStepConfig] = {
        step.step: step for step in level.steps if allowed is None or step.step in allowed.steps
    }
    is_chat = text_request.messages is not None
    trim = steps.get("trim") if is_chat else None
    cap = steps.get("max_tokens")
    if cap is not None and (has_fixed_format(text_request) or (text_request.max_tokens or math.inf) <= cap.max_tokens):
        cap = None
    # An extracted answer cannot stand in where a program reads the answer or the client inspects its tokens.
    extractable = (
        is_chat
        and not has_fixed_format(text_request)
        and text_request.n == 1
        and text_request.sampling.logprobs is None
    )
    stale = steps.get("stale") if text_request.cache == "on" else None
    return DegradationPlan(
        level=level,
        history_tokens=trim.history_tokens if trim is not None else None,
        sources_tokens=trim.sources_tokens if trim is not None else None,
        max_tokens=cap.max_tokens if cap is not None else None,
        variants=steps["variant"].variants if "variant" in steps and "@" not in text_request.model else (),
        stale_s=stale.stale_s if stale is not None else None,
        extract=extractable and "extract" in steps,
        refuse="refuse" in steps,
    )


def cap_answer(text_request: TextRequest, plan: DegradationPlan) -> tuple[TextRequest, tuple[ShapingChange, ...]]:
    """Cap the length of the answer if the plan says so."""
    return (text_request, ()) if plan.max_tokens is None else cap_max_tokens(text_request, plan.max_tokens)


def find_smaller_variant(
    name: str, variants: Iterable[str], served: Mapping[str, object] | Sequence[str]
) -> str | None:
    """Return the first of a model's declared variants that is served and is not `name` itself."""
    base = name.partition("@")[0]
    return next((full for each in variants if (full := f"{base}@{each}") != name and full in served), None)


def overload_error(level: LadderLevel, signals: PressureSignals) -> ApiError:
    """Return the rejection at the end of a ladder: 429 if the tenant's budget caused it, 503 if the machine did."""
    if level.reasons == ("budget_left",):
        return ApiError(
            "Your budget is nearly used up. Retry later, or ask your administrator for a larger budget.",
            kind="rate_limit_error",
            code="budget_low",
            retry_after=MAX_RETRY_S,
            headers={HEADER: "refuse"},
        )
    return ApiError(
        "The server is overloaded and cannot answer in time. Retry later.",
        kind="overloaded_error",
        code="overloaded",
        retry_after=retry_after_s(level, signals),
        headers={HEADER: "refuse"},
    )


def retry_after_s(level: LadderLevel, signals: PressureSignals) -> float:
    """Return the seconds until the queue lets the ladder leave its hardest step, if no further request arrives."""
    pair = threshold(level.steps[-1], "queue_ms") if level.steps else None
    leave_ms = 0.0 if pair is None else pair[1]
    return min(max(1.0, ((signals.queue_ms or 0.0) - leave_ms) / 1e3), MAX_RETRY_S)


class DegradationRecord(msgspec.Struct):
    """The steps that were taken for one request, for its client, the log and the metrics."""

    changes: list[tuple[StepName, ShapingChange]] = []

    def add(self, step: StepName, *changes: ShapingChange) -> None:
        """Record a step. A step without changes is not recorded."""
        self.changes.extend((step, change) for change in changes)

    def remove(self, *steps: StepName) -> None:
        """Drop steps that had no effect in the end; all of them if you name none."""
        self.changes = [(step, change) for step, change in self.changes if steps and step not in steps]

    @property
    def steps(self) -> tuple[StepName, ...]:
        """Return each recorded step once, in the ladder's order."""
        if not self.changes:
            return ()
        recorded = {step for step, _ in self.changes}
        return tuple(step for step in STEP_ORDER if step in recorded)

    def headers(self) -> dict[str, str]:
        """Return the header, such as `x-headrace-degraded: trim; turns=5210>1980, max_tokens=1024>128`."""
        if not self.changes:
            return {}
        ordered = sorted(self.changes, key=lambda each: STEP_ORDER.index(each[0]))
        parts = [str(change) if change.name == step else f"{step}; {change}" for step, change in ordered]
        return {HEADER: ", ".join(parts)}
