"""Whatever happens in whatever order, with crashes in between: sums stay exact, and budgets hold."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import Admitted, BudgetBook, TenantBudgets
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous
from tests.support.stores.ledgers import CHAT, DAY, NOON, PRICES, Opened, entry, ledger_in, used

STEPS, LIVES = 150, 4
TENANTS = ("a", "b")
LIMIT = 4000


class Story:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock(NOON)
        self.accounts = BudgetBook(
            {
                "a": TenantBudgets(
                    (BudgetConfig(limit_micros=LIMIT, period="day"), BudgetConfig(limit_micros=10**6, period="month"))
                )
            }
        )
        self.running: dict[str, tuple[str, str, int]] = {}  # tenant, day, tokens
        self.charged: dict[str, tuple[str, str, int]] = {}  # tenant, day, micros
        self.number = 0

    def day(self) -> str:
        return "2025-11-22" if self.clock.now < Clock(NOON).now + DAY / 2 else "2025-11-23"

    async def step(self, opened: Opened) -> None:
        ledger, chance = opened.ledger, self.chance
        some = chance.choice(sorted(self.running)) if self.running else None
        match chance.randrange(9):
            case 0 | 1 | 2:
                self.number += 1
                id, tenant = f"r{self.number}", chance.choice(TENANTS)
                endpoint = chance.choice((CHAT, "/e"))
                verdict = await ledger.reserve(entry(id, tenant, endpoint=endpoint), output_tokens=chance.randrange(20))
                if isinstance(verdict, Admitted):
                    self.running[id] = (tenant, self.day(), 0)
            case 3 | 4 if some is not None:
                tenant, day, tokens = self.running[some]
                self.running[some] = (tenant, day, tokens + 5)
                if not ledger.progress(some, tokens + 5):
                    await self.settle(opened, some)
                ledger.sent(some, tokens + 5)
            case 5 | 6 if some is not None:
                await self.settle(opened, some)
            case 7 if some is not None:
                ledger.release(some)
                del self.running[some]
            case _:
                self.clock.now = Clock(NOON).now + chance.choice((0, 0, DAY))  # and back
                if chance.randrange(4) == 0:
                    endpoint = chance.choice(("", "/e"))
                    budget = BudgetConfig(limit_micros=LIMIT, period="day", endpoint=endpoint)
                    ledger.declare("b", chance.choice((None, TenantBudgets((budget,)))))
                if chance.randrange(2):
                    await asyncio.sleep(0)
                else:
                    await ledger.tend()

    async def settle(self, opened: Opened, id: str) -> None:
        tenant, day, tokens = self.running.pop(id)
        receipt = opened.ledger.settle(id, used(output=tokens))
        assert receipt.micros == PRICES.of("mini").micros(10, 0, tokens)
        self.charged[id] = (tenant, day, receipt.micros)

    def crash(self) -> None:
        """What runs is charged as far as it came."""
        for id, (tenant, day, tokens) in self.running.items():
            self.charged[id] = (tenant, day, PRICES.of("mini").micros(10, 0, tokens) if tokens else 0)
        self.running.clear()

    async def check(self, opened: Opened) -> None:
        assert await opened.charges() == {id: micros for id, (_, _, micros) in self.charged.items()}
        for tenant in TENANTS:
            spent = await opened.spent(tenant)
            for day in ("2025-11-22", "2025-11-23"):
                expected = sum(m for who, when, m in self.charged.values() if (who, when) == (tenant, day))
                assert spent.get(("", day), 0) == expected
                if tenant == "a":
                    assert expected <= LIMIT
        for standing in opened.ledger.standings("a"):
            assert standing.spent == (await opened.spent())["", standing.period]
        total = sum(micros for _, _, micros in self.charged.values())
        assert opened.rows("SELECT SUM(micros) FROM ledger_days") == [(total,)]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_keeps_sums_exact_and_budgets_whole(tmp_path: Path, seed: int) -> None:
    async def test() -> None:
        story = Story(seed)
        for life in range(LIVES):
            async with ledger_in(tmp_path, story.accounts, clock=story.clock, abandoned=life % 2 == 0) as opened:
                if life:
                    await story.check(opened)
                for _ in range(STEPS):
                    await story.step(opened)
                if life % 2 == 0:
                    story.crash()
                else:
                    for id in list(story.running):
                        await story.settle(opened, id)
                    await story.check(opened)
        assert len(story.charged) > 50

    asynchronous(test)
