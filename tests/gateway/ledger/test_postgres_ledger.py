"""The ledger in Postgres: one budget for several gateways, gateways that die, and a database that does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.drills.tcp_proxy import TcpProxy
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
from tests.support.programs.postgres_server import Server, serving, why_not
from tests.support.stores.ledgers import CHAT, NOON, PRICES, budgets, entry, used

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
    monotonic: Clock
    counts: Counter[LedgerEvent] = field(default_factory=Counter[LedgerEvent])

    async def rows(self, statement: str) -> list[tuple[Any, ...]]:
        await self.ledger.flush()
        found = await self.store._connections.run(lambda each: each.fetch(statement), 5.0)  # pyright: ignore
        return [tuple(row) for row in found]

    async def spent(self) -> dict[tuple[str, str], int]:
        rows = await self.rows("SELECT endpoint, period, spent FROM ledger_periods WHERE tenant = 'a'")
        return {(endpoint, period): spent for endpoint, period, spent in rows}

    async def leased(self) -> list[int]:
        """What each gateway has leased of tenant a's budget of today."""
        rows = await self.rows(f"SELECT leased FROM ledger_leases WHERE period = '{TODAY}' AND endpoint = ''")
        return sorted(leased for (leased,) in rows)

    async def exchange_with(self, other: Gateway, id: str) -> int:
        """Exchange; as long as the other gateway holds what is left of the budget, have it give that back."""
        while not isinstance(await self.ledger.reserve(entry(id), output_tokens=10), Admitted):
            await other.ledger.flush()
            await other.ledger.renew()  # gives nothing back while a background lease of its own is under way
            self.monotonic.now += 2.0
        return self.ledger.settle(id, used()).micros

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
    real_time: bool = False,
    **options: Any,
) -> AsyncGenerator[Gateway, None]:
    dsn = server if isinstance(server, str) else server.dsn
    lease_s = options.setdefault("lease_s", 60.0)
    store = PostgresLedgerStore(dsn, schema=schema, **options)
    counts: Counter[LedgerEvent] = Counter()
    monotonic = Clock(1000.0)

    def count(event: LedgerEvent, number: int) -> None:
        counts[event] += number

    ledger = Ledger(
        store,
        prices=PRICES,
        accounts=accounts,
        journal=journal,
        bounds=LedgerBounds(exchanges=2048, gather_s=0.0, wait_s=wait_s, lease_s=lease_s, sync_s=0.02, drain_s=2.0),
        clock=Clock(NOON),
        monotonic=time.monotonic if real_time else monotonic,
        count=count,
    )
    try:
        await ledger.open()
        yield Gateway(ledger, store, monotonic, counts)
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
            assert await one.ledger.reserve(entry("one"), output_tokens=50) == Admitted(110)
            # A quarter of what is left, which is more than the request needs.
            leases = await one.rows("SELECT endpoint, period, leased FROM ledger_leases ORDER BY endpoint, period")
            assert leases == [("", TODAY, 250), (CHAT, MONTH, 1250)]
            receipt = one.ledger.settle("one", used(10, 7, cached=4))
            assert (receipt.micros, receipt.saved) == (21, {"prefix": 3})
            assert await one.spent() == {(e, p): 21 for e in ("", CHAT) for p in (TODAY, MONTH)}
            assert await one.leased() == [250 - 21]
            assert await one.rows("SELECT * FROM ledger_open") == []
            one.ledger._receipts.clear()  # pyright: ignore[reportPrivateUsage]
            one.ledger.settle("one", used(), entry=entry("one"))
            assert (await one.spent())["", TODAY] == 21
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
                await two.ledger.renew()  # gives back what it does not use, since the other one wants it
                one.monotonic.now += 2.0
            spent = await one.spent()
            assert 2000 - 30 < spent["", TODAY] <= 2000
            assert spent["/e", MONTH] <= 500
            assert one.counts["unchecked"] == two.counts["unchecked"] == 0
            two.monotonic.now += 2.0
            refused = await two.ledger.reserve(entry("refused"), output_tokens=10)
            assert isinstance(refused, BudgetRefusal)
            assert (refused.why, refused.retry_after) == ("budget", 12 * 3600)
            total = sum(micros for (micros,) in await one.rows("SELECT micros FROM ledger_charges"))
            assert await two.rows("SELECT sum(micros)::bigint FROM ledger_days") == [(total,)]
            assert spent["", TODAY] == total

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
            assert (await one.spent())["", TODAY] == 30

    asynchronous(test)


