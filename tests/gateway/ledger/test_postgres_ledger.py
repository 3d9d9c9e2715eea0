"""The ledger in Postgres: one budget for several gateways, gateways that die, and a database that does."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import (
    UNAVAILABLE,
    Admitted,
    BudgetBook,
    BudgetRefusal,
    FallbackVariant,
    TenantBudgets,
)
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.ledger_bounds import LedgerBounds, LedgerEvent
from headrace.gateway.ledger.ledger_store import UsageQuery
from headrace.gateway.ledger.postgres import PostgresLedgerStore, SchemaError
from headrace.gateway.ledger.usage_export import usage_rows
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous
from tests.support.ledgers import CHAT, NOON, PRICES, budgets, entry, used
from tests.support.postgres_server import Server, serving, why_not

asyncpg: Any = pytest.importorskip("asyncpg", reason="the ledger in Postgres needs asyncpg, which is not installed")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"there is no Postgres server: {why_not()}")

TODAY, MONTH = "2025-11-22", "2025-11"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def schema() -> str:
    return f"ledger_{next(_numbers)}"


@dataclass
class Gateway:
    ledger: Ledger
    store: PostgresLedgerStore
    counts: Counter[LedgerEvent] = field(default_factory=Counter[LedgerEvent])

    async def rows(self, statement: str) -> list[tuple[Any, ...]]:
        await self.ledger.flush()
        found = await self.store._connections.run(lambda each: each.fetch(statement), 5.0)  # pyright: ignore
        return [tuple(row) for row in found]

    async def spent(self) -> dict[tuple[str, str], tuple[int, int]]:
        rows = await self.rows("SELECT endpoint, period, spent, held FROM ledger_periods WHERE tenant = 'a'")
        return {(endpoint, period): (spent, held) for endpoint, period, spent, held in rows}

    async def exchange(self, id: str, output: int = 10, **options: Any) -> int:
        assert isinstance(await self.ledger.reserve(entry(id, **options), output_tokens=output), Admitted)
        return (self.ledger.settle(id, used(output=output))).micros


@asynccontextmanager
async def gateway(
    server: Server | str,
    schema: str,
    journal: Path | None = None,
    accounts: BudgetBook | None = None,
    *,
    abandoned: bool = False,
    wait_s: float = 5.0,
    **options: Any,
) -> AsyncGenerator[Gateway, None]:
    dsn = server if isinstance(server, str) else server.dsn
    store = PostgresLedgerStore(dsn, schema=schema, wait_s=wait_s, **options)
    counts: Counter[LedgerEvent] = Counter()

    def count(event: LedgerEvent, number: int) -> None:
        counts[event] += number

    ledger = Ledger(
        store,
        prices=PRICES,
        accounts=accounts,
        journal=journal,
        bounds=LedgerBounds(exchanges=512, gather_s=0.0, wait_s=wait_s, sync_s=0.02, drain_s=2.0),
        clock=Clock(NOON),
        count=count,
    )
    try:
        await ledger.open()
        yield Gateway(ledger, store, counts)
        if not abandoned:
            await ledger.close()
    finally:
        for task in ledger._tasks:  # pyright: ignore[reportPrivateUsage]
            task.cancel()
        await store.close()


def test_an_exchange_is_held_charged_and_summed(server: Server, schema: str, tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(
            BudgetConfig(limit_micros=1000, period="day"),
            BudgetConfig(limit_micros=5000, period="month", endpoint=CHAT),
        )
        async with gateway(server, schema, tmp_path / "journal", accounts) as one:
            assert await one.ledger.reserve(entry("one"), output_tokens=100) == Admitted(210)
            assert await one.spent() == {(e, p): (0, 210) for e in ("", CHAT) for p in (TODAY, MONTH)}
            receipt = one.ledger.settle("one", used(10, 7, cached=4))
            assert (receipt.micros, receipt.saved) == (21, {"prefix": 3})
            assert await one.spent() == {(e, p): (21, 0) for e in ("", CHAT) for p in (TODAY, MONTH)}
            assert await one.rows("SELECT * FROM ledger_open") == []
            one.ledger._receipts.clear()  # pyright: ignore[reportPrivateUsage]
            one.ledger.settle("one", used(), entry=entry("one"))
            assert (await one.spent())["", TODAY] == (21, 0)
            assert one.counts["known"] == 1
            await one.exchange("free", tenant="b")  # has no budget
            assert await one.rows("SELECT micros, final FROM ledger_charges ORDER BY id") == [(30, True), (21, True)]
            assert await one.rows("SELECT count(*) FROM ledger_open") == [(0,)]
        async with gateway(server, schema, tmp_path / "journal", accounts) as again:
            found = [row async for row in usage_rows(again.store, UsageQuery(by=("tenant",)))]
            assert [(row.group["tenant"], row.sum.requests, row.sum.micros) for row in found] == [
                ("a", 1, 21),
                ("b", 1, 30),
            ]
            assert found[0].saved["prefix"].micros == 3
            assert await again.store.sources(UsageQuery()) == ["prefix"]

    asynchronous(test)


def test_one_budget_holds_across_gateways(server: Server, schema: str, tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(
            BudgetConfig(limit_micros=2000, period="day"), BudgetConfig(limit_micros=500, period="month", endpoint="/e")
        )
        random.seed(1)
        async with (
            gateway(server, schema, tmp_path / "one", accounts) as one,
            gateway(server, schema, tmp_path / "two", accounts) as two,
        ):

            async def exchange(each: Gateway, id: str, endpoint: str) -> None:
                verdict = await each.ledger.reserve(entry(id, endpoint=endpoint), output_tokens=10)
                if isinstance(verdict, Admitted):
                    await asyncio.sleep(random.random() * 0.01)
                    each.ledger.settle(id, used(output=random.randrange(11)))

            for round in range(3):
                await asyncio.gather(
                    *(
                        exchange(each, f"{round} {name} {number}", "/e" if number % 3 else CHAT)
                        for name, each in enumerate((one, two))
                        for number in range(40)
                    )
                )
            await asyncio.gather(one.ledger.flush(), two.ledger.flush())
            for number in range(80):
                await exchange(one, f"last {number}", CHAT)
            spent = await one.spent()
            assert 2000 - 30 < spent["", TODAY][0] <= 2000
            assert spent["/e", MONTH][0] <= 500
            assert {held for _, held in spent.values()} == {0}
            assert one.counts["unchecked"] == two.counts["unchecked"] == 0
            refused = await two.ledger.reserve(entry("refused"), output_tokens=10)
            assert isinstance(refused, BudgetRefusal)
            assert (refused.why, refused.retry_after) == ("budget", 12 * 3600)
            total = sum(micros for (micros,) in await one.rows("SELECT micros FROM ledger_charges"))
            assert await two.rows("SELECT sum(micros)::bigint FROM ledger_days") == [(total,)]
            assert spent["", TODAY][0] == total

    asynchronous(test)


def test_at_its_end_a_shared_budget_falls_to_its_variant(server: Server, schema: str) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=45, period="day", then="mini@int4"))
        async with gateway(server, schema, None, accounts) as one:
            await one.exchange("one")
            assert await one.ledger.reserve(entry("two"), output_tokens=10) == FallbackVariant("mini@int4")
            assert await one.ledger.reserve(entry("two", variant="mini@int4"), output_tokens=10) == Admitted(3)
            one.ledger.release("two")
            await one.ledger.flush()
            assert (await one.spent())["", TODAY] == (30, 0)

    asynchronous(test)


def test_a_running_answer_holds_more_or_is_stopped(server: Server, schema: str) -> None:
    async def test() -> None:
        async with gateway(server, schema, None, budgets(BudgetConfig(limit_micros=1000, period="day"))) as one:
            assert isinstance(await one.ledger.reserve(entry("one"), output_tokens=10), Admitted)
            tokens = 0
            while one.ledger.progress("one", tokens):
                tokens += 4
                while one.ledger._open["one"].extending:  # pyright: ignore[reportPrivateUsage]
                    await asyncio.sleep(0.001)
            spent, held = (await one.spent())["", TODAY]
            assert spent == 0
            assert held == 1000
            assert 10 + 2 * (tokens + 16) > 1000 >= 10 + 2 * (tokens + 12)
            one.ledger.settle("one", used(output=tokens))
            assert (await one.spent())["", TODAY] == (10 + 2 * tokens, 0)

    asynchronous(test)


def test_a_gateway_that_comes_back_charges_what_its_journal_says(server: Server, schema: str, tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=2000, period="day"))
        journal = tmp_path / "journal"
        async with gateway(server, schema, journal, accounts, abandoned=True) as one:
            for id in ("held", "running", "settled"):
                await one.ledger.reserve(entry(id), output_tokens=10)
            one.ledger.progress("running", 5)
            one.ledger.settle("settled", used())  # and dies before it is written
        async with gateway(server, schema, journal, accounts) as again:
            assert await again.spent() == {(e, p): (20 + 30, 0) for e in ("", CHAT) for p in (TODAY, MONTH)}
            rows = await again.rows("SELECT id, ended, micros FROM ledger_charges ORDER BY id")
            assert rows == [("held", "crashed", 0), ("running", "crashed", 20), ("settled", "finished", 30)]
            assert again.counts["recovered"] == 3

    asynchronous(test)


def test_a_gateway_that_does_not_come_back_is_charged_by_another(server: Server, schema: str, tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=2000, period="day"))
        journal = tmp_path / "journal"
        async with gateway(server, schema, journal, accounts, abandoned=True) as one:
            for id in ("held", "running"):
                await one.ledger.reserve(entry(id), output_tokens=10, most_tokens=10)
            await one.ledger.reserve(entry("without a budget", "b"), output_tokens=10)
            one.ledger.progress("running", 3)
            while (await one.rows("SELECT output_tokens FROM ledger_open WHERE id = 'running'")) != [(3,)]:
                await asyncio.sleep(0.01)
            one.ledger.progress("running", 5)  # nobody else hears of this
            held = await one.spent()
            assert held["", TODAY] == (0, 60)
        async with gateway(server, schema, tmp_path / "two", accounts, silent_s=0.05) as two:
            while two.counts["recovered"] < 3:
                await asyncio.sleep(0.05)
                await two.store._connections.run(lambda each: each.execute(_SEEN, two.store._run), 5.0)  # pyright: ignore
                await two.ledger.tend()
            assert (await two.spent())["", TODAY] == (16, 0)
            rows = await two.rows("SELECT id, ended, micros, final FROM ledger_charges ORDER BY id")
            assert rows == [
                ("held", "crashed", 0, False),
                ("running", "crashed", 16, False),
                ("without a budget", "crashed", 0, False),
            ]
            # It was alive after all, or is started again: what it says takes the place of what was guessed.
            async with gateway(server, schema, journal, accounts) as again:
                assert (await again.spent())["", TODAY] == (20, 0)
                assert await again.rows("SELECT id, micros, final FROM ledger_charges WHERE micros > 0") == [
                    ("running", 20, True)
                ]
                days = await again.rows("SELECT sum(micros)::bigint, sum(requests)::bigint FROM ledger_days")
                assert days == [(20, 3)]

    asynchronous(test)


_SEEN = "UPDATE ledger_gateways SET seen = now() WHERE run = $1"


def test_what_nobody_runs_any_more_is_not_held_for_good(server: Server, schema: str) -> None:
    async def test() -> None:
        async with gateway(
            server, schema, None, budgets(BudgetConfig(limit_micros=100, period="day")), left_s=0.0
        ) as one:
            await one.ledger.reserve(entry("lost"), output_tokens=10)
            await one.ledger.reserve(entry("runs"), output_tokens=10)
            del one.ledger._open["lost"]  # pyright: ignore[reportPrivateUsage]
            await one.ledger.tend()
            assert (await one.spent())["", TODAY] == (0, 30)
            assert await one.rows("SELECT id FROM ledger_open") == [("runs",)]
            one.ledger.release("runs")

    asynchronous(test)


def test_alerts_are_told_once_by_whichever_gateway(server: Server, schema: str) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=300, period="day"))
        async with gateway(server, schema, None, accounts) as one, gateway(server, schema, None, accounts) as two:
            for number in range(5):
                await asyncio.gather(*(each.exchange(f"{name} {number}") for name, each in (("1", one), ("2", two))))
            await asyncio.gather(one.ledger.flush(), two.ledger.flush())
            for each in (one, two):
                assert not isinstance(await each.ledger.reserve(entry("more"), output_tokens=10), Admitted)
            await two.ledger.flush()
            rows = await one.rows("SELECT percent FROM ledger_alerts ORDER BY percent")
            assert rows == [(0,), (50,), (80,), (100,)]
            assert one.counts["alerts"] + two.counts["alerts"] == 4
            claimed = await asyncio.gather(*(each.store.next_alert() for each in (one, two, one, two, one)))
            assert sorted(-1 if alert is None else alert.percent for alert in claimed) == [-1, 0, 50, 80, 100]
            for alert in claimed:
                if alert is not None:
                    await one.store.alert_done(alert, sent=True)
            assert await one.rows("SELECT count(*) FROM ledger_alerts WHERE sent") == [(4,)]

    asynchronous(test)


@pytest.mark.parametrize("when_down", ["open", "closed"])
def test_a_frozen_database_costs_a_bounded_wait(server: Server, schema: str, tmp_path: Path, when_down: Any) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=60, period="day"), when_down=when_down)
        async with gateway(server, schema, tmp_path / "journal", accounts, wait_s=0.3, left_s=0.0) as one:
            await one.exchange("before")
            await one.ledger.flush()
            with server.frozen():
                verdicts = await asyncio.gather(
                    *(one.ledger.reserve(entry(f"r{number}"), output_tokens=10) for number in range(20))
                )
                if when_down == "open":
                    assert verdicts == [Admitted(30, checked=False)] * 20
                    for number in range(20):
                        one.ledger.settle(f"r{number}", used())
                else:
                    assert verdicts == [UNAVAILABLE] * 20
                assert one.ledger.statistics().waiting == (20 if when_down == "open" else 0)
            while isinstance(verdict := await one.ledger.reserve(entry("after"), output_tokens=10), Admitted):
                if verdict.checked:
                    break
                one.ledger.release("after")
                await asyncio.sleep(0.05)
            one.ledger.release("after")
            await one.ledger.flush()
            expected = 630 if when_down == "open" else 30
            # What was asked for in vain may be run after it was let go of; then it is found, and let go of again.
            while (await one.spent())["", TODAY] != (expected, 0):
                await asyncio.sleep(0.05)
                await one.ledger.tend()

    asynchronous(test)


def test_what_is_held_after_nobody_waits_for_it_any_more_is_let_go_of(server: Server, schema: str) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=60, period="day"), when_down="closed")
        async with gateway(server, schema, None, accounts, wait_s=0.3, left_s=0.0) as one:
            await one.exchange("before")
            await one.ledger.flush()
            next_one = one.store._connections._idle[-1]  # pyright: ignore[reportPrivateUsage]
            pid = next_one.get_server_pid()
            os.kill(pid, signal.SIGSTOP)
            try:
                assert await one.ledger.reserve(entry("late"), output_tokens=10) == UNAVAILABLE
                await one.ledger.flush()  # over another connection, it is let go of
                assert await one.rows("SELECT id FROM ledger_open") == []
            finally:
                os.kill(pid, signal.SIGCONT)
            while not await one.rows("SELECT id FROM ledger_open"):  # and now it is held
                await asyncio.sleep(0.01)
            assert (await one.spent())["", TODAY] == (30, 30)
            await one.ledger.tend()
            assert (await one.spent())["", TODAY] == (30, 0)

    asynchronous(test)


def test_without_a_database_tenants_are_served_or_refused_as_declared(
    tmp_path: Path, server: Server, schema: str
) -> None:
    async def test() -> None:
        nowhere = "postgresql://tests@127.0.0.1:1/postgres"
        accounts = BudgetBook({"a": TenantBudgets((BudgetConfig(limit_micros=60, period="day"),), "closed")})
        async with gateway(nowhere, schema, tmp_path / "journal", accounts, wait_s=0.3) as one:
            assert await one.ledger.reserve(entry("closed"), output_tokens=10) == UNAVAILABLE
            await one.exchange("open", tenant="b")
        async with gateway(server, schema, tmp_path / "journal", accounts) as one:
            assert await one.rows("SELECT id, micros FROM ledger_charges") == [("open", 30)]

    asynchronous(test)


def test_tables_of_a_newer_version_are_left_alone(server: Server, schema: str) -> None:
    async def test() -> None:
        async with gateway(server, schema) as one:
            await one.store._connections.run(lambda each: each.execute("UPDATE ledger_schema SET version = 99"), 5.0)  # pyright: ignore
        with pytest.raises(SchemaError, match="version 99"):
            async with gateway(server, schema):
                pass
        with pytest.raises(SchemaError):
            PostgresLedgerStore(server.dsn, schema='x"; DROP TABLE')

    asynchronous(test)


def test_old_charges_go_and_sums_stay(server: Server, schema: str) -> None:
    async def test() -> None:
        async with gateway(server, schema) as one:
            await one.exchange("one")
            await one.ledger.flush()
            assert await one.store.prune(TODAY) == 0
            assert await one.store.prune("2025-11-23") == 1
            assert await one.rows("SELECT * FROM ledger_charges") == []
            assert (await one.spent())["", TODAY] == (30, 0)

    asynchronous(test)
