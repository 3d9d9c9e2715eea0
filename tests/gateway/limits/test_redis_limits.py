"""Limits that several gateways hold together, in a Redis of the test's own."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from headrace.gateway.limits.limit_errors import LimitError
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.lua_script import script
from headrace.gateway.limits.output_estimates import OutputEstimates
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.limits.redis_calls import RedisCallBatcher
from headrace.gateway.limits.redis_limits import RedisLimitStore
from tests.support.clock import Clock
from tests.support.programs.redis_server import MISSING, PROGRAM, Redis, redis_server
from tests.support.running_server import asynchronous
from tests.support.stores.limit_oracle import admitted, random_plans, random_scopes, refusal, scope, simulate

pytest.importorskip("redis", reason="the package redis is not installed")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)

BOUND = 10.0  # seconds: nothing here is to fail because the machine is busy


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Generator[Redis, None, None]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@dataclass
class Gateway:
    """What one process has."""

    limiter: RateLimiter
    shared: RedisLimitStore
    gone: list[str]  # why, each time that the store was not there

    async def tend(self) -> None:
        """What the store does by itself from time to time."""
        await self.shared.settled()
        await self.shared.tend()


@asynccontextmanager
async def gateway(
    redis: Redis,
    prefix: str,
    *,
    clock: Clock | None = None,  # the server's too, and then nothing happens but what the test does
    entries: int = 1 << 20,
    first_tokens: int = 100,
    timeout_s: float = BOUND,
    closed: bool = False,
) -> AsyncGenerator[Gateway, None]:
    calls = RedisCallBatcher(redis.url, script(), timeout_s=timeout_s, skip_s=1.0, clock=clock or time.monotonic)
    gone: list[str] = []
    shared = RedisLimitStore(
        calls, prefix=prefix, entries=entries, tend_s=1e6, clock=clock or time.monotonic, server_clock=clock
    )
    limiter = RateLimiter(
        local=LocalLimitStore(clock=clock or time.monotonic),
        shared=shared,
        clock=clock or time.monotonic,
        sleep=clock.skip if clock else asyncio.sleep,
        estimates=OutputEstimates(first_tokens=first_tokens),
        closed=closed,
        note=lambda event, what: gone.append(what) if event == "gone" else None,
    )
    try:
        await limiter.open()
        yield Gateway(limiter, shared, gone)
    finally:
        await limiter.close()


@pytest.mark.parametrize("seed", range(2))
@asynchronous
async def test_shared_limits_are_never_passed_and_what_is_settled_is_exact(redis: Redis, seed: int) -> None:
    clock = Clock()
    async with gateway(redis, f"random {seed}", clock=clock) as one:
        scopes = random_scopes(seed)
        plans = random_plans(seed, 150, within=600, scopes=scopes)
        oracle = await simulate(one.limiter, clock, plans, strict=False, settle_down=one.shared.settled)
        assert oracle.over() == []
        assert oracle.admitted >= 40
        assert oracle.refused >= 20
        await one.shared.settled()
        # All is settled: what is refused now is refused by what was really used.
        start = clock.millis
        for plan in sorted(random_plans(seed + 100, 60, within=90_000, scopes=scopes), key=lambda plan: plan.arrival):
            clock.millis = max(clock.millis, start + plan.arrival)
            fits = not oracle.missing(plan, clock.millis)
            assert await admitted(one.limiter, *plan.scopes, input_tokens=plan.input_tokens, most=plan.most) == fits
        assert one.gone == []


@asynchronous
async def test_with_little_memory_a_shared_limit_is_kept_all_the_same(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "little", clock=clock, entries=8) as one:
        plans = random_plans(7, 120, within=600, scopes=random_scopes(7))
        oracle = await simulate(one.limiter, clock, plans, strict=False, settle_down=one.shared.settled)
        assert oracle.over() == []
        assert oracle.admitted >= 40
        assert one.gone == []


@asynchronous
async def test_a_thousand_at_once_at_three_gateways_get_exactly_the_limit(redis: Redis) -> None:
    tenant = scope(requests_per_min=600, output_tokens_per_min=100_000)
    async with (
        gateway(redis, "thousand", first_tokens=10) as first,
        gateway(redis, "thousand", first_tokens=10) as second,
        gateway(redis, "thousand", first_tokens=10) as third,
    ):
        gateways = (first, second, third)

        async def one(place: int) -> bool:
            limiter = gateways[place % 3].limiter
            try:
                reservation = await limiter.reserve([tenant], input_tokens=1, most_output=10)
            except LimitError:
                return False
            assert reservation.allow(5)
            await reservation.settle(1, 5)
            return True

        assert sum(await asyncio.gather(*(one(place) for place in range(1000)))) == 600
        assert [each.gone for each in gateways] == [[], [], []]
        error = await refusal(second.limiter, tenant)
        assert error.code == "tenant_requests_per_min"
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 60
        assert error.headers["x-ratelimit-remaining-tokens"] == str(100_000 - 3000)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_s": 2}, "tenant_requests_per_s"),
        ({"input_tokens_per_min": 200}, "tenant_input_tokens_per_min"),
        ({"output_tokens_per_s": 20}, "tenant_output_tokens_per_s"),
        ({"output_tokens_per_min": 20}, "tenant_output_tokens_per_min"),
    ],
)
@asynchronous
async def test_at_the_time_a_shared_refusal_names_the_request_is_let_in(
    redis: Redis, limits: dict[str, int], code: str
) -> None:
    clock = Clock()
    async with gateway(redis, f"exact {code}", clock=clock) as one:
        tenant = scope("acme", "tenant", **limits)
        for _ in range(2):
            reservation = await one.limiter.reserve([tenant], input_tokens=100, most_output=10)
            assert reservation.allow(10)
            clock.millis += 63  # it is settled later than it is let out, and counts from when it was let out
            await reservation.settle(100, 10)
            clock.millis += 74
        error = await refusal(one.limiter, tenant, input_tokens=100, most=10)
        assert (error.status, error.code, error.exact) == (429, code, True)
        assert error.retry_after == (1.0 if code.endswith("_s") else 60.0) - 2 * 0.137
        clock.millis += round((error.retry_after or 0) * 1000) - 1
        assert not await admitted(one.limiter, tenant, input_tokens=100, most=10)
        clock.millis += 1
        assert await admitted(one.limiter, tenant, input_tokens=100, most=10)
        assert one.gone == []


@asynchronous
async def test_shared_limits_are_all_or_nothing_and_ends_count_once(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "all", clock=clock) as one, gateway(redis, "all", clock=clock) as two:
        tenant, key = scope("a } b", requests_per_min=5), scope("k" * 500, "key", concurrent=1)
        running = await one.limiter.reserve([tenant, key], input_tokens=10, most_output=1)
        for _ in range(10):
            assert (await refusal(two.limiter, tenant, key)).code == "key_concurrent"
        for _ in range(3):
            await running.settle(10, 1)
        for each in (one, two, one, two):
            await (await each.limiter.reserve([tenant, key], input_tokens=10, most_output=1)).settle(10, 1)
        assert (await refusal(one.limiter, tenant, key)).code == "tenant_requests_per_min"
        assert one.gone == two.gone == []


@asynchronous
async def test_a_shared_answer_is_extended_until_there_is_no_room(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "extend", clock=clock, first_tokens=40) as one:
        tenant = scope(output_tokens_per_min=100)
        reservation = await one.limiter.reserve([tenant], input_tokens=1, most_output=1000)
        for total in range(1, 101):
            if not reservation.allow(total):
                assert await reservation.extend(total)
                assert reservation.allow(total)
            clock.millis += 10
        assert not reservation.allow(101)
        assert not await reservation.extend(101)
        assert not await admitted(one.limiter, tenant, most=1)
        clock.millis += 59_000 - 1  # the first token was let out a minute ago but for a millisecond
        assert not await reservation.extend(101, wait_s=0.0)
        clock.millis += 1
        assert await reservation.extend(101, wait_s=0.0)
        assert reservation.allow(101)
        await reservation.settle(1, 101)
        assert one.gone == []


@asynchronous
async def test_more_is_asked_for_before_a_stream_runs_dry(redis: Redis) -> None:
    async with gateway(redis, "ahead", first_tokens=40) as one:
        reservation = await one.limiter.reserve([scope(output_tokens_per_min=1000)], input_tokens=1, most_output=500)
        for total in range(1, 501):
            assert reservation.allow(total)
            await one.shared.settled()
        await reservation.settle(1, 500)


@asynchronous
async def test_settling_a_shared_reservation_gives_back_exactly(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "back", clock=clock) as one:
        tenant = scope(requests_per_min=10, input_tokens_per_min=1000, output_tokens_per_min=1000)

        async def left(allowed: int, input_tokens: int, output_tokens: int) -> tuple[str, str]:
            clock.millis += 120_000
            reservation = await one.limiter.reserve([tenant], input_tokens=300, most_output=100)
            assert reservation.allow(allowed)
            await reservation.settle(input_tokens, output_tokens, whole=False)
            look = await one.limiter.reserve([tenant], input_tokens=0, most_output=0)
            await look.release()
            headers = look.headers()
            return headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-remaining-requests"]

        assert await left(5, 300, 5) == ("700", "8")
        assert await left(5, 0, 5) == ("995", "8")
        assert await left(5, 0, 700) == ("300", "8")
        assert await left(50, 0, 20) == ("980", "8")
        assert await left(50, 350, 20) == ("650", "8")
        assert one.gone == []


@asynchronous
async def test_a_process_that_dies_gives_back_when_its_leases_lapse(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "lost", clock=clock) as dies, gateway(redis, "lost", clock=clock) as lives:
        tenant = scope(concurrent=2, output_tokens_per_min=200)
        lost = await dies.limiter.reserve([tenant], input_tokens=1, most_output=150)
        assert lost.allow(20)
        kept = await lives.limiter.reserve([tenant], input_tokens=1, most_output=50)
        assert kept.allow(10)
        for _ in range(5):
            clock.millis += 15_000
            await lives.tend()
        assert (await refusal(lives.limiter, tenant)).code == "tenant_concurrent"
        clock.millis += 15_000 - 1
        assert not await admitted(lives.limiter, tenant)
        clock.millis += 1
        assert await admitted(lives.limiter, tenant, most=100)
        assert not lost.allow(21)  # it would have to ask
        await lost.settle(1, 20)  # nothing is left to count
        assert kept.allow(40)
        await kept.settle(1, 40)
        error = await refusal(lives.limiter, scope(concurrent=2, output_tokens_per_min=100), most=100)
        assert error.headers["x-ratelimit-remaining-tokens"] == "70"  # its first 10 are older than a minute


@asynchronous
async def test_a_lapsed_reservation_that_lives_is_taken_anew(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "anew", clock=clock) as one:
        tenant = scope(concurrent=1, output_tokens_per_min=100)
        slept = await one.limiter.reserve([tenant], input_tokens=1, most_output=50)
        assert slept.allow(10)
        clock.millis += 100_000
        await (await one.limiter.reserve([tenant], input_tokens=1, most_output=1)).settle(1, 0)
        assert not slept.allow(11)
        assert await slept.extend(11)
        assert slept.allow(11)
        assert not await admitted(one.limiter, tenant)
        await slept.settle(1, 11)
        assert await admitted(one.limiter, tenant, most=99)


@asynchronous
async def test_a_server_clock_that_jumps_back_neither_frees_nor_freezes(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "jump", clock=clock) as one:
        tenant = scope(requests_per_s=1)
        await (await one.limiter.reserve([tenant], input_tokens=1, most_output=1)).settle(1, 1)
        for step, fits in ((600, False), (-3_600_000, False), (399, False), (1, True)):
            clock.millis += step
            assert await admitted(one.limiter, tenant) == fits


@asynchronous
async def test_what_redis_throws_away_leaves_nothing_stuck(redis: Redis) -> None:
    clock = Clock()
    async with gateway(redis, "evict", clock=clock) as one:
        tenant = scope(concurrent=1, requests_per_min=2, output_tokens_per_min=100)
        client = import_module("redis").Redis.from_url(redis.url)
        for part in ("leases", "book", "requests_per_min", "output_tokens_per_min"):
            clock.millis += 120_000
            reservation = await one.limiter.reserve([tenant], input_tokens=1, most_output=60)
            assert reservation.allow(30)
            (name,) = client.keys(f"{{evict:limits}}:*:{part}") or [b"none"]
            client.delete(name)
            await reservation.settle(1, 30)
            clock.millis += 120_000
            assert await admitted(one.limiter, tenant, most=60)
        # A sum that is lost is added up again.
        await (await one.limiter.reserve([tenant], input_tokens=1, most_output=60)).settle(1, 60)
        client.delete(*client.keys("{evict:limits}:*:book"))
        assert not await admitted(one.limiter, tenant, most=41)
        assert await admitted(one.limiter, tenant, most=40)
        client.close()


@asynchronous
async def test_every_key_is_forgotten_by_itself(redis: Redis) -> None:
    async with gateway(redis, "keys") as one:
        every = scope(
            requests_per_s=9, requests_per_min=9, output_tokens_per_s=99, output_tokens_per_min=99, concurrent=9
        )
        reservation = await one.limiter.reserve([every], input_tokens=1, most_output=9)
        assert reservation.allow(5)
        await reservation.settle(1, 5)
        client = import_module("redis").Redis.from_url(redis.url)
        names = client.keys("{keys:limits}:*")
        assert len(names) == 6  # the leases are none
        assert all(0 < client.pttl(name) <= 210_000 for name in names)
        client.close()


@asynchronous
async def test_a_script_that_redis_forgot_is_loaded_again(redis: Redis) -> None:
    async with gateway(redis, "script") as one:
        tenant = scope(requests_per_min=2)
        await one.limiter.reserve([tenant], input_tokens=1, most_output=1)
        client = import_module("redis").Redis.from_url(redis.url)
        client.script_flush()
        client.close()
        await one.limiter.reserve([tenant], input_tokens=1, most_output=1)
        assert not await admitted(one.limiter, tenant)
        assert one.gone == []


@asynchronous
async def test_a_request_that_is_cancelled_while_it_asks_gives_back(redis: Redis) -> None:
    async with gateway(redis, "cancel") as one:
        tenant = scope(concurrent=1, requests_per_min=1, input_tokens_per_min=5)
        for _ in range(5):
            asking = asyncio.ensure_future(one.limiter.reserve([tenant], input_tokens=5, most_output=1))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
            await one.shared.settled()
        assert await admitted(one.limiter, tenant, input_tokens=5)
        assert one.gone == []


@asynchronous
async def test_a_frozen_redis_that_comes_back_is_told_what_it_missed(tmp_path: Path) -> None:
    clock = Clock()
    with redis_server(tmp_path) as server:
        async with gateway(server, "thaw", clock=clock, timeout_s=0.2) as one:
            tenant = scope(concurrent=2, requests_per_min=100, output_tokens_per_min=1000)
            running = await one.limiter.reserve([tenant], input_tokens=1, most_output=50)
            assert running.allow(30)
            server.process.send_signal(signal.SIGSTOP)
            local = [await one.limiter.reserve([tenant], input_tokens=1, most_output=50) for _ in range(2)]
            assert (await refusal(one.limiter, tenant)).code == "tenant_concurrent"  # of this gateway alone
            await running.settle(1, 30)
            for each in local:
                assert each.allow(50)
                await each.settle(1, 50)
            assert await admitted(one.limiter, tenant)
            assert one.gone == ["timeout", "timeout", "timeout", "skipped"]
            server.process.send_signal(signal.SIGCONT)
            for _ in range(3):
                clock.millis += 1000
                await one.tend()
            before = len(one.gone)
            look = await one.limiter.reserve([tenant], input_tokens=1, most_output=0)
            assert look.headers()["x-ratelimit-remaining-tokens"] == "970"
            assert await admitted(one.limiter, tenant)
            assert len(one.gone) == before