def test_a_running_answer_holds_more_or_is_stopped(server: Server, schema: str) -> None:
    async def test() -> None:
        async with gateway(server, schema, None, budgets(BudgetConfig(limit_micros=1000, period="day"))) as one:
            assert isinstance(await one.ledger.reserve(entry("one"), output_tokens=10), Admitted)
            tokens = 0
            while one.ledger.progress("one", tokens) or await one.ledger.extend("one", tokens):
                tokens += 4
            assert (await one.spent()).get(("", TODAY)) == 0
            assert 1000 - 2 * 16 < (await one.leased())[0] <= 1000
            assert 10 + 2 * (tokens + 16) > 1000 >= 10 + 2 * (tokens + 12)
            one.ledger.settle("one", used(output=tokens))
            assert (await one.spent())["", TODAY] == 10 + 2 * tokens

    asynchronous(test)


def test_a_gateway_that_comes_back_charges_what_its_journal_says(server: Server, schema: str, tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=2000, period="day"))
        journal = tmp_path / "journal"
        async with gateway(server, schema, journal, accounts, abandoned=True) as one:
            for id in ("held", "running", "settled"):
                await one.ledger.reserve(entry(id), output_tokens=10)
            one.ledger.sent("running", 5)
            one.ledger.settle("settled", used())  # and dies before it is written
        async with gateway(server, schema, journal, accounts) as again:
            assert await again.spent() == {(e, p): 20 + 30 for e in ("", CHAT) for p in (TODAY, MONTH)}
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
            one.ledger.sent("running", 3)
            while (await one.rows("SELECT output_tokens FROM ledger_open WHERE id = 'running'")) != [(3,)]:
                await asyncio.sleep(0.01)
            one.ledger.sent("running", 5)  # nobody else hears of this
            assert (await one.spent())["", TODAY] == 0
        async with gateway(server, schema, tmp_path / "two", accounts, silent_s=0.05) as two:
            while two.counts["recovered"] < 3:
                await asyncio.sleep(0.05)
                await two.store._connections.run(lambda each: each.execute(_SEEN, two.store._run), 5.0)  # pyright: ignore
                await two.ledger.tend()
            assert (await two.spent())["", TODAY] == 16
            rows = await two.rows("SELECT id, ended, micros, final FROM ledger_charges ORDER BY id")
            assert rows == [
                ("held", "crashed", 0, False),
                ("running", "crashed", 16, False),
                ("without a budget", "crashed", 0, False),
            ]
            # It was alive after all, or is started again: what it says takes the place of what was guessed.
            async with gateway(server, schema, journal, accounts) as again:
                assert (await again.spent())["", TODAY] == 20
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
            await one.ledger.flush()
            del one.ledger._open["lost"]  # pyright: ignore[reportPrivateUsage]
            await one.ledger.tend()
            assert await one.rows("SELECT id FROM ledger_open") == [("runs",)]
            one.ledger.release("runs")

    asynchronous(test)


def test_alerts_are_told_once_by_whichever_gateway(server: Server, schema: str) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=300, period="day"))
        async with gateway(server, schema, None, accounts) as one, gateway(server, schema, None, accounts) as two:
            for number in range(5):
                for name, each, other in (("1", one, two), ("2", two, one)):
                    await each.exchange_with(other, f"{name} {number}")
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


