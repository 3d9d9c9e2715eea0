"""Ledgers for tests: on a sqlite file, with prices in round numbers and clocks that are set by hand."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.database import Database
from headrace.gateway.ledger.budget_alerts import AlertSender
from headrace.gateway.ledger.budgets import Admitted, BudgetBook, TenantBudgets
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.ledger_bounds import LedgerBounds, LedgerEvent
from headrace.gateway.ledger.ledger_records import BudgetScope, LedgerEntry
from headrace.gateway.ledger.ledger_store import BudgetReading, FindBudget, LeaseRequest, LedgerBatch, WriteResult
from headrace.gateway.ledger.prices import Price, PriceBook
from headrace.gateway.ledger.sqlite import SqliteLedgerStore
from headrace.gateway.requests.text_request import TokenUsage
from tests.support.clock import Clock

NOON = 1_763_812_800.0  # 2025-11-22 12:00 UTC
DAY = 86_400.0  # seconds
# Micros for one token: 1 of input, a quarter of it cached, 2 of output. The small one costs a tenth.
PRICES = PriceBook(
    {
        "mini": Price(1_000_000, 250_000, 2_000_000),
        "mini@int4": Price(100_000, 25_000, 200_000),
        "free": Price(),
        "timed": Price(second=1_000_000),
    }
)
CHAT = "/v1/chat/completions"


def entry(id: str, tenant: str = "a", *, variant: str = "mini", prompt: int = 10, **options: Any) -> LedgerEntry:
    given: dict[str, Any] = {"endpoint": CHAT, "model": "mini", "key": "k", "surface": "chat", **options}
    return LedgerEntry(id=id, tenant=tenant, variant=variant, prompt_tokens=prompt, **given)


def used(prompt: int = 10, output: int = 10, cached: int = 0, seconds: float = 0.0) -> TokenUsage:
    return TokenUsage(prompt_tokens=prompt, output_tokens=output, cached_tokens=cached, decode_s=seconds)


def budgets(*given: BudgetConfig, when_down: Any = "lease", tenant: str = "a") -> BudgetBook:
    return BudgetBook({tenant: TenantBudgets(given, when_down)})


class Faulty(SqliteLedgerStore):
    """A store that can be slow, or gone."""

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.broken = False
        self.writes = 0

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult:
        await self._fault()
        self.writes += 1
        return await super().write(batch, watch, now)

    async def lease(self, requests: Sequence[LeaseRequest]) -> dict[BudgetScope, BudgetReading]:
        await self._fault()
        return await super().lease(requests)

    async def _fault(self) -> None:
        await self.open_gate.wait()
        if self.broken:
            raise OSError("the disk is gone")


@dataclass
class Opened:
    ledger: Ledger
    store: Faulty
    folder: Path
    clock: Clock
    monotonic: Clock
    db: Database
    counts: Counter[LedgerEvent] = field(default_factory=Counter[LedgerEvent])

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "headrace.sqlite")) as connection:
            return connection.execute(statement).fetchall()

    async def charges(self) -> dict[str, int]:
        await self.ledger.flush()
        return dict(self.rows("SELECT id, micros FROM ledger_charges"))  # type: ignore[arg-type]

    async def spent(self, tenant: str = "a") -> dict[tuple[str, str], int]:
        await self.ledger.flush()
        found = self.rows(f"SELECT endpoint, period, spent FROM ledger_periods WHERE tenant = '{tenant}'")
        return {(endpoint, period): spent for endpoint, period, spent in found}

    def alerts(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT endpoint, period, percent FROM ledger_alerts ORDER BY period, percent")

    async def exchange(self, id: str, output: int = 10, **options: Any) -> int:
        """Reserved and settled; its micros."""
        verdict = await self.ledger.reserve(entry(id, **options), output_tokens=output)
        assert isinstance(verdict, Admitted), verdict
        receipt = self.ledger.settle(id, used(output=output))
        return receipt.micros


@asynccontextmanager
async def ledger_in(
    folder: Path,
    accounts: BudgetBook | None = None,
    *,
    clock: Clock | None = None,
    journal: bool = True,
    abandoned: bool = False,  # end as a killed process does: nothing is written any more
    limit_bytes: int = 16 * 1024**3,
    open: bool = True,
    **options: Any,
) -> AsyncGenerator[Opened, None]:
    clock, monotonic = clock or Clock(NOON), Clock(1000.0)
    db = Database(folder, limit_bytes=limit_bytes)
    store = Faulty(db)
    counts: Counter[LedgerEvent] = Counter()
    if (webhook := options.pop("webhook", None)) is not None:
        options["courier"] = AlertSender(store, webhook)
    bounds = options.pop("bounds", None) or LedgerBounds(exchanges=256, gather_s=0.0, wait_s=5.0, sync_s=0.05)

    def count(event: LedgerEvent, number: int) -> None:
        counts[event] += number

    ledger = Ledger(
        store,
        prices=options.pop("prices", PRICES),
        accounts=accounts,
        journal=folder / "ledger.journal" if journal else None,
        bounds=bounds,
        clock=clock,
        monotonic=monotonic,
        count=count,
        **options,
    )
    opened = Opened(ledger, store, folder, clock, monotonic, db, counts)
    try:
        if open:
            await ledger.open()
        yield opened
        if not abandoned:
            await ledger.close()
    finally:
        for task in ledger._tasks:  # pyright: ignore[reportPrivateUsage]
            task.cancel()
        await db.close()
