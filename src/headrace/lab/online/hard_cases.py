"""HardCases: requests whose answer failed an online check, for the gate's prompts and for tuning.

They hold texts, so only those of tenants that opted into recordings are kept: redacted as recordings are, in memory,
and bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.config import Config
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.directory import AccountDirectory
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
        """`is_recorded`: whether a tenant exists and opts into recordings now. `unnamed`: keep those of requests
        without a tenant, too."""
        self.cases: deque[HardCase] = deque(maxlen=most)
        self.keep: Callable[[HardCase], object] = self.cases.append
        self._redactor = redactor
        self._is_recorded = is_recorded
        self._unnamed = unnamed

    @classmethod
    def from_config(cls, config: Config, directory: AccountDirectory) -> HardCases | None:
        """Return None if the configuration keeps none."""
        golden = config.routing.golden
        if not (golden.checks and golden.hard_cases):
            return None
        return cls(
            Redactor.from_config(config.recording),
            most=golden.hard_cases,
            is_recorded=lambda tenant: directory.settings_of(tenant).record,
            unnamed=config.recording.unnamed,
        )

    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        return bool(plan.golden) and self._may_keep(exchange.caller.tenant)

    def _may_keep(self, tenant: str) -> bool:
        return self._is_recorded(tenant) if tenant else self._unnamed

    def take(self, finished: FinishedAnswer) -> None:
        """Keep the case, unless its tenant was deleted or has left recordings while the answer was made."""
        note = finished.exchange.notes.get("golden")
        if note is None or not finished.is_complete or not self._may_keep(finished.exchange.caller.tenant):
            return
        arrived = time.time() - (time.monotonic() - finished.exchange.arrival)
        try:
            record = record_of(finished, arrived, self._redactor)
        except ApiError:
            return  # it cannot be written as a request
        self.keep(HardCase(note["check"], note["instead_of"], record))

    def add(self, case: HardCase) -> None:
        """Keep a case that another process has found, unless its tenant is not recorded any more."""
        if self._may_keep(case.record.tenant):
            self.cases.append(case)

    def follow(self, changes: AccountChanges) -> None:
        """Forget the cases of deleted tenants."""
        if deleted := changes.deleted_tenants:
            kept = [case for case in self.cases if case.record.tenant not in deleted]
            self.cases.clear()
            self.cases.extend(kept)

    def trace(self) -> bytes:
        """Return the cases as a trace, which the gate and replay read."""
        return b"".join(write_trace(case.record for case in self.cases)) if self.cases else b""
