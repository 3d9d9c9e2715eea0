"""Measuring queues and memory: whose wait it is, what is stale, and that nothing grows without a bound."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.degradation.ladder.levels import PressureSignals
from headrace.gateway.degradation.ladder.pressure import PressureMonitor, WaitTicket, poll_statistics
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous


def serving(pressure: PressureMonitor, clock: Clock, *, seconds: float = 0.5, times: int = 40) -> None:
    """One request after the other gets its first token after so many seconds."""
    for _ in range(times):
        wait = pressure.wait("mini", "regular")
        clock.now += seconds
        wait.start()
        clock.now += 10.0  # nobody waits, which says nothing of the machine


def test_without_requests_there_is_no_queue() -> None:
    assert PressureMonitor().signals("mini", "a") == PressureSignals(queue_ms=0.0)


def test_a_wait_is_as_long_as_those_before_take() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    serving(pressure, clock)
    for _ in range(4):
        pressure.wait("mini", "a")
    assert pressure.signals("mini", "a").queue_ms == pytest.approx(1e3 * 2.0)
    assert pressure.signals("mini@int4", "a").queue_ms == 0.0


def test_a_flood_of_one_tenant_is_pressure_for_that_one() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    serving(pressure, clock)
    for _ in range(100):
        pressure.wait("mini", "flood")
    pressure.wait("mini", "b")
    pressure.wait("mini", "b")
    assert pressure.signals("mini", "flood").queue_ms == pytest.approx(1e3 * 51.0)
    assert pressure.signals("mini", "newcomer").queue_ms == pytest.approx(1e3 * 1.0)  # one of each
    assert pressure.signals("mini", "b").queue_ms == pytest.approx(1e3 * 2.5)  # three of the flood's, and its own two


def test_wrong_predictions_are_corrected() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    serving(pressure, clock)
    pressure.wait("mini", "stuck")
    before = pressure.signals("mini", "a").queue_ms
    assert before is not None
    for _ in range(200):
        wait = pressure.wait("mini", "a")
        clock.now += 0.1  # though another has been waiting all the time
        wait.start()
    after = pressure.signals("mini", "a").queue_ms
    assert after is not None
    assert after == pytest.approx(100.0, rel=0.3)
    assert after < before


def test_before_the_first_token_the_longest_wait_is_what_is_known() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    pressure.wait("mini", "a")
    clock.now += 3.0
    pressure.wait("mini", "a")
    assert pressure.signals("mini", "b").queue_ms == pytest.approx(1e3 * 3.0)


def test_a_request_that_ends_is_counted_once() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    serving(pressure, clock)
    wait = pressure.wait("mini", "a")
    wait.start()
    wait.end()
    wait.start()
    assert pressure.signals("mini", "a").queue_ms == 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_waiting_requests_are_counted_correctly(seed: int) -> None:
    draw = Random(seed)
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    serving(pressure, clock, times=2)
    open_waits: list[tuple[str, WaitTicket]] = []
    for _ in range(60):
        clock.now += 2.0 * draw.random()
        if draw.random() < 0.6 or not open_waits:
            tenant = draw.choice("abc")
            open_waits.append((tenant, pressure.wait("mini", tenant)))
        else:
            _, wait = open_waits.pop(draw.randrange(len(open_waits)))
            wait.start()
        counts = {name: sum(other == name for other, _ in open_waits) for name in "abc"}
        seconds = [pressure.signals("mini", name).queue_ms or 0.0 for name in "abcd"]
        assert all(each >= 0.0 for each in seconds)
        ahead = [sum(min(count, counts.get(name, 0) + 1) for count in counts.values()) for name in "abcd"]
        # In proportion to those who go before.
        for one, other, here, there in zip(seconds, seconds[1:], ahead, ahead[1:], strict=False):
            assert one * there == pytest.approx(other * here)
    for _, wait in open_waits:
        wait.end()
    assert pressure.signals("mini", "a").queue_ms == 0.0


def test_slack_is_what_is_left_at_the_deadline() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock)
    serving(pressure, clock)
    pressure.record_answer("mini", "chat", tokens=101, seconds=5.0)
    pressure.wait("mini", "b")
    found = pressure.signals("mini", "a", surface="chat", deadline_s=10.0)
    assert found.slack_ms == pytest.approx(1e3 * (10.0 - 0.5 - 101 * 0.05))
    short = pressure.signals("mini", "a", surface="chat", deadline_s=10.0, max_tokens=10)
    assert short.slack_ms == pytest.approx(1e3 * (10.0 - 0.5 - 0.5))
    assert pressure.signals("mini", "a", surface="chat").slack_ms is None
    assert pressure.signals("mini", budget_left=0.5).budget_left == 0.5


def test_memory_is_that_of_the_replica_with_most_and_grows_old() -> None:
    clock = Clock()
    pressure = PressureMonitor(clock=clock, stale_s=2.0)
    replicas: list[dict[str, Any]] = [
        {"blocks": {"total": 100, "free": 1, "cached": 4}},
        {"blocks": {"total": 100, "free": 20, "cached": 10}},
        {"blocks": {}},
        {},
    ]
    pressure.record_statistics("mini", replicas)
    clock.now += 2.0
    assert pressure.signals("mini").memory_free == pytest.approx(0.3)
    clock.now += 0.1
    assert pressure.signals("mini").memory_free is None
    pressure.record_statistics("mini", [])
    assert pressure.signals("mini").memory_free is None


def test_variants_are_bounded() -> None:
    pressure = PressureMonitor(max_variants=2)
    pressure.wait("a", "t")
    pressure.wait("b", "t")
    with pytest.raises(ValueError, match="More than 2 variants"):
        pressure.wait("c", "t")


class Engine:
    def __init__(self, *, hangs: bool = False, breaks: bool = False) -> None:
        self.text_request = 0
        self._hangs = hangs
        self._breaks = breaks

    async def stats(self) -> list[dict[str, Any]]:
        self.text_request += 1
        if self._breaks:
            raise RuntimeError("gone")
        if self._hangs:
            await asyncio.sleep(60.0)
        return [{"blocks": {"total": 10, "free": 5, "cached": 0}}]


def test_engines_are_polled_and_one_that_hangs_delays_no_other() -> None:
    async def test() -> None:
        pressure = PressureMonitor(stale_s=60.0)
        engines = {"fine": Engine(), "hanging": Engine(hangs=True), "broken": Engine(breaks=True)}
        watching = asyncio.create_task(poll_statistics(pressure, engines, interval_s=0.001, timeout_s=0.01))
        while engines["hanging"].text_request < 3:
            await asyncio.sleep(0.001)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert watching.cancelled()
        assert engines["fine"].text_request >= 3
        assert engines["broken"].text_request >= 3
        assert pressure.signals("fine").memory_free == 0.5
        assert pressure.signals("hanging").memory_free is None

    asynchronous(test)
