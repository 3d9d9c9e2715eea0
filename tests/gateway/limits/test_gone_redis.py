"""A Redis that is frozen, resets, is full or is not there: waits have an end, and what happens then is as declared."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.gateway.circuit_breaker import StoreBreaker
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.lua_script import script
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.limits.redis_calls import RedisCallBatcher, RedisUnavailableError
from headrace.gateway.limits.redis_limits import RedisLimitStore
from tests.support.clock import Clock
from tests.support.programs.redis_server import Way, pretending
from tests.support.running_server import asynchronous
from tests.support.stores.limit_oracle import admitted, refusal, scope

pytest.importorskip("redis", reason="the package redis is not installed")

WHY = {"frozen": "timeout", "reset": "reset", "full": "full"}


@asynccontextmanager
async def limiter_on(
    url: str, clock: Clock, *, closed: bool = False, timeout_s: float = 0.05, noted: list[str] | None = None
) -> AsyncGenerator[tuple[RateLimiter, RedisLimitStore], None]:
    calls = RedisCallBatcher(url, script(), timeout_s=timeout_s, failures=3, skip_s=5.0, clock=clock)
    shared = RedisLimitStore(calls, clock=clock, tend_s=1e6)

    def note(event: str, what: str) -> None:
        if event == "gone" and noted is not None:
            noted.append(what)

    limiter = RateLimiter(
        local=LocalLimitStore(clock=clock), shared=shared, closed=closed, clock=clock, sleep=clock.skip, note=note
    )
    try:
        yield limiter, shared
    finally:
        await limiter.close()


@pytest.mark.parametrize("way", ["frozen", "reset", "full"])
@asynchronous
async def test_open_each_gateway_counts_for_itself_and_soon_asks_no_more(way: Way) -> None:
    noted: list[str] = []
    bound = 0.05 if way == "frozen" else 10.0  # on a busy machine an answer may take longer than it should
    async with (
        pretending(way) as server,
        limiter_on(server.url, Clock(), noted=noted, timeout_s=bound) as (limiter, shared),
    ):
        tenant = scope(requests_per_min=20)
        for _ in range(20):
            await (await limiter.reserve([tenant], input_tokens=1, most_output=1)).settle(1, 1)
        assert (await refusal(limiter, tenant)).code == "tenant_requests_per_min"
        await shared.settled()
        assert noted[0] == WHY[way]
        assert noted.count("skipped") >= 18
        assert server.commands.count(b"EVALSHA") <= 3


@pytest.mark.parametrize("way", ["frozen", "reset", "full"])
@asynchronous
async def test_closed_nothing_is_let_in_and_the_client_hears_when_to_come_back(way: Way) -> None:
    clock = Clock()
    async with pretending(way) as server, limiter_on(server.url, clock, closed=True) as (limiter, shared):
        times: list[float | None] = []
        for _ in range(5):
            error = await refusal(limiter, scope(requests_per_min=20))
            assert (error.status, error.code, error.kind) == (503, "limits_unavailable", "overloaded_error")
            times.append(error.retry_after)
            await shared.settled()
        assert times[-1] == 5.0
        clock.millis += 3000
        assert (await refusal(limiter, scope(requests_per_min=20))).retry_after == 2.0


@asynchronous
async def test_what_is_closed_can_be_said_of_one_tenant() -> None:
    async with pretending("reset") as server, limiter_on(server.url, Clock(), closed=True) as (limiter, _):
        tenant = scope(requests_per_min=20)
        await (await limiter.reserve([tenant], input_tokens=1, most_output=1, closed=False)).settle(1, 1)
        assert (await refusal(limiter, tenant)).status == 503


@asynchronous
async def test_nobody_there_is_like_a_reset() -> None:
    noted: list[str] = []
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        url = f"redis://127.0.0.1:{held.getsockname()[1]}/0"
        async with limiter_on(url, Clock(), noted=noted, timeout_s=10.0) as (limiter, _):
            assert await admitted(limiter, scope(requests_per_min=20))
    assert noted == ["reset"]


@asynchronous
async def test_a_thousand_at_once_wait_together_and_not_one_after_the_other() -> None:
    noted: list[str] = []
    async with pretending("frozen") as server, limiter_on(server.url, Clock(), noted=noted) as (limiter, _):
        tenant = scope(requests_per_min=700)
        found = await asyncio.gather(*(admitted(limiter, tenant) for _ in range(1000)))
        assert all(found)
        assert noted == ["timeout"] * 1000
        assert server.connections == 1


@asynchronous
async def test_a_store_that_works_again_is_found_by_one_try_and_not_by_a_request() -> None:
    clock, noted = Clock(), list[str]()
    async with (
        pretending("reset") as server,
        limiter_on(server.url, clock, noted=noted, timeout_s=10.0) as (limiter, shared),
    ):
        tenant = scope(concurrent=1000)
        for _ in range(5):
            await limiter.reserve([tenant], input_tokens=1, most_output=1)
            await shared.settled()
        before = len(server.commands)
        server.way = "well"
        await shared.tend()
        assert len(server.commands) == before  # it is left alone for five seconds
        clock.millis += 5000
        noted.clear()
        await limiter.reserve([tenant], input_tokens=1, most_output=1)
        assert noted == ["skipped"]
        await shared.tend()
        await limiter.reserve([tenant], input_tokens=1, most_output=1)
        assert noted == ["skipped"]
        assert len(server.commands) > before


class Scripted:
    """Calls that answer as they are told; None: the store is gone."""

    def __init__(self, *answers: list[int] | None) -> None:
        self.breaker = StoreBreaker(failures=3)
        self.answers = list(answers)
        self.asked: list[bytes] = []

    async def call(self, keys: Sequence[str], payload: bytes, *, probe: bool = False) -> list[int]:
        self.asked.append(payload)
        answer = self.answers.pop(0) if self.answers else None
        if answer is None:
            raise RedisUnavailableError("timeout")
        return answer

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("closed", [False, True])
@asynchronous
async def test_a_stream_whose_store_goes_away_goes_on_under_local_limits_or_stops(closed: bool) -> None:
    clock = Clock()
    shared = RedisLimitStore(Scripted([1, 0, 50, 0]), clock=clock, tend_s=1e6)
    limiter = RateLimiter(
        local=LocalLimitStore(clock=clock), shared=shared, closed=closed, clock=clock, sleep=clock.skip
    )
    tenant = scope(output_tokens_per_min=50)
    reservation = await limiter.reserve([tenant], input_tokens=1, most_output=20)
    total = 0
    while reservation.allow(total + 1) or await reservation.extend(total + 1, wait_s=0.0):
        assert reservation.allow(total + 1)
        total += 1
        await shared.settled()
    # 20 of the shared store, and all that this gateway alone may let out.
    assert total == (20 if closed else 20 + 50)
    await reservation.settle(1, total)
    assert shared.owed == 1
    await limiter.close()


@asynchronous
async def test_what_is_owed_is_bounded_and_forgotten_when_it_has_lapsed() -> None:
    clock = Clock()
    shared = RedisLimitStore(Scripted(), clock=clock, owed=10, tend_s=1e6)
    limiter = RateLimiter(local=LocalLimitStore(clock=clock), shared=shared, clock=clock)
    for _ in range(50):
        await limiter.reserve([scope(concurrent=100)], input_tokens=1, most_output=1)
    await shared.settled()
    assert shared.owed == 10
    clock.millis += 90_000
    await shared.tend()
    assert shared.owed == 0
    await limiter.close()


def test_a_breaker_opens_after_failures_in_a_row_and_is_tried_after_a_while() -> None:
    clock = Clock()
    breaker = StoreBreaker(failures=2, rest_s=5.0, clock=clock)
    for _ in range(3):
        breaker.failed()
        breaker.succeeded()
    breaker.failed()
    assert (breaker.open, breaker.due, breaker.left()) == (False, False, 0.0)
    breaker.failed()
    assert (breaker.open, breaker.due, breaker.left()) == (True, False, 5.0)
    clock.millis -= 60_000
    assert breaker.left() == 5.0
    clock.millis += 65_000
    assert (breaker.open, breaker.due, breaker.left()) == (True, True, 0.0)
    breaker.failed()
    assert (breaker.open, breaker.due) == (True, False)
    breaker.succeeded()
    assert not breaker.open


@pytest.mark.parametrize("url", ["", "nowhere", "http://127.0.0.1"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(HeadraceError):
        RedisCallBatcher(url, script())


def test_a_lease_shorter_than_its_windows_is_refused() -> None:
    with pytest.raises(HeadraceError):
        RedisLimitStore(Scripted(), lease_s=89.0)


def test_without_the_package_an_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    text = script()
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(HeadraceError, match=r"headrace\[redis\]"):
        RedisCallBatcher("redis://127.0.0.1", text)
