"""The ledger: exchanges are charged once, budgets hold, and what cannot be written is kept."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import FULL, UNAVAILABLE, Admitted, BudgetRefusal, FallbackVariant, TenantBudgets
from headrace.gateway.ledger.ledger import LedgerError
from headrace.gateway.ledger.ledger_bounds import LedgerBounds
from headrace.gateway.ledger.prices import Price, PriceBook
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous
from tests.support.stores.ledgers import CHAT, DAY, NOON, PRICES, Opened, budgets, entry, ledger_in, used

TODAY, MONTH = "2025-11-22", "2025-11"
# 10 tokens of input and 10 of output cost 30 micros with "mini".


async def admitted(opened: Opened, id: str, output: int = 10, **options: object) -> Admitted:
    verdict = await opened.ledger.reserve(entry(id, **options), output_tokens=output)  # type: ignore[arg-type]
    assert isinstance(verdict, Admitted), verdict
    return verdict


def test_an_exchange_is_charged_what_it_took_and_only_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path) as opened:
            ledger = opened.ledger
            assert await admitted(opened, "one", output=100) == Admitted(210)
            assert await ledger.reserve(entry("one"), output_tokens=100) == Admitted(0)  # there is no budget to hold
            first = ledger.settle("one", used(10, 7, cached=4))
            assert (first.micros, first.saved) == (6 + 1 + 14, {"prefix": 3})
            assert ledger.settle("one", used(99, 99)) == first
            await ledger.flush()
            assert ledger.settle("one", used(99, 99)) == first
            assert await opened.charges() == {"one": 21}
            assert await opened.spent() == {(e, p): 21 for e in ("", CHAT) for p in (TODAY, MONTH)}
            with pytest.raises(LedgerError):
                ledger.settle("two", used())
            ledger.settle("two", used(), entry=entry("two"))
            assert (await opened.charges())["two"] == 30
            assert opened.counts["settled"] == 2
            with pytest.raises(LedgerError):
                await ledger.reserve(entry("one"), output_tokens=1)
        assert ledger.statistics().open == ledger.statistics().waiting == 0

    asynchronous(test)


def test_a_charge_that_the_store_has_is_not_counted_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=100, period="day"))) as opened:
            await opened.exchange("one")
            await opened.ledger.flush()
            opened.ledger._receipts.clear()  # pyright: ignore[reportPrivateUsage]
            opened.ledger.settle("one", used(), entry=entry("one"))
            await opened.ledger.flush()
            assert opened.counts["known"] == 1
            (standing,) = opened.ledger.standings("a")
            assert (standing.spent, standing.held) == (30, 0)
            assert (await opened.spent())["", TODAY] == 30

    asynchronous(test)


def test_caches_and_routes_are_told_what_they_saved(tmp_path: Path) -> None:
    prices = PriceBook({"mini": Price(1_000_000, 0, 1_000_000), "mini@int4": Price(100_000, 100_000, 100_000)})
    half = PriceBook({"mini": Price(1_000_000, 0, 1_000_000, 0, 50)})

    async def test() -> None:
        async with ledger_in(tmp_path / "a", prices=prices) as opened:
            ledger = opened.ledger
            await admitted(opened, "hit")
            receipt = ledger.settle("hit", used(), hit="exact")
            assert (receipt.micros, receipt.saved) == (0, {"exact": 20})
            await admitted(opened, "routed", variant="mini@int4")
            receipt = ledger.settle("routed", used(), instead_of="mini", route="cascade")
            assert (receipt.micros, receipt.saved) == (2, {"cascade": 18})
            await admitted(opened, "dearer", variant="mini")
            receipt = ledger.settle("dearer", used(), variant="mini", instead_of="mini@int4")
            assert (receipt.micros, receipt.saved) == (20, {"route": -18})
            await admitted(opened, "elsewhere")
            assert (ledger.settle("elsewhere", used(), variant="mini@int4")).micros == 2
        async with ledger_in(tmp_path / "b", prices=half) as opened:
            await admitted(opened, "hit")
            receipt = opened.ledger.settle("hit", used(), hit="semantic")
            assert (receipt.micros, receipt.saved) == (10, {"semantic": 10})

    asynchronous(test)


def test_a_release_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=30, period="day"))) as opened:
            await admitted(opened, "one")
            opened.ledger.release("one")
            await admitted(opened, "two")
            opened.ledger.release("none")
            opened.ledger.settle("two", used())
            opened.ledger.release("two")
            assert await opened.charges() == {"two": 30}

    asynchronous(test)


def test_concurrent_requests_never_spend_more_than_there_is(tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(
            BudgetConfig(limit_micros=3000, period="day"),
            BudgetConfig(limit_micros=2000, period="month"),
            BudgetConfig(limit_micros=900, period="day", endpoint="/e"),
        )
        async with ledger_in(
            tmp_path, accounts, bounds=LedgerBounds(exchanges=2000, gather_s=0.0, wait_s=5.0)
        ) as opened:
            random.seed(1)
            served = 0

            async def one(number: int) -> None:
                nonlocal served
                endpoint = "/e" if number % 3 == 0 else CHAT
                found = entry(f"r{number}", endpoint=endpoint)
                verdict = await opened.ledger.reserve(found, output_tokens=10, most_tokens=10)
                if isinstance(verdict, Admitted):
                    served += 1
                    await asyncio.sleep(random.random() * 0.01)
                    assert opened.ledger.progress(found.id, 5)
                    opened.ledger.settle(found.id, used(output=random.randrange(11)))

            for _ in range(3):
                await asyncio.gather(*(one(random.randrange(10**9)) for _ in range(300)))
            spent = await opened.spent()
            assert spent["", MONTH] <= 2000
            assert spent["/e", TODAY] <= 900
            for number in range(100):
                await one(-number)
            assert 2000 - 30 < (await opened.spent())["", MONTH] <= 2000
            assert all(standing.held == 0 for standing in opened.ledger.standings("a"))
            assert served == opened.counts["admitted"] == opened.counts["settled"]

    asynchronous(test)


def test_an_answer_that_grows_reserves_more_or_is_stopped_in_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=1000, period="day"))) as opened:
            await admitted(opened, "one", output=10)
            ledger, tokens = opened.ledger, 0
            while ledger.progress("one", tokens) or await ledger.extend("one", tokens):
                tokens += 1
            # After it was told, the engine may make as many as are reserved ahead: 10 + 2 · tokens + 2 · 16 = 1000.
            assert 10 + 2 * (tokens + 15) == 1000
            receipt = ledger.settle("one", used(output=tokens + 15))
            assert receipt.micros == 1000
            (standing,) = ledger.standings("a")
            assert (standing.spent, standing.held) == (1000, 0)
            assert opened.counts["stopped"] == 1

    asynchronous(test)


def test_an_answer_is_not_stopped_for_tokens_that_it_cannot_have(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=30, period="day"))) as opened:
            assert isinstance(await opened.ledger.reserve(entry("one"), output_tokens=10, most_tokens=10), Admitted)
            assert all(opened.ledger.progress("one", tokens) for tokens in range(11))
            assert opened.ledger.progress("nobody's", 5)

    asynchronous(test)


def test_machine_time_is_estimated_as_others_took_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=10_000_000, period="day"))) as opened:
            assert await admitted(opened, "one", variant="timed") == Admitted(0)
            assert (opened.ledger.settle("one", used(10, 10, seconds=2.0))).micros == 2_000_000
            assert await admitted(opened, "two", variant="timed", output=30) == Admitted(4_000_000)
            assert opened.ledger.progress("two", 10, machine_s=3.0)
            opened.ledger.release("two")
            given = await opened.ledger.reserve(entry("three", variant="timed"), output_tokens=30, machine_s=0.5)
            assert given == Admitted(500_000)

    asynchronous(test)


def test_the_end_of_a_budget_refuses_or_falls_to_a_variant(tmp_path: Path) -> None:
    async def test() -> None:
        falling = BudgetConfig(limit_micros=60, period="day", then="mini@int4")
        async with ledger_in(tmp_path, budgets(falling)) as opened:
            ledger = opened.ledger
            await opened.exchange("one")
            await admitted(opened, "two", output=5)  # 20 of the 30 that are left
            assert await ledger.reserve(entry("three"), output_tokens=10) == FallbackVariant("mini@int4")
            assert await admitted(opened, "three", variant="mini@int4") == Admitted(3)
            for number in range(2):
                await admitted(opened, f"small {number}", variant="mini@int4")
            assert await ledger.reserve(entry("four", variant="mini@int4"), output_tokens=10) == BudgetRefusal(
                "held", 1.0, "Running requests and other gateways hold the rest of the budget. Try again in a moment."
            )
            ledger.settle("two", used(output=5))
            for number in range(2):
                ledger.settle(f"small {number}", used())
            ledger.settle("three", used())
            refused = await ledger.reserve(entry("five"), output_tokens=10)
            assert isinstance(refused, BudgetRefusal)
            assert (refused.why, refused.retry_after) == ("budget", 12 * 3600)
            assert opened.counts["fallback"] == 1
            assert (await opened.spent())["", TODAY] == 30 + 20 + 9

    asynchronous(test)


def test_a_budget_of_an_endpoint_counts_that_endpoint_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=30, period="day", endpoint="/e"))) as opened:
            await opened.exchange("one", endpoint="/e")
            assert isinstance(await opened.ledger.reserve(entry("two", endpoint="/e"), output_tokens=10), BudgetRefusal)
            await opened.exchange("three")
            assert isinstance(await opened.ledger.reserve(entry("four", "b", endpoint="/e"), output_tokens=9), Admitted)
            opened.ledger.settle("four", used())

    asynchronous(test)


def test_a_restart_knows_what_is_spent(tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=70, period="month"))
        async with ledger_in(tmp_path, accounts) as opened:
            await opened.exchange("one")
        async with ledger_in(tmp_path, accounts) as opened:
            await opened.exchange("two")
            refused = await opened.ledger.reserve(entry("three"), output_tokens=10)
            assert isinstance(refused, BudgetRefusal)
            assert refused.why == "budget"

    asynchronous(test)


def test_a_charge_belongs_to_the_day_of_its_reservation(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock(NOON)
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=60, period="day")), clock=clock) as opened:
            await admitted(opened, "late")
            clock.now += DAY
            await opened.exchange("next day")
            opened.ledger.settle("late", used())
            spent = await opened.spent()
            assert (spent["", TODAY], spent["", "2025-11-23"], spent["", MONTH]) == (30, 30, 60)

    asynchronous(test)


def test_a_clock_that_jumps_opens_no_budget_twice(tmp_path: Path) -> None:
    async def test() -> None:
        clock, accounts = Clock(NOON), budgets(BudgetConfig(limit_micros=30, period="day"))

        async def spends(opened: Opened, id: str) -> bool:
            verdict = await opened.ledger.reserve(entry(id), output_tokens=10)
            if isinstance(verdict, Admitted):
                opened.ledger.settle(id, used())
            return isinstance(verdict, Admitted)

        async with ledger_in(tmp_path, accounts, clock=clock) as opened:
            days = [0, -3, 400, 0, -3, 400, 0]
            found: list[bool] = []
            for number, day in enumerate(days):
                clock.now = Clock(NOON).now + day * DAY
                await opened.ledger.flush()
                await opened.ledger.tend()  # forgets periods that are over
                found.append(await spends(opened, f"r{number}"))
            assert found == [True, True, True, False, False, False, False]
        async with ledger_in(tmp_path, accounts, clock=clock) as opened:
            assert not await spends(opened, "after a restart")
            assert len(opened.alerts()) == 3 * 4  # 50, 80, 100 percent and a refusal, once for each day

    asynchronous(test)


def test_another_account_counts_what_runs_and_what_was_spent(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(tenant="nobody")) as opened:
            ledger = opened.ledger
            opened.store.open_gate.clear()
            await opened.exchange("written later")
            await admitted(opened, "running")
            ledger.declare("a", TenantBudgets((BudgetConfig(limit_micros=100, period="day"),)))
            opened.store.open_gate.set()
            assert isinstance(await ledger.reserve(entry("more"), output_tokens=31), BudgetRefusal)
            (standing,) = ledger.standings("a")
            assert (standing.spent, standing.held) == (30, 0)  # nothing was held for it while there was no budget
            ledger.settle("running", used())
            await ledger.flush()
            assert ledger.standings("a")[0].spent == 60
            ledger.declare("a", TenantBudgets((BudgetConfig(limit_micros=61, period="day"),)))
            assert isinstance(await ledger.reserve(entry("again"), output_tokens=1), BudgetRefusal)
            assert ledger.standings("a")[0].spent == 60
            ledger.declare("a", None)
            await opened.exchange("uncounted")
            ledger.declare("a", TenantBudgets((BudgetConfig(limit_micros=91, period="day"),)))
            assert isinstance(await ledger.reserve(entry("again"), output_tokens=1), BudgetRefusal)
            assert ledger.standings("a")[0].spent == 90

    asynchronous(test)


# When the store is slow or gone


def behind(exchanges: int = 256, wait_s: float = 0.05) -> LedgerBounds:
    return LedgerBounds(exchanges=exchanges, gather_s=0.0, wait_s=wait_s, sync_s=0.05, drain_s=0.5)


@pytest.mark.parametrize("when_down", ["lease", "open", "closed"])
def test_while_the_store_is_behind_a_tenant_is_served_or_refused_as_declared(tmp_path: Path, when_down: str) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=10_000, period="day"), when_down=when_down)
        async with ledger_in(tmp_path, accounts) as opened:
            await opened.exchange("one")
            await opened.ledger.flush()
            opened.store.open_gate.clear()
            await opened.exchange("two")
            await opened.exchange("three")  # not late yet
            opened.monotonic.now += 10.0
            verdict = await opened.ledger.reserve(entry("four"), output_tokens=10)
            assert opened.ledger.statistics().behind_s == 10.0
            if when_down != "closed":
                assert verdict == Admitted(30)  # the sums are in memory, and exact
                opened.ledger.settle("four", used())
            else:
                assert verdict == UNAVAILABLE
                error = UNAVAILABLE.error()
                assert (error.status, error.code, error.retry_after) == (503, "ledger_unavailable", 1.0)
            opened.store.open_gate.set()
            await opened.ledger.flush()
            await opened.exchange("five")
            assert (await opened.spent())["", TODAY] == (4 if when_down == "closed" else 5) * 30

    asynchronous(test)


@pytest.mark.parametrize("when_down", ["lease", "open", "closed"])
def test_sums_that_cannot_be_read_are_not_waited_for_without_end(tmp_path: Path, when_down: str) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=150, period="day"), when_down=when_down)
        async with ledger_in(tmp_path, accounts, bounds=behind()) as opened:
            opened.store.open_gate.clear()
            verdicts = await asyncio.gather(
                *(opened.ledger.reserve(entry(f"r{number}"), output_tokens=10) for number in range(5))
            )
            if when_down == "open":
                assert verdicts == [Admitted(30, checked=False)] * 5
                assert opened.counts["unchecked"] == 5
                for number in range(5):
                    opened.ledger.settle(f"r{number}", used())
            else:
                assert verdicts == [UNAVAILABLE] * 5
            opened.store.open_gate.set()
            await opened.ledger.flush()
            while not opened.ledger.standings("a"):  # what was asked for is still read
                await asyncio.sleep(0.01)
            verdict = await opened.ledger.reserve(entry("after"), output_tokens=10)
            assert isinstance(verdict, BudgetRefusal if when_down == "open" else Admitted)
            opened.ledger.release("after")

    asynchronous(test)


def test_a_full_disk_keeps_charges_until_there_is_room(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, bounds=behind(), limit_bytes=280_000) as opened:
            number = 0
            while not opened.counts["write_failed"]:
                await opened.exchange(f"filler {number} {'x' * 300}", surface="s" * 150)
                number += 1
                await asyncio.sleep(0.001)
                assert number < 1000
            await opened.exchange("kept")
            assert len(opened.rows("SELECT id FROM ledger_charges WHERE id = 'kept'")) == 0
        # The disk is still full at the end: the journal has what was not written.
        async with ledger_in(tmp_path, bounds=behind()) as opened:
            charges = await opened.charges()
            assert len(charges) == number + 1
            assert opened.counts["recovered"] >= 1
            assert (await opened.spent())["", TODAY] == 30 * (number + 1)

    asynchronous(test)


def test_a_store_that_fails_is_tried_again_and_counts_nothing_twice(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, bounds=behind()) as opened:
            opened.store.broken = True
            for number in range(20):
                await opened.exchange(f"r{number}")
            while opened.counts["write_failed"] < 2:
                await asyncio.sleep(0.01)
            opened.store.broken = False
            assert sum((await opened.charges()).values()) == 600
            assert opened.counts["lost"] == 0

    asynchronous(test)


def test_more_than_can_be_kept_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, bounds=behind(4)) as opened:
            opened.store.open_gate.clear()
            for number in range(4):
                await opened.exchange(f"r{number}")
            assert await opened.ledger.reserve(entry("fifth"), output_tokens=1) == FULL
            for number in range(10):  # nobody asked for these
                opened.ledger.settle(f"late {number}", used(), entry=entry(f"late {number}"))
            assert opened.counts["lost"] == 6
            opened.store.open_gate.set()
            assert len(await opened.charges()) == 8
            assert opened.counts["refused_full"] == 1

    asynchronous(test)


@pytest.mark.parametrize("when_down", ["lease", "closed"])
def test_without_its_journal_a_tenant_is_served_or_refused_as_declared(tmp_path: Path, when_down: str) -> None:
    async def test() -> None:
        (tmp_path / "ledger.journal").mkdir(parents=True)  # so that it cannot be opened
        async with ledger_in(tmp_path, budgets(when_down=when_down), bounds=behind()) as opened:
            assert not opened.ledger.statistics().journal
            verdict = await opened.ledger.reserve(entry("one"), output_tokens=10)
            if when_down == "lease":
                assert verdict == Admitted(30)
                opened.ledger.settle("one", used())
                assert await opened.charges() == {"one": 30}
            else:
                assert verdict == UNAVAILABLE
            (tmp_path / "ledger.journal").rmdir()
            while not opened.ledger.statistics().journal:
                await asyncio.sleep(0.01)
            await opened.exchange("two")

    asynchronous(test)


def test_what_no_database_takes_does_not_get_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path) as opened:
            wrongs: list[dict[str, Any]] = [{"model": "\ud800"}, {"key": "a\0b"}, {"endpoint": ""}]
            for wrong in wrongs:
                with pytest.raises(LedgerError):
                    await opened.ledger.reserve(entry("one", **wrong), output_tokens=1)
            await admitted(opened, "two")
            receipt = opened.ledger.settle("two", used(10**40, 10**40))
            assert receipt.micros == 3 * 10**9
            await admitted(opened, "three")
            opened.ledger.settle("three", used(-5, -5, cached=9))
            assert await opened.charges() == {"two": 3 * 10**9, "three": 0}
            assert PRICES.of("mini") == Price(1_000_000, 250_000, 2_000_000)

    asynchronous(test)


# Retention


def test_old_charges_go_and_every_sum_stays(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock(NOON)
        bounds = LedgerBounds(exchanges=256, gather_s=0.0, keep_days=2)
        async with ledger_in(
            tmp_path, budgets(BudgetConfig(limit_micros=10**6, period="day")), clock=clock, bounds=bounds
        ) as opened:
            for day in range(5):
                for number in range(3):
                    await opened.exchange(f"{day} {number}")
                clock.now += DAY
            await opened.ledger.flush()
            before = opened.rows("SELECT * FROM ledger_days"), await opened.spent()
            clock.now -= DAY
            assert await opened.ledger.prune() == 6
            assert await opened.ledger.prune() == 0
            assert sorted(await opened.charges())[0] == "2 0"
            assert (opened.rows("SELECT * FROM ledger_days"), await opened.spent()) == before

    asynchronous(test)
