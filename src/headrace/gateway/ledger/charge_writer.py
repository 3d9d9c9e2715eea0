"""Writes charges to the store in batches, in the background.

If the store fails, charges are kept and retried. Bounded by the number of requests that the ledger admits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import structlog

from headrace.gateway.ledger.budget_alerts import AlertSender
from headrace.gateway.ledger.holds import OpenCharge
from headrace.gateway.ledger.ledger_bounds import CountLedgerEvent, LedgerBounds
from headrace.gateway.ledger.ledger_records import BudgetScope, LedgerCharge
from headrace.gateway.ledger.ledger_store import (
    BudgetAlert,
    BudgetReading,
    ChargeProgress,
    FindBudget,
    LedgerBatch,
    LedgerStore,
)
from headrace.observe.outage_log import OutageLog

log: Final = logging.getLogger(__name__)
alerts_log: Final = structlog.stdlib.get_logger("headrace.budgets")

_BATCH: Final = 500  # charges per transaction
_FIRST_PAUSE: Final = 0.05  # seconds between two tries
_LONGEST_PAUSE: Final = 5.0


class ChargeWriter:
    def __init__(
        self,
        store: LedgerStore,
        *,
        watch: FindBudget,
        running: Mapping[str, OpenCharge],
        # Called with each charge that the store has, and whether it had it before; then with the new sums.
        written: Callable[[OpenCharge, bool], None],
        apply: Callable[[Mapping[BudgetScope, BudgetReading]], None],
        lock: asyncio.Lock,
        bounds: LedgerBounds,
        courier: AlertSender | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        count: CountLedgerEvent,
    ) -> None:
        self._store = store
        self._watch = watch
        self._running = running
        self._written = written
        self._apply = apply
        self._lock = lock
        self._bounds = bounds
        self._courier = courier
        self._clock = clock
        self._monotonic = monotonic
        self._count = count
        self.waiting: dict[str, OpenCharge] = {}  # settled charges, oldest first
        self._alerts: list[BudgetAlert] = []
        # For shared stores only.
        self._opened: dict[str, OpenCharge] = {}  # to announce
        self._released: dict[str, None] = {}  # to release
        self._moved: list[ChargeProgress] = []
        self._found: list[LedgerCharge] = []  # taken over from servers that died
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def charge(self, open: OpenCharge) -> None:
        open.since = self._monotonic()
        self.waiting[open.id] = open
        self._opened.pop(open.id, None)
        self._schedule()

    def open(self, open: OpenCharge) -> None:
        self._opened[open.id] = open
        self._schedule()

    def release(self, id: str) -> None:
        """Give back what a request holds in a shared store."""
        self._released[id] = None
        self._schedule()

    def drop(self, open: OpenCharge) -> None:
        """Forget a request that was not admitted."""
        self._opened.pop(open.id, None)

    def alert(self, alert: BudgetAlert) -> None:
        self._alerts.append(alert)
        self._schedule()

    def move(self, moved: list[ChargeProgress]) -> None:
        """Report the progress of running requests."""
        self._moved = moved
        self._schedule()

    def take_over(self, charges: list[LedgerCharge]) -> None:
        self._found += charges
        self._schedule()

    @property
    def behind_s(self) -> float:
        """Age of the oldest charge that is not stored yet."""
        return self._monotonic() - next(iter(self.waiting.values())).since if self.waiting else 0.0

    @property
    def behind(self) -> bool:
        """True if the store is too slow or down."""
        return self.behind_s > self._bounds.wait_s + self._bounds.gather_s

    async def flush(self) -> None:
        """Wait until the store has everything."""
        await self._idle.wait()

    def _schedule(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Write batches until cancelled."""
        pause = _FIRST_PAUSE
        outage = OutageLog(log, "the ledger cannot be written; charges are kept and retried")
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._bounds.gather_s)
            self._wake.clear()
            try:
                while await self._write_some():
                    pause = _FIRST_PAUSE
                outage.succeeded()
                self._idle.set()
            except Exception as error:
                self._count("write_failed", 1)
                outage.failed(error)
                self._wake.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _write_some(self) -> bool:
        """Write one batch. Return False if nothing waits."""
        async with self._lock:
            settled = list(islice(self.waiting.values(), _BATCH))
            opened = list(islice(self._opened.values(), _BATCH))
            found, moved = self._found[:_BATCH], self._moved
            batch = LedgerBatch(
                charges=[LedgerCharge(open.reserved, open.settled) for open in settled if open.settled is not None],
                alerts=self._alerts[:_BATCH],
                opened=[open.reserved for open in opened],
                moved=moved[:_BATCH],
                released=list(islice(self._released, _BATCH)),
            )
            batch.charges += found
            if not (batch.charges or batch.alerts or batch.opened or batch.moved or batch.released):
                return False
            written = await self._store.write(batch, self._watch, self._clock())
            for open in settled:
                del self.waiting[open.id]
                self._written(open, open.id in written.known)
            self._apply(written.readings)
            for open in opened:
                open.stored = True
                self._opened.pop(open.id, None)
                if self._running.get(open.id) is not open:  # dropped in the meantime
                    self._released[open.id] = None
            for each in batch.moved:
                if (open := self._running.get(each.id)) is not None:
                    open.reported_tokens = each.output_tokens
            if self._moved is moved:  # no newer progress was reported
                self._moved = moved[_BATCH:]
            for id in batch.released:
                self._released.pop(id, None)
            del self._found[: len(found)], self._alerts[: len(batch.alerts)]
        self._announce(written.alerts)
        return True

    def _announce(self, alerts: list[BudgetAlert]) -> None:
        for alert in alerts:
            alerts_log.warning("budget alert", **alert.log_fields())
        if alerts:
            self._count("alerts", len(alerts))
            if self._courier is not None:
                self._courier.wake()
