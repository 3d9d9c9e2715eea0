"""HardCases: requests whose answer failed an online check, for the gate's prompts and for tuning.

They hold texts, so they are kept only of tenants that opted into recordings, redacted as these are, in memory and
bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange
from headrace.lab.recording.recorded_request import RecordedRequest, record_of, write_trace
from headrace.lab.recording.redaction import Redactor


class HardCase(msgspec.Struct, frozen=True):
    check: str  # that the first answer failed
    variant: str  # that gave it
    record: RecordedRequest  # with the golden answer


class HardCases:
    """All of it belongs to one event loop."""

    def __init__(
        self, redactor: Redactor, *, most: int, is_recorded: Callable[[str], bool], unnamed: bool = False
    ) -> None:
        """`is_recorded`: whether a tenant exists and opts into recordings now. `unnamed`: keep requests without a
        tenant, too."""
        self.cases: deque[HardCase] = deque(maxlen=most)
        self._redactor = redactor
        self._is_recorded = is_recorded
        self._unnamed = unnamed

    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        return bool(plan.golden) and self._may_keep(exchange)

    def take(self, finished: FinishedAnswer) -> None:
        """Keep a request that failed a check, unless its tenant left recordings while it ran."""
        note = finished.exchange.notes.get("golden")
        if note is None or not finished.is_complete or not self._may_keep(finished.exchange):
            return
        arrived = time.time() - (time.monotonic() - finished.exchange.arrival)
        try:
            record = record_of(finished, arrived, self._redactor)
        except ApiError:
            return  # it cannot be written as a request
        self.cases.append(HardCase(note["check"], note["instead_of"], record))

    def _may_keep(self, exchange: Exchange) -> bool:
        tenant = exchange.caller.tenant
        return self._is_recorded(tenant) if tenant else self._unnamed

    def follow(self, changes: AccountChanges) -> None:
        """Forget the cases of deleted tenants."""
        if deleted := changes.deleted_tenants:
            kept = [case for case in self.cases if case.record.tenant not in deleted]
            self.cases.clear()
            self.cases.extend(kept)

    def trace(self) -> bytes:
        """Return the cases as a trace, which the gate and replay read."""
        return b"".join(write_trace(case.record for case in self.cases)) if self.cases else b""
