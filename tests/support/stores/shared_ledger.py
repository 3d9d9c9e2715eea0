"""A ledger store in memory that gateways of a test share, with leases as in Postgres, which can be slow or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass, field

from headrace.gateway.ledger.ledger_records import BudgetScope, LedgerCharge, scopes_in, sums_of
from headrace.gateway.ledger.ledger_store import (
    LAPSE,
    BudgetAlert,
    BudgetReading,
    FindBudget,
    LeaseRenewal,
    LeaseRequest,
    LedgerBatch,
    SumRow,
    UsageQuery,
    WriteResult,
)


@dataclass
class Lease:
    leased: int = 0
    version: int = 0
    wanted: bool = False


@dataclass
class SharedLedger:
    """What the database has."""

    clock: Callable[[], float]
    lease_s: float = 60.0
    percent: int = 25
    spent: dict[BudgetScope, int] = field(default_factory=dict[BudgetScope, int])
    charged: set[str] = field(default_factory=set[str])
    leases: dict[tuple[BudgetScope, str], Lease] = field(default_factory=dict[tuple[BudgetScope, str], Lease])
    until: dict[str, float] = field(default_factory=dict[str, float])

    def live(self) -> set[str]:
        return {run for run, until in self.until.items() if until > self.clock()}

    def reading(self, scope: BudgetScope, run: str) -> BudgetReading:
        mine = self.leases.setdefault((scope, run), Lease())
        others = sum(
            lease.leased
            for (each, other), lease in self.leases.items()
            if each == scope and other != run and other in self.live()
        )
        return BudgetReading(self.spent.get(scope, 0), mine.version, others, mine.leased)


class SharedStore:
    """One gateway's connection to it."""

    shared = True

    def __init__(self, ledger: SharedLedger) -> None:
        self.ledger = ledger
        self.run = ""
        self.asked = 0  # leases asked for
        self.broken = False  # calls fail
        self.calls_pass = asyncio.Event()  # on the way to the database
        self.answers_pass = asyncio.Event()  # on the way back
        self.calls_pass.set()
        self.answers_pass.set()

    async def _call(self) -> None:
        if self.broken:
            raise ConnectionError("the database is gone")
        await self.calls_pass.wait()

    async def open(self, run: str, previous: str) -> None:
        self.run = run

    async def lease(self, requests: Sequence[LeaseRequest]) -> dict[BudgetScope, BudgetReading]:
        self.asked += 1
        await self._call()
        found = {each.scope: self._lease(each) for each in requests}
        await self.answers_pass.wait()
        return found

    def _lease(self, asked: LeaseRequest) -> BudgetReading:
        ledger, now = self.ledger, self.ledger.reading(asked.scope, self.run)
        mine = ledger.leases[asked.scope, self.run]
        if asked.micros >= 0:
            left = max(0, asked.limit - now.spent - now.others - now.leased)
            if left >= asked.least:
                mine.leased += min(left, max(asked.micros, left * ledger.percent // 100 // max(1, len(ledger.live()))))
            if left < asked.micros:
                for (scope, run), lease in ledger.leases.items():
                    lease.wanted |= scope == asked.scope and run != self.run and lease.leased > 0
        elif asked.version == mine.version:
            mine.leased = max(0, mine.leased + asked.micros)
        mine.wanted = mine.wanted and asked.micros < 0 and asked.version != mine.version
        mine.version += 1
        return ledger.reading(asked.scope, self.run)

    async def renew(self) -> LeaseRenewal:
        await self._call()
        ledger, now = self.ledger, self.ledger.clock()
        mine = {scope: lease for (scope, run), lease in ledger.leases.items() if run == self.run}
        lapsed = ledger.until.get(self.run, 0.0) < now + ledger.lease_s / 10
        if lapsed:
            for lease in mine.values():
                lease.leased, lease.version, lease.wanted = 0, lease.version + LAPSE, False
        ledger.until[self.run] = now + ledger.lease_s
        wanted = tuple(scope for scope, lease in mine.items() if lease.wanted)
        await self.answers_pass.wait()
        return LeaseRenewal(lapsed, wanted)

    async def end_leases(self, run: str) -> None:
        await self._call()
        self.ledger.until.pop(run, None)

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult:
        await self._call()
        ledger = self.ledger
        known = frozenset(charge.id for charge in batch.charges if charge.id in ledger.charged)
        new = [charge for charge in batch.charges if charge.id not in known]
        ledger.charged |= {charge.id for charge in new}
        for scope, micros in sums_of(new)[1].items():
            ledger.spent[scope] = ledger.spent.get(scope, 0) + micros
            if (mine := ledger.leases.get((scope, self.run))) is not None:
                mine.leased, mine.version = max(0, mine.leased - micros), mine.version + 1
        readings = {scope: ledger.reading(scope, self.run) for scope in scopes_in(batch.charges)}
        await self.answers_pass.wait()
        return WriteResult(known, [], readings)

    async def prune(self, before: str) -> int:
        return 0

    async def next_alert(self) -> BudgetAlert | None:
        return None

    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None: ...

    async def sums(self, query: UsageQuery) -> AsyncIterator[list[SumRow]]:
        for rows in ():
            yield rows

    async def sources(self, query: UsageQuery) -> list[str]:
        return []

    async def tend(self, running: Container[str], day: str) -> list[LedgerCharge]:
        return []

    async def close(self) -> None: ...
