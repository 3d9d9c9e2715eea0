"""The breaker, the places and the budget, each by itself, on a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from millrace.config.upstreams import BreakerConfig, Retries
from millrace.gateway.upstreams.breaker import Breaker
from millrace.gateway.upstreams.faults import UpstreamError
from millrace.gateway.upstreams.places import Budget, Places
from tests.gateway.edging import asynchronous

CONFIG = BreakerConfig(window_s=10.0, least=4, share=0.5, slow_s=5.0, open_s=2.0, longest_s=6.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(CONFIG, clock), clock


def attempt(breaker: Breaker, outcome: str) -> None:
    permit = breaker.enter()
    assert permit is not None
    match outcome:
        case "ok":
            permit.worked()
        case "slow":
            permit.worked(slow=True)
        case "failed":
            permit.failed()
        case "broken":
            permit.worked()
            permit.failed()
        case _:
            permit.dropped()


def opened() -> tuple[Breaker, Clock]:
    found, clock = breaker()
    for _ in range(4):
        attempt(found, "failed")
    assert found.state == "open"
    return found, clock


def test_it_opens_at_the_share_of_failures_and_not_below_the_least_number() -> None:
    found, _ = breaker()
    for outcome in ("failed", "failed", "failed"):
        attempt(found, outcome)
    assert found.state == "closed"
    attempt(found, "ok")
    assert found.state == "closed"  # what opens it is a failure
    attempt(found, "failed")
    assert found.state == "open"
    assert found.enter() is None
    assert found.opened == 1


def test_a_smaller_share_leaves_it_closed() -> None:
    found, _ = breaker()
    for outcome in ("ok", "ok", "ok", "failed", "ok", "failed", "ok", "failed"):
        attempt(found, outcome)
    assert found.state == "closed"
    assert found.counts() == (3, 8)


@pytest.mark.parametrize("outcome", ["slow", "broken"])
def test_slow_attempts_and_broken_answers_count_as_failures(outcome: str) -> None:
    found, _ = breaker()
    for _ in range(4):
        attempt(found, outcome)
    assert found.state == "open"


def test_what_nobody_waited_for_counts_for_nothing() -> None:
    found, _ = breaker()
    for _ in range(20):
        attempt(found, "dropped")
    assert found.counts() == (0, 0)
    assert found.state == "closed"


def test_failures_leave_the_window() -> None:
    found, clock = breaker()
    for _ in range(3):
        attempt(found, "failed")
    clock.now += 10.5
    assert found.counts() == (0, 0)
    attempt(found, "failed")
    assert found.state == "closed"


def test_one_attempt_tries_after_the_wait_and_closes_it() -> None:
    found, clock = opened()
    assert found.wait() == 2.0
    clock.now += 1.9
    assert found.enter() is None
    clock.now += 0.2
    assert found.state == "half-open"
    assert found.ready()
    probe = found.enter()
    assert probe is not None
    assert found.enter() is None
    assert not found.ready()
    probe.worked()
    assert found.state == "closed"
    assert found.enter() is not None


def test_a_slow_or_failed_probe_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    found, clock = opened()
    for wait, outcome in ((2.0, "failed"), (4.0, "slow"), (6.0, "failed"), (6.0, "failed")):
        assert found.wait() == wait
        clock.now += wait
        attempt(found, outcome)
        assert found.state == "open"
    clock.now += 6.0
    attempt(found, "ok")
    assert found.state == "closed"
    for _ in range(4):
        attempt(found, "failed")
    assert found.wait() == 2.0  # it begins anew


def test_a_probe_that_nobody_waits_for_lets_another_one_try() -> None:
    found, clock = opened()
    clock.now += 2.0
    attempt(found, "dropped")
    assert found.state == "half-open"
    attempt(found, "ok")
    assert found.state == "closed"


def test_what_began_before_it_opened_says_nothing_later() -> None:
    found, clock = breaker()
    early = found.enter()
    late = found.enter()
    assert early is not None
    assert late is not None
    for _ in range(4):
        attempt(found, "failed")
    early.worked()
    assert found.state == "open"
    clock.now += 2.0
    probe = found.enter()
    late.failed()
    assert probe is not None
    probe.worked()
    assert found.state == "closed"
    assert found.counts() == (0, 0)


def test_a_probe_that_breaks_off_later_counts() -> None:
    found, clock = opened()
    clock.now += 2.0
    probe = found.enter()
    assert probe is not None
    probe.worked()
    probe.failed()
    assert found.counts() == (1, 1)


def test_a_clock_that_jumps_back_opens_nothing_for_ever() -> None:
    found, clock = opened()
    clock.now -= 1000.0
    assert found.wait() == 2.0
    clock.now += 1002.0
    assert found.ready()


# Places


@asynchronous
async def test_places_are_given_by_priority_and_then_in_order() -> None:
    places = Places("mini", 1, 8)
    await places.take(0, 1.0)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        await places.take(priority, 10.0)
        order.append(name)
        places.give()

    tasks = [asyncio.create_task(wait(name, priority)) for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1))]
    await asyncio.sleep(0)
    assert places.waiting == 4
    places.give()
    await asyncio.gather(*tasks)
    assert order == ["c", "a", "b", "d"]
    assert places.taken == places.waiting == 0


@asynchronous
async def test_a_full_queue_refuses_at_once_and_a_long_one_in_time() -> None:
    places = Places("mini", 1, 1)
    await places.take(0, 1.0)
    waiting = asyncio.create_task(places.take(0, 0.01))
    await asyncio.sleep(0)
    assert places.full
    with pytest.raises(UpstreamError, match="waiting already") as full:
        await places.take(0, 1.0)
    assert full.value.status == 503
    assert full.value.retry_after == 1.0
    with pytest.raises(UpstreamError, match="in time"):
        await waiting
    assert places.waiting == 0
    places.give()
    await places.take(0, 0.0)
    assert places.taken == 1


@asynchronous
async def test_who_leaves_the_queue_takes_no_place() -> None:
    places = Places("mini", 1, 4)
    await places.take(0, 1.0)
    leaver, stayer = (asyncio.create_task(places.take(0, 10.0)) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    places.give()  # in the same turn: the leaver's, as far as anybody knows
    await asyncio.gather(leaver, return_exceptions=True)
    await stayer
    assert places.taken == 1
    places.give()
    assert places.taken == 0


# Budget


def test_further_attempts_are_a_share_of_the_first_ones_and_a_reserve() -> None:
    budget = Budget(Retries(share=0.25, reserve=2))
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    spent = 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert spent == 250
    for _ in range(1000):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]  # what is saved is bounded


def test_without_a_share_and_a_reserve_there_are_none() -> None:
    budget = Budget(Retries(share=0.0, reserve=0))
    budget.earn()
    assert not budget.spend()