@pytest.mark.parametrize("when_down", ["lease", "open", "closed"])
def test_a_frozen_database_costs_a_bounded_wait(server: Server, schema: str, tmp_path: Path, when_down: Any) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=300, period="day"), when_down=when_down)
        async with gateway(server, schema, tmp_path / "journal", accounts) as one:
            await one.exchange("before")  # leases 75 micros: enough for one more
            await one.ledger.flush()
            one.ledger._holds.leases._wait_s = 0.1  # pyright: ignore  # only now: a busy database may take longer
            with server.frozen():
                served = 0
                for number in range(20):
                    verdict = await one.ledger.reserve(entry(f"r{number}"), output_tokens=10)
                    if isinstance(verdict, Admitted):
                        served += 1
                        one.ledger.settle(f"r{number}", used())
                    elif served < 9 or when_down != "open":
                        assert verdict == UNAVAILABLE
                    else:  # it is spent, as far as anybody knows
                        assert isinstance(verdict, BudgetRefusal)
                        assert verdict.why == "budget"
                assert served == {"lease": 1, "open": 9, "closed": 1}[when_down]
                assert one.ledger.statistics().waiting == served
                assert one.ledger.statistics().down
            while one.ledger.statistics().down:
                with contextlib.suppress(TimeoutError, OSError):
                    await one.ledger.renew()
            await one.ledger.flush()
            assert (await one.spent())["", TODAY] == 30 * (1 + served)

    asynchronous(test)


@pytest.mark.parametrize("fault", ["none", "slow", "frozen", "flapping"])
def test_a_thousand_clients_of_two_gateways_never_overspend(
    server: Server, schema: str, tmp_path: Path, fault: str
) -> None:
    limit, cost = 20_000, 30
    accounts = budgets(BudgetConfig(limit_micros=limit, period="day"))

    async def client(each: Gateway, name: str, stop: asyncio.Event) -> None:
        pause = 0.1  # doubled, as clients do: a thousand that ask ten times a second keep a busy machine from the rest
        for number in range(100):
            verdict = await each.ledger.reserve(entry(f"{name} {number}"), output_tokens=10)
            if isinstance(verdict, Admitted):
                assert verdict == Admitted(cost)
                await asyncio.sleep(0)
                each.ledger.settle(f"{name} {number}", used())
            elif (isinstance(verdict, BudgetRefusal) and verdict.why == "budget") or stop.is_set():
                return
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)
                pause = min(5.0, 2 * pause)

    async def test() -> None:
        async with TcpProxy(server.port) as proxy:
            dsn = f"postgresql://tests@127.0.0.1:{proxy.port}/postgres"
            async with (
                gateway(dsn, schema, tmp_path / "one", accounts, wait_s=0.5, real_time=True) as one,
                gateway(dsn, schema, tmp_path / "two", accounts, wait_s=0.5, real_time=True) as two,
            ):
                stop = asyncio.Event()
                proxy.delay_s = 0.03 if fault == "slow" else 0.0
                clients_of = [(one, list[asyncio.Task[None]]()), (two, list[asyncio.Task[None]]())]
                for number in range(500):
                    for each, tasks in clients_of:
                        tasks.append(asyncio.create_task(client(each, f"{id(each)} {number}", stop)))
                clients = [task for _, tasks in clients_of for task in tasks]
                match fault:
                    case "frozen":
                        while not (one.counts["admitted"] or two.counts["admitted"]):
                            await asyncio.sleep(0)
                        proxy.freeze()
                        # A gateway that knew the budget as spent before asks no more, and notices nothing.
                        for each, tasks in clients_of:
                            while not (each.ledger.statistics().down or all(task.done() for task in tasks)):
                                await asyncio.sleep(0.05)
                        stop.set()  # before it answers again: what was leased was served, and no more
                        await asyncio.gather(*clients)
                        proxy.resume()
                    case "flapping":
                        while not (one.counts["admitted"] or two.counts["admitted"]):
                            await asyncio.sleep(0)
                        for _ in range(10):
                            proxy.cut()
                            await asyncio.sleep(0.05)
                        stop.set()
                    case _:
                        pass
                await asyncio.gather(*clients)
                await asyncio.gather(one.ledger.flush(), two.ledger.flush())
                spent = (await one.spent())["", TODAY]
                served = one.counts["settled"] + two.counts["settled"]
                assert spent == served * cost <= limit
                assert one.counts["unchecked"] == two.counts["unchecked"] == 0
                if fault in ("none", "slow"):
                    assert spent > limit - cost

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
            assert (await one.spent())["", TODAY] == 30

    asynchronous(test)
