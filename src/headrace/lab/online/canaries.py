"""Canaries: measures both arms of each running canary, rolls back a worse candidate, and promotes if declared.

Decides by CanaryEvidence, changes by CanaryOperations, and saves the evidence in every evaluation period. A crash loses
at most one period of measurements, which leaves the tests valid: they need no complete record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from headrace.config.lab.canary_section import CanaryConfig
from headrace.gateway.accounts.account_records import CanaryRecord
from headrace.gateway.accounts.admin_operations import Actor
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.ledger.prices import PriceBook, microseconds
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.routing.splits import BUCKETS, bucket_of
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.lab.online.answer_difference import AnswerText, DifferenceSummary, Similarity
from headrace.lab.online.background_copies import (
    SURFACE,
    BackgroundCopies,
    Copy,
    CopyBounds,
    Generate,
    When,
    served_text,
)
from headrace.lab.online.canary_evidence import Arm, CanaryBounds, CanaryEvidence
from headrace.lab.online.canary_operations import CanaryOperations, canary_json
from headrace.lab.online.lab_store import LabStore
from headrace.lab.online.online_checks import failed_check
from headrace.observe import metrics

log: Final = logging.getLogger(__name__)

_ACTOR: Final = Actor("canary", "")
_CLIENT_ERRORS: Final = 500  # errors below this status are the client's


class Canaries:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        config: CanaryConfig,
        operations: CanaryOperations,
        store: LabStore,
        served: dict[str, ServedVariant],
        generate: Generate,
        similarity: Similarity,
        *,
        prices: PriceBook | None = None,
        is_idle: Callable[[], bool] = lambda: True,
        runs_here: Callable[[ServedVariant], bool] = lambda _: True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`is_idle`: whether the server runs no request. `runs_here`: whether an engine of this machine serves a
        variant, so that its copies take processors from served requests."""
        self.config = config
        self.operations = operations
        self.agreement: dict[str, DifferenceSummary] = {}  # of both arms, by run
        self._store = store
        self._served = served
        self._similarity = similarity
        self._prices = prices or PriceBook()
        self._runs_here = runs_here
        self._wall = wall
        self._evidence: dict[str, CanaryEvidence] = {}  # by control
        self._arm_of: dict[str, tuple[str, str, Arm]] = {}  # control, run and arm of recent requests, for feedback
        # By control: the record's `changed`; the candidate's requests, and those with a measured quality, by then.
        self._stage_began: dict[str, tuple[int, int, int]] = {}
        self._limit = round(config.pairs * BUCKETS)
        bounds = CopyBounds(
            concurrent=config.concurrent,
            queue=config.queue,
            tokens_per_day=config.tokens_per_day,
            timeout_s=config.timeout_s,
        )
        self.copies = BackgroundCopies(bounds, generate, is_idle=is_idle, count=_count_copy, wall=wall)

    # Observing

    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        return bool(plan.arm) and exchange.surface != SURFACE and self._running(plan) is not None

    def take(self, finished: FinishedAnswer) -> None:
        exchange, plan = finished.exchange, finished.plan
        found = self._running(plan)
        if found is None or not finished.is_generated or finished.ended == "gone" or not plan.arm:
            return
        if finished.error is not None and finished.error.status < _CLIENT_ERRORS:
            return
        control, record = found
        evidence = self._evidence_of(control, record)
        arm: Arm = plan.arm
        expected = record.candidate if arm == "candidate" else control
        failed = finished.error is not None or exchange.served.name != expected
        self._remember(exchange.id, (control, record.run, arm))
        evidence.arms[arm].requests += 1
        evidence.note_rate(arm, "failures", float(failed))
        if failed or not finished.is_complete:
            return
        self._note_durations(evidence, arm, exchange)
        evidence.note_answer(arm, output_tokens=exchange.usage.output_tokens, micros=self._price(exchange))
        check = failed_check(finished.choices, exchange)
        if check is not None:
            evidence.note_rate(arm, "checks", float(bool(check)))
        if bucket_of(record.run, exchange.id.encode()) < self._limit and (copy := Copy.of(exchange)) is not None:
            served = served_text(exchange, list(finished.choices))
            work = partial(self._compare, copy, control, record, arm, served)
            self.copies.submit(work, when=self._when(control, record, arm))

    def hear(self, request: str, outcome: str, value: float) -> None:
        """Take an outcome of a finished request."""
        if outcome == self.config.outcome:
            self.feedback(request, value)

    def feedback(self, request: str, score: float) -> bool:
        """Take a user's score of an answer by the request's id; values beyond 0 to 1 count as 0 or 1. Return whether it
        belonged to a canary."""
        found = self._arm_of.get(request)
        if found is None:
            return False
        control, run, arm = found
        evidence = self._evidence.get(control)
        if evidence is None or evidence.run != run:
            return False
        del self._arm_of[request]
        evidence.note_rate(arm, "feedback", 1.0 - min(1.0, max(0.0, score)))
        return True

    def _running(self, plan: RoutePlan) -> tuple[str, CanaryRecord] | None:
        record = self.operations.get(plan.control)
        return (plan.control, record) if record is not None and record.phase == "running" else None

    def _remember(self, request: str, arm: tuple[str, str, Arm]) -> None:
        self._arm_of[request] = arm
        while len(self._arm_of) > _REMEMBERED:
            del self._arm_of[next(iter(self._arm_of))]

    def _note_durations(self, evidence: CanaryEvidence, arm: Arm, exchange: Exchange) -> None:
        began = exchange.timeline.began
        if exchange.first_at:
            evidence.note_seconds(arm, "ttft", exchange.first_at - began)
            evidence.note_seconds(arm, "e2e", exchange.last_at - began)
        if exchange.gaps:
            evidence.note_seconds(arm, "itl", sum(exchange.gaps) / len(exchange.gaps))

    def _price(self, exchange: Exchange) -> int:
        usage, price = exchange.usage, self._prices.of(exchange.served.name)
        if price.free:
            return 0
        machine = microseconds(usage.prefill_s + usage.decode_s)
        return price.micros(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, machine)

    async def _compare(self, copy: Copy, control: str, record: CanaryRecord, arm: Arm, served: AnswerText) -> None:
        """Answer a request by the other arm and the reference, and note the quality of both arms."""
        other, *references = self._answering(control, record, arm)
        _, answer = await self.copies.answer(copy, self._served[other])
        by_control, by_candidate = (served, answer) if arm == "control" else (answer, served)
        agreement = self.agreement.setdefault(record.run, DifferenceSummary())
        agreement.add(by_control, by_candidate, self._similarity(by_control.text, by_candidate.text))
        reference = self.config.reference
        if reference is None:
            return
        best = by_control if reference == control else by_candidate
        for name in references:
            _, best = await self.copies.answer(copy, self._served[name])
        evidence = self._evidence.get(control)
        if evidence is not None and evidence.run == record.run:
            qualities = (self._similarity(each.text, best.text) for each in (by_control, by_candidate))
            evidence.note_quality(*qualities)

    def _answering(self, control: str, record: CanaryRecord, arm: Arm) -> list[str]:
        """Return the variants that answer a copy of a request that `arm` has answered."""
        other, reference = record.candidate if arm == "control" else control, self.config.reference
        return [other] if reference in (None, control, record.candidate) else [other, reference]

    def _when(self, control: str, record: CanaryRecord, arm: Arm) -> When:
        if self.config.when is not None:
            return self.config.when
        served = [self._served[name] for name in self._answering(control, record, arm)]
        return "idle" if any(map(self._runs_here, served)) else "always"

    # Deciding

    async def run(self) -> None:
        """Load the evidence, then look and save in every period until cancelled."""
        await self.load()
        while True:
            await asyncio.sleep(self.config.every_s)
            try:
                await self.look()
                await self.save()
            except ApiError as error:  # the storage may be down; the next period tries again
                log.warning("the canaries could not be evaluated: %s", error)

    async def look(self) -> None:
        """Evaluate every running canary: roll back on a breach, advance if that is declared."""
        for control, record in self.operations.records().items():
            metrics.of(metrics.canary_percent, control, record.candidate).set(record.percent)
            if record.phase != "running":
                continue
            evidence = self._evidence_of(control, record)
            breaches = evidence.breaches()
            try:
                if breaches:
                    reason = f"worse than {control}: {', '.join(each.measure for each in breaches)}"
                    await self.operations.roll_back(_ACTOR, control, reason, run=record.run)
                    _report(control, record.candidate, "rolled_back", reason)
                elif record.auto and (reason := self._why_ready(control, record, evidence)):
                    after = await self.operations.advance(_ACTOR, control, record.run, reason)
                    _report(control, record.candidate, "promoted" if after.phase == "promoted" else "advanced", reason)
            except ApiError as error:
                if error.code != "canary_ended":  # an administrator was faster
                    raise

    def _why_ready(self, control: str, record: CanaryRecord, evidence: CanaryEvidence) -> str:
        """Return why the stage is over; empty if it is not."""
        config, candidate = self.config, evidence.arms["candidate"]
        requests, pairs = candidate.requests, candidate.count("quality")
        changed, requests_before, pairs_before = self._stage_began.get(control, (-1, 0, 0))
        if changed != record.changed:
            requests_before, pairs_before = requests, pairs
            self._stage_began[control] = (record.changed, requests, pairs)
        seconds = self._wall() - record.changed
        if requests - requests_before < config.stage_requests or seconds < config.stage_s:
            return ""
        if config.reference is not None and config.pairs and pairs - pairs_before < config.stage_pairs:
            return ""  # a server that is never idle compares no pairs by default
        is_last = record.stage + 1 == len(record.stages)
        if is_last and config.proof and not evidence.is_proven:
            return ""
        found = "every measure is within its tolerance" if evidence.is_proven else "no measure is worse"
        return f"{found} after {requests} requests"

    def _evidence_of(self, control: str, record: CanaryRecord) -> CanaryEvidence:
        evidence = self._evidence.get(control)
        if evidence is None or evidence.run != record.run:
            evidence = self._evidence[control] = CanaryEvidence(record.run, self._bounds())
            self._stage_began[control] = (record.changed, 0, 0)
            runs = {each.run for each in self._evidence.values()}
            self.agreement = {run: each for run, each in self.agreement.items() if run in runs}
        return evidence

    def _bounds(self) -> CanaryBounds:
        config = self.config
        return CanaryBounds(
            alpha=config.alpha,
            slower=config.slower,
            dearer=config.dearer,
            worse=config.worse,
            failures=config.failures,
        )

    # Remembering

    async def load(self) -> None:
        for control, record in self.operations.records().items():
            with_evidence = await self._load_one(control)
            evidence = CanaryEvidence.unpack(record.run, self._bounds(), with_evidence)
            self._evidence[control] = evidence
            candidate = evidence.arms["candidate"]
            self._stage_began[control] = (record.changed, candidate.requests, candidate.count("quality"))

    async def _load_one(self, control: str) -> bytes | None:
        try:
            return await self._store.load(f"canary {control}")
        except ApiError as error:
            log.warning("the evidence of the canary of %s cannot be read: %s", control, error)
            return None

    async def save(self) -> None:
        for control, evidence in self._evidence.items():
            await self._store.save(f"canary {control}", evidence.pack())

    def as_json(self, control: str) -> dict[str, Any]:
        record = self.operations.records()[control]
        evidence = self._evidence.get(control)
        shown = None
        if evidence is not None and evidence.run == record.run:
            agreement = self.agreement.get(record.run)
            shown = {**evidence.as_json(), "agreement": None if agreement is None else agreement.as_json()}
        return canary_json(control, record, shown)


_REMEMBERED: Final = 10_000  # requests that may get feedback


def _report(control: str, candidate: str, event: str, reason: str) -> None:
    metrics.of(metrics.canary_events, candidate, event).inc()
    (log.warning if event == "rolled_back" else log.info)("canary %s of %s: %s (%s)", candidate, control, event, reason)


def _count_copy(outcome: str) -> None:
    metrics.of(metrics.shadows, "canary", outcome).inc()
