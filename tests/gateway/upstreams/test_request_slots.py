"""The slots and the budget of further attempts, each by itself."""

from __future__ import annotations

import asyncio

import pytest

from headrace.config.upstream_section import UpstreamRetries
from headrace.gateway.upstreams.request_slots import RequestSlots, RetryBudget
from headrace.gateway.upstreams.upstream_errors import UpstreamError
from tests.support.running_server import asynchronous

# Places


@asynchronous
async def test_places_are_given_by_priority_and_then_in_order() -> None:
    slots = RequestSlots("mini", 1, 8)
    await slots.acquire(0, 1.0)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        await slots.acquire(priority, 10.0)
        order.append(name)
        slots.release()

    tasks = [asyncio.create_task(wait(name, priority)) for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1))]
    await asyncio.sleep(0)
    assert slots.waiting == 4
    slots.release()
    await asyncio.gather(*tasks)
    assert order == ["c", "a", "b", "d"]
    assert slots.taken == slots.waiting == 0


@asynchronous
async def test_a_full_queue_refuses_at_once_and_a_long_one_in_time() -> None:
    slots = RequestSlots("mini", 1, 1)
    await slots.acquire(0, 1.0)
    waiting = asyncio.create_task(slots.acquire(0, 0.01))
    await asyncio.sleep(0)
    assert slots.full
    with pytest.raises(UpstreamError, match="full queue") as full:
        await slots.acquire(0, 1.0)
    assert full.value.status == 503
    assert full.value.retry_after == 1.0
    with pytest.raises(UpstreamError, match="in time"):
        await waiting
    assert slots.waiting == 0
    slots.release()
    await slots.acquire(0, 0.0)
    assert slots.taken == 1


@asynchronous
async def test_who_leaves_the_queue_takes_no_place() -> None:
    slots = RequestSlots("mini", 1, 4)
    await slots.acquire(0, 1.0)
    leaver, stayer = (asyncio.create_task(slots.acquire(0, 10.0)) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    slots.release()  # in the same turn: the leaver's, as far as anybody knows
    await asyncio.gather(leaver, return_exceptions=True)
    await stayer
    assert slots.taken == 1
    slots.release()
    assert slots.taken == 0


# Budget


def test_further_attempts_are_a_share_of_the_first_ones_and_a_reserve() -> None:
    budget = RetryBudget(UpstreamRetries(share=0.25, reserve=2))
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]
    spent = 0
    for _ in range(1000):
        budget.record_request()
        spent += budget.try_spend()
    assert spent == 250
    for _ in range(1000):
        budget.record_request()
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]  # what is saved is bounded


def test_without_a_share_and_a_reserve_there_are_none() -> None:
    budget = RetryBudget(UpstreamRetries(share=0.0, reserve=0))
    budget.record_request()
    assert not budget.try_spend()
