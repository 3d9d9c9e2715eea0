"""Leases of budgets: two gateways on a shared store that is late, gone or back, with clocks that are set by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import UNAVAILABLE, Admitted, BudgetBook, BudgetRefusal
from headrace.gateway.ledger.ledger import Ledger
from headrace.gateway.ledger.ledger_bounds import LedgerBounds
from headrace.gateway.ledger.ledger_records import BudgetScope
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous
from tests.support.stores.ledgers import CHAT, NOON, PRICES, budgets, entry, used
from tests.support.stores.shared_ledger import SharedLedger, SharedStore

LIMIT, COST = 10_000, 30  # micros, of the budget and of each request
TODAY = BudgetScope("a", "", "2025-11-22")


@dataclass
class Gateway:
    ledger: Ledger
    store: SharedStore

    async def serve(self, count: int, name: str = "r") -> list[str]:
        """Make requests, one after another; what became of each."""
        return [await self.ask(f"{name}{number}") for number in range(count)]

    async def ask(self, id: str) -> str:
        verdict = await self.ledger.reserve(entry(f"{self.store.run} {id}"), output_tokens=10)
        if isinstance(verdict, Admitted):
            self.ledger.settle(f"{self.store.run} {id}", used())
            return "served"
        assert isinstance(verdict, BudgetRefusal)
        return verdict.why


def day_budget(**options: object) -> BudgetBook:
    return budgets(BudgetConfig(limit_micros=LIMIT, period="day"), **options)  # type: ignore[arg-type]


@asynccontextmanager
async def gateway(
    shared: SharedLedger, accounts: BudgetBook | None = None, *, wait_s: float = 30.0
) -> AsyncGenerator[Gateway]:
    store = SharedStore(shared)
    ledger = Ledger(
        store,
        prices=PRICES,
        accounts=accounts or day_budget(),
        bounds=LedgerBounds(exchanges=4096, gather_s=0.0, wait_s=wait_s, lease_s=shared.lease_s, drain_s=5.0),
        clock=Clock(NOON),
        monotonic=shared.clock,
    )
    await ledger.open()
    try:
        yield Gateway(ledger, store)
    finally:
        store.broken = False
        store.calls_pass.set()
        store.answers_pass.set()
        await ledger.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_what_fits_into_the_lease_does_not_ask_the_database() -> None:
    async def test() -> None:
        async with gateway(SharedLedger(Clock(1000.0))) as one:
            assert await one.serve(1) == ["served"]
            assert one.store.asked == 1
            one.store.calls_pass.clear()  # from now on, whoever asks waits
            assert await one.serve(40, "more") == ["served"] * 40

    asynchronous(test)


def test_a_late_answer_is_waited_for_and_switches_nothing_off() -> None:
    async def test() -> None:
        async with gateway(SharedLedger(Clock(1000.0))) as one:
            one.store.answers_pass.clear()
            asking = [asyncio.create_task(one.ask(f"r{number}")) for number in range(1000)]
            await until(lambda: one.store.asked == 1)
            assert not any(task.done() for task in asking)
            one.store.answers_pass.set()
            found = await asyncio.gather(*asking)
            assert found.count("served") == LIMIT // COST
            assert set(found) <= {"served", "budget", "held"}
            await one.ledger.flush()
            assert one.store.ledger.spent[TODAY] == LIMIT // COST * COST

    asynchronous(test)


@pytest.mark.parametrize("when_down", ["lease", "open", "closed"])
def test_a_database_that_is_gone_bounds_spending_as_declared(when_down: str) -> None:
    async def test() -> None:
        shared = SharedLedger(Clock(1000.0))
        async with gateway(shared, day_budget(when_down=when_down)) as one, gateway(shared) as two:
            assert await one.serve(1) == ["served"]
            assert await two.serve(1) == ["served"]
            one.store.broken = True
            found = await one.serve(1000, "gone")
            served = found.count("served")
            # A quarter of what was left, for two gateways, was leased at first.
            leased = (LIMIT // 8 - COST) // COST
            match when_down:
                case "lease":
                    assert (served, set(found[served:])) == (leased, {"store"})
                case "open":  # by the last known sum, which it never passes
                    assert (served, set(found[served:])) == ((LIMIT - COST) // COST, {"budget"})
                case _:  # until three failures, which the first requests beyond the lease meet
                    assert (served, set(found[served:])) == (leased, {"store"})
            one.store.broken = False
            await one.ledger.renew()
            await one.ledger.flush()
            await two.ledger.flush()
            found = await two.serve(1000, "rest")
            assert "store" not in found
            await two.ledger.flush()
            overspent = shared.spent[TODAY] - LIMIT
            assert overspent <= (served * COST - leased * COST if when_down == "open" else 0)

    asynchronous(test)


def test_three_failures_in_a_row_make_it_down_and_one_answer_brings_it_back() -> None:
    async def test() -> None:
        async with gateway(SharedLedger(Clock(1000.0)), day_budget(when_down="closed")) as one:
            one.store.broken = True
            for number in range(3):
                assert not one.ledger.statistics().down
                verdict = await one.ledger.reserve(entry(f"r{number}"), output_tokens=10)
                assert verdict == UNAVAILABLE
            assert one.ledger.statistics().down
            one.store.broken = False
            await one.ledger.renew()
            assert not one.ledger.statistics().down
            assert await one.serve(1, "after") == ["served"]

    asynchronous(test)


def test_an_answer_that_never_comes_makes_it_down_and_ends_the_wait() -> None:
    async def test() -> None:
        async with gateway(SharedLedger(Clock(1000.0)), wait_s=0.01) as one:
            one.store.calls_pass.clear()
            assert await one.serve(1) == ["store"]
            await until(lambda: one.ledger.statistics().down)
            assert await one.serve(50, "down") == ["store"] * 50

    asynchronous(test)


def test_a_lease_that_ran_out_is_not_used_and_goes_to_others() -> None:
    async def test() -> None:
        clock = Clock(1000.0)
        shared = SharedLedger(clock)
        async with gateway(shared) as one, gateway(shared) as two:
            await one.serve(1)
            one.store.broken = True
            clock.now += 53.0
            assert await one.serve(1, "still") == ["served"]
            await two.ledger.renew()
            clock.now += 2.0  # 54 s are nine tenths of 60
            assert await one.serve(1, "too late") == ["store"]
            clock.now += 5.0  # the database has freed it
            found = await two.serve(1000)
            assert found.count("served") == LIMIT // COST  # nobody knows of the charges that are not written yet
            await two.ledger.flush()
            one.store.broken = False
            await one.ledger.renew()
            await one.ledger.flush()
            # It came back, lost its lease, and its charges are counted: no more than its lease was overspent.
            assert shared.spent[TODAY] <= LIMIT + LIMIT // 4
            assert set(await one.serve(5, "back")) == {"budget"}

    asynchronous(test)


def test_what_is_not_used_goes_to_the_gateway_that_needs_it() -> None:
    async def test() -> None:
        clock = Clock(1000.0)
        shared = SharedLedger(clock)
        async with gateway(shared) as one, gateway(shared) as two:
            await one.serve(1)  # and holds a share
            await one.ledger.flush()
            found = await two.serve(1000)
            await two.ledger.flush()
            assert found[-1] == "held"
            await one.ledger.renew()  # gives it back
            clock.now += 2.0
            found = await two.serve(1000, "rest")
            assert found[-1] == "budget"
            await asyncio.gather(one.ledger.flush(), two.ledger.flush())
            assert LIMIT - COST < shared.spent[TODAY] <= LIMIT

    asynchronous(test)


def test_what_is_too_little_for_one_request_is_not_split_between_gateways() -> None:
    async def test() -> None:
        clock = Clock(1000.0)
        shared = SharedLedger(clock)
        async with gateway(shared) as one, gateway(shared) as two:
            found: list[str] = []
            for step in range(800):
                found.append(await (one, two)[step % 2].ask(f"r{step}"))
                if found[-1] == "held":  # the other one gives back, each second
                    await asyncio.gather(one.ledger.flush(), two.ledger.flush())
                    await asyncio.gather(one.ledger.renew(), two.ledger.renew())
                    clock.now += 1.0
            await asyncio.gather(one.ledger.flush(), two.ledger.flush())
            assert shared.spent[TODAY] == LIMIT // COST * COST
            assert found[-1] == "budget"

    asynchronous(test)


def test_a_clean_shutdown_gives_leases_back_at_once() -> None:
    async def test() -> None:
        shared = SharedLedger(Clock(1000.0))
        async with gateway(shared) as two:
            async with gateway(shared) as one:
                await one.serve(1)
            assert (await two.serve(1000)).count("served") == (LIMIT - COST) // COST

    asynchronous(test)


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    async def test() -> None:
        shared = SharedLedger(Clock(1000.0))
        async with gateway(shared) as one, gateway(shared) as two:
            await one.serve(1)
            await one.ledger.flush()
            holds = one.ledger._holds  # pyright: ignore[reportPrivateUsage]
            old = shared.reading(TODAY, one.store.run)
            await two.serve(1000)
            await one.ledger.renew()  # has given back what the old answer says it has
            holds.apply({TODAY: old})
            clock = one.ledger._monotonic  # pyright: ignore[reportPrivateUsage]
            assert isinstance(clock, Clock)
            clock.now += 2.0
            await two.serve(1000, "rest")
            await one.serve(100, "again")
            await asyncio.gather(one.ledger.flush(), two.ledger.flush())
            assert shared.spent[TODAY] <= LIMIT

    asynchronous(test)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_failures_overspends_while_leases_last(seed: int) -> None:
    """Calls and answers are held back, fail and pass at random while two gateways serve within the budget."""

    async def test() -> None:
        chance = random.Random(seed)
        clock = Clock(1000.0)
        shared = SharedLedger(clock, percent=chance.choice([1, 25, 100]))
        async with gateway(shared, wait_s=0.005) as one, gateway(shared, wait_s=0.005) as two:
            asking: list[asyncio.Task[str]] = []
            for step in range(120):
                each = chance.choice([one, two])
                match chance.randrange(8):
                    case 0:
                        each.store.calls_pass.clear()
                    case 1:
                        each.store.answers_pass.clear()
                    case 2:
                        each.store.broken = chance.random() < 0.5
                    case 3:
                        clock.now += chance.choice([0.2, 1.5])
                    case 4:
                        asking.append(asyncio.create_task(_renewed(each)))
                    case _:
                        each.store.calls_pass.set()
                        each.store.answers_pass.set()
                asking += [asyncio.create_task(each.ask(f"{step} {number}")) for number in range(chance.randrange(12))]
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            for each in (one, two):
                each.store.broken = False
                each.store.calls_pass.set()
                each.store.answers_pass.set()
            found = await asyncio.gather(*asking)
            assert "served" in found
            await asyncio.gather(one.ledger.flush(), two.ledger.flush())
            assert shared.spent[TODAY] == found.count("served") * COST <= LIMIT
            assert shared.spent[BudgetScope("a", CHAT, TODAY.period)] == shared.spent[TODAY]

    asynchronous(test)


async def _renewed(each: Gateway) -> str:
    try:
        await each.ledger.renew()
    except ConnectionError:
        return "failed"
    return "renewed"
