"""LedgerUpkeep: a ledger's background work: it syncs the journal, renews leases, takes over and deletes what is old."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from headrace.gateway.ledger.charge_journal import ChargeJournal
from headrace.gateway.ledger.charge_writer import ChargeWriter
from headrace.gateway.ledger.holds import BudgetHolds, OpenCharge
from headrace.gateway.ledger.ledger_bounds import CountLedgerEvent, LedgerBounds
from headrace.gateway.ledger.ledger_records import BudgetScope
from headrace.gateway.ledger.ledger_store import ChargeProgress, LedgerStore
from headrace.gateway.ledger.periods import Calendar
from headrace.observe.outage_log import OutageLog

log: Final = logging.getLogger(__name__)

_RENEW_S: Final = 1.0  # interval of renewals of leases
_PAUSE_S: Final = 0.05  # between two batches of pruning
_TEND_S: Final = 5.0  # interval of store maintenance
_PRUNE_S: Final = 3600.0  # interval of pruning


class LedgerUpkeep:
    """Use from the ledger's event loop only."""

    def __init__(
        self,
        store: LedgerStore,
        *,
        journal: ChargeJournal,
        holds: BudgetHolds,
        writer: ChargeWriter,
        calendar: Calendar,
        bounds: LedgerBounds,
        running: dict[str, OpenCharge],  # requests that run or are not stored yet, by id
        ended: set[BudgetScope],  # budgets that have rejected a request
        recover: Callable[[list[OpenCharge]], None],  # charges what a previous run left
        cost_at: Callable[[OpenCharge, int], int],  # micros of a request after so many output tokens
        lock: asyncio.Lock,  # held while a batch is written
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        count: CountLedgerEvent,
    ) -> None:
        self._store = store
        self._journal = journal
        self._holds = holds
        self._writer = writer
        self._calendar = calendar
        self._bounds = bounds
        self._running = running
        self._ended = ended
        self._recover = recover
        self._cost_at = cost_at
        self._lock = lock
        self._clock = clock
        self._monotonic = monotonic
        self._count = count

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs until cancelled."""
        return [self._sync(), self._tend(), *([self._renew()] if self._store.shared else [])]

    async def _sync(self) -> None:
        """Sync the journal to disk periodically, independent of the store."""
        while True:
            await asyncio.sleep(self._bounds.sync_s)
            if self._journal.is_healthy:
                await self._journal.sync_changes()
            else:
                self._recover(self._journal.reopen())
            if self._store.shared and (moved := self._moved()):
                self._writer.move(moved)

    async def _renew(self) -> None:
        """Keep the leases, whether they are used or not."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await self._holds.renew()
            except Exception as error:
                log.debug("leases were not renewed: %s", error)  # counted and logged by their health

    async def _tend(self) -> None:
        pruned = self._monotonic()
        outage = OutageLog(log, "the ledger could not be tended", clock=self._monotonic)
        while True:
            await asyncio.sleep(_TEND_S)
            try:
                await self.tend()
                outage.succeeded()
                if self._monotonic() - pruned >= _PRUNE_S:
                    pruned = self._monotonic()
                    await self.prune()
            except Exception as error:
                outage.failed(error)

    def _moved(self) -> list[ChargeProgress]:
        """Return the progress of running requests that the store does not have yet."""
        return [
            ChargeProgress(open.id, open.sent_tokens, open.machine_us, self._cost_at(open, open.sent_tokens))
            for open in self._running.values()
            if open.stored and open.settled is None and open.sent_tokens > open.reported_tokens
        ]

    async def tend(self) -> None:
        """Take over the open requests of dead servers in a shared store, and drop past periods."""
        now = self._clock()
        self._holds.forget(now)
        day = self._calendar.day(now)
        self._ended.difference_update([scope for scope in self._ended if not day.startswith(scope.period)])
        found = await self._store.tend(self._running, self._calendar.days_before(now, 2))
        if found:
            self._count("recovered", len(found))
            self._writer.take_over(found)

    async def prune(self) -> int:
        """Delete charges past their retention and return how many. Their sums stay."""
        before = self._calendar.days_before(self._clock(), self._bounds.keep_days)
        dropped = 0
        while True:
            # What the journal still has, the store must still know: no batch is under way here, and none will be
            # before the journal is on the disk.
            async with self._lock:
                await self._journal.sync()
                some = await self._store.prune(before)
            dropped += some
            if not some:
                return dropped
            await asyncio.sleep(_PAUSE_S)  # others use the disk, too
