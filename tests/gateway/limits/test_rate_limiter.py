"""One limiter in one process: what it lets in, holds, extends, gives back, and says."""

from __future__ import annotations

import asyncio

import pytest

from headrace.gateway.limits.limit_errors import LimitError
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.output_estimates import OutputEstimates
from headrace.gateway.limits.rate_limiter import RateLimiter
from tests.support.clock import Clock
from tests.support.running_server import asynchronous
from tests.support.stores.limit_oracle import admitted, refusal, scope


def limiter_on(clock: Clock, *, first_tokens: int = 100, scopes: int = 10_000, patience_s: float = 2.0) -> RateLimiter:
    return RateLimiter(
        local=LocalLimitStore(clock=clock, scopes=scopes),
        clock=clock,
        sleep=clock.skip,
        estimates=OutputEstimates(first_tokens=first_tokens),
        patience_s=patience_s,
    )


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_s": 2}, "tenant_requests_per_s"),
        ({"requests_per_min": 2}, "tenant_requests_per_min"),
        ({"input_tokens_per_s": 200}, "tenant_input_tokens_per_s"),
        ({"input_tokens_per_min": 200}, "tenant_input_tokens_per_min"),
        ({"output_tokens_per_s": 20}, "tenant_output_tokens_per_s"),
        ({"output_tokens_per_min": 20}, "tenant_output_tokens_per_min"),
    ],
)
@asynchronous
async def test_at_the_time_a_refusal_names_the_request_is_let_in_and_a_millisecond_before_it_is_not(
    limits: dict[str, int], code: str
) -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    tenant = scope("acme", "tenant", **limits)
    for _ in range(2):
        reservation = await limiter.reserve([tenant], input_tokens=100, most_output=10)
        assert reservation.allow(10)
        await reservation.settle(100, 10)
        clock.millis += 137
    error = await refusal(limiter, tenant, input_tokens=100, most=10)
    assert (error.status, error.code, error.exact) == (429, code, True)
    assert error.retry_after == (1.0 if code.endswith("_s") else 60.0) - 2 * 0.137
    assert error.headers
    clock.millis += round((error.retry_after or 0) * 1000) - 1
    assert not await admitted(limiter, tenant, input_tokens=100, most=10)
    clock.millis += 1
    assert await admitted(limiter, tenant, input_tokens=100, most=10)


@asynchronous
async def test_all_scopes_have_room_or_nothing_is_taken_of_any() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    tenant, key = scope(requests_per_min=5), scope("k", "key", input_tokens_per_min=100)
    model = scope("mini", "model", concurrent=1)
    running = await limiter.reserve([tenant, key, model], input_tokens=10, most_output=1)
    for _ in range(20):
        assert (await refusal(limiter, tenant, key, model, input_tokens=10)).code == "model_concurrent"
    await running.settle(10, 1)
    for _ in range(4):
        await (await limiter.reserve([tenant, key, model], input_tokens=10, most_output=1)).settle(10, 1)
    assert (await refusal(limiter, tenant, key, model)).code == "tenant_requests_per_min"


@asynchronous
async def test_others_limits_are_their_own() -> None:
    limiter = limiter_on(Clock())
    await limiter.reserve([scope("acme", requests_per_min=1)], input_tokens=1, most_output=1)
    assert not await admitted(limiter, scope("acme", requests_per_min=1))
    assert await admitted(limiter, scope("bolt", requests_per_min=1))
    assert await admitted(limiter, scope("acme", "key", requests_per_min=1))


@asynchronous
async def test_however_a_request_ends_its_place_is_free_once() -> None:
    limiter = limiter_on(Clock())
    tenant = scope(concurrent=2)
    one = await limiter.reserve([tenant], input_tokens=1, most_output=1)
    await limiter.reserve([tenant], input_tokens=1, most_output=1)
    assert (await refusal(limiter, tenant)).code == "tenant_concurrent"
    for _ in range(3):
        await one.settle(1, 1)
        await one.release()
    assert one.allow(1) is False
    assert await one.extend(1) is False
    await limiter.reserve([tenant], input_tokens=1, most_output=1)
    assert not await admitted(limiter, tenant)


@asynchronous
async def test_settling_counts_what_was_used_and_gives_back_the_rest() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    tenant = scope(input_tokens_per_min=1000, output_tokens_per_min=1000)

    async def settled(allowed: int, input_tokens: int, output_tokens: int) -> dict[str, str]:
        clock.millis += 120_000
        reservation = await limiter.reserve([tenant], input_tokens=300, most_output=100)
        assert reservation.allow(allowed)
        await reservation.settle(input_tokens, output_tokens, whole=False)
        look = await limiter.reserve([tenant], input_tokens=1, most_output=1)
        await look.release()
        return look.headers()

    left = "x-ratelimit-remaining-tokens"
    assert (await settled(5, 300, 5))[left] == "700"
    assert (await settled(5, 0, 5))[left] == "995"
    assert (await settled(5, 0, 700))[left] == "300"  # more than it had been granted
    assert (await settled(50, 0, 20))[left] == "980"  # fewer than were let out
    assert (await settled(50, 350, 20))[left] == "650"  # more than was reserved


@asynchronous
async def test_a_release_leaves_no_trace() -> None:
    limiter = limiter_on(Clock())
    tenant = scope(requests_per_min=1, input_tokens_per_min=10, output_tokens_per_min=10, concurrent=1)
    for _ in range(50):
        reservation = await limiter.reserve([tenant], input_tokens=10, most_output=10)
        assert reservation.allow(3)
        await reservation.release()
    await (await limiter.reserve([tenant], input_tokens=10, most_output=10)).settle(10, 10)
    assert not await admitted(limiter, tenant)


@asynchronous
async def test_an_answer_longer_than_expected_is_extended_until_there_is_no_room() -> None:
    limiter = limiter_on(Clock(), first_tokens=40)
    tenant = scope(output_tokens_per_min=100)
    reservation = await limiter.reserve([tenant], input_tokens=1, most_output=1000)
    assert reservation.granted[1] == 40
    assert all(reservation.allow(total) for total in range(1, 101))
    assert not reservation.allow(101)
    assert not await reservation.extend(101)
    assert reservation.out == 100
    await reservation.settle(1, 100)
    assert not await admitted(limiter, tenant, most=1)


@asynchronous
async def test_what_another_gives_back_extends_an_answer() -> None:
    limiter = limiter_on(Clock(), first_tokens=60)
    tenant = scope(output_tokens_per_min=100)
    long = await limiter.reserve([tenant], input_tokens=1, most_output=1000)
    other = await limiter.reserve([tenant], input_tokens=1, most_output=40)
    assert long.allow(60)
    assert not long.allow(61)
    assert not await long.extend(61, wait_s=0.0)
    await other.settle(1, 3)
    assert await long.extend(61, wait_s=0.0)
    assert all(long.allow(total) for total in range(61, 98))
    assert not long.allow(98)


@asynchronous
async def test_a_stream_under_a_limit_a_second_waits_and_is_not_stopped() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    tenant = scope(output_tokens_per_s=10)
    reservation = await limiter.reserve([tenant], input_tokens=1, most_output=100)
    start = clock.millis
    for total in range(1, 36):
        if not reservation.allow(total):
            assert await reservation.extend(total)
            assert reservation.allow(total)
    assert clock.millis - start == 3000


@asynchronous
async def test_newcomers_leave_room_for_a_stream_that_waits() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    tenant = scope(output_tokens_per_s=20)
    one = await limiter.reserve([tenant], input_tokens=1, most_output=100)
    assert one.allow(16)
    clock.millis += 500
    other = await limiter.reserve([tenant], input_tokens=1, most_output=4)
    assert other.allow(4)
    await other.settle(1, 4)
    assert not await one.extend(18, wait_s=0.0)
    clock.millis += 500  # 16 are free again: 2 of them are waited for
    assert not await admitted(limiter, tenant, most=15)
    assert await admitted(limiter, tenant, most=14)
    await one.settle(1, 16)
    assert await admitted(limiter, tenant, most=16)


@asynchronous
async def test_many_streams_fit_under_a_limit_a_second() -> None:
    limiter = limiter_on(Clock(), first_tokens=500)
    tenant = scope(output_tokens_per_s=1000)
    held = [await limiter.reserve([tenant], input_tokens=1, most_output=500) for _ in range(32)]
    assert all(reservation.allow(31) for reservation in held)
    assert not await admitted(limiter, tenant, most=500)


@asynchronous
async def test_a_piece_larger_than_a_limit_is_not_waited_for() -> None:
    limiter = limiter_on(Clock())
    reservation = await limiter.reserve([scope(output_tokens_per_s=10)], input_tokens=1, most_output=100)
    assert not reservation.allow(11)
    assert not await reservation.extend(11, wait_s=1e9)
    assert reservation.allow(10)


@asynchronous
async def test_a_prompt_larger_than_a_limit_is_told_not_to_come_back() -> None:
    error = await refusal(limiter_on(Clock()), scope(input_tokens_per_s=10), input_tokens=11)
    assert (error.status, error.code, error.retry_after) == (429, "tenant_input_tokens_per_s", None)
    assert error.headers == {"x-should-retry": "false"}


@asynchronous
async def test_the_shortest_context_bounds_prompt_and_answer() -> None:
    limiter = limiter_on(Clock())
    scopes = [scope(context=100), scope("k", "key", context=50), scope("mini", "model")]
    reservation = await limiter.reserve(scopes, input_tokens=20, most_output=1000)
    assert reservation.most_output == 30
    assert (await limiter.reserve(scopes, input_tokens=20, most_output=7)).most_output == 7
    error = await refusal(limiter, *scopes, input_tokens=50)
    assert (error.status, error.code, error.kind) == (400, "context_length_exceeded", "invalid_request_error")
    assert "key" in error.message


@asynchronous
async def test_without_limits_everything_is_allowed_and_nothing_is_kept() -> None:
    local = LocalLimitStore()
    limiter = RateLimiter(local=local)
    for scopes in ([], [scope()], [scope(context=10**9)]):
        reservation = await limiter.reserve(scopes, input_tokens=10**6, most_output=10**6)
        assert reservation.allow(10**6)
        assert await reservation.extend(10**7)
        assert reservation.headers() == {}
        await reservation.settle(10**6, 10**6)
    assert len(local) == 0


@asynchronous
async def test_a_changed_limit_is_in_force_at_once_and_forgets_nothing() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    for _ in range(5):
        await (await limiter.reserve([scope(requests_per_min=10)], input_tokens=1, most_output=1)).settle(1, 1)
    assert not await admitted(limiter, scope(requests_per_min=5))
    assert await admitted(limiter, scope(requests_per_min=6))
    running = await limiter.reserve([scope(requests_per_min=20)], input_tokens=4, most_output=1)
    other = scope(requests_per_min=20, input_tokens_per_min=10, output_tokens_per_min=10)
    await (await limiter.reserve([other], input_tokens=10, most_output=10)).settle(10, 10)
    await running.settle(0, 1)  # it began before that limit was there, and has nothing to give back to it
    assert not await admitted(limiter, other, input_tokens=1, most=1)


@asynchronous
async def test_thousands_of_tenants_take_bounded_memory_and_lose_nothing_that_counts() -> None:
    clock = Clock()
    local = LocalLimitStore(clock=clock, scopes=200)
    limiter = RateLimiter(local=local, clock=clock)
    busy = scope("busy", requests_per_min=3, concurrent=10)
    await (await limiter.reserve([busy], input_tokens=1, most_output=1)).settle(1, 1)
    running = await limiter.reserve([busy], input_tokens=1, most_output=1)
    clock.millis += 50_000
    await (await limiter.reserve([busy], input_tokens=1, most_output=1)).settle(1, 1)
    for tenant in range(5000):
        own = scope(f"tenant {tenant}", requests_per_s=1)
        await (await limiter.reserve([own], input_tokens=1, most_output=1)).settle(1, 1)
        clock.millis += 7
    assert len(local) == 200
    assert await admitted(limiter, busy)  # 35 s later, two of its three are forgotten
    await running.settle(1, 1)
    clock.millis += 1000
    for tenant in range(199):  # beside the busy one, of which one request still counts
        await limiter.reserve([scope(f"open {tenant}", concurrent=1)], input_tokens=1, most_output=1)
    full = await refusal(limiter, scope("one too many", concurrent=1))
    assert (full.status, full.code) == (503, "limits_full")


@asynchronous
async def test_a_thousand_tasks_at_once_get_exactly_the_limit() -> None:
    limiter = limiter_on(Clock(), first_tokens=10)
    tenant = scope(requests_per_min=700, output_tokens_per_min=100_000)

    async def one() -> bool:
        try:
            reservation = await limiter.reserve([tenant], input_tokens=1, most_output=10)
        except LimitError:
            return False
        for total in range(1, 6):
            await asyncio.sleep(0)
            assert reservation.allow(total)
        await reservation.settle(1, 5)
        return True

    assert sum(await asyncio.gather(*(one() for _ in range(1000)))) == 700
    error = await refusal(limiter, tenant)
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.headers["x-ratelimit-remaining-tokens"] == str(100_000 - 3500)
    assert error.headers["x-ratelimit-reset-requests"] == "1m0s"


@asynchronous
async def test_what_is_refused_and_extended_is_noted() -> None:
    noted: list[tuple[str, str]] = []
    clock = Clock()
    limiter = RateLimiter(
        local=LocalLimitStore(clock=clock),
        clock=clock,
        note=lambda event, what: noted.append((event, what)),
        patience_s=0,
    )
    tenant = scope(output_tokens_per_min=20)
    reservation = await limiter.reserve([tenant], input_tokens=1, most_output=20)
    await refusal(limiter, tenant, most=1)
    assert reservation.allow(20)
    assert not await reservation.extend(21)
    assert noted == [("refused", "tenant_output_tokens_per_min"), ("extended", "tenant_output_tokens_per_min")]


@asynchronous
async def test_short_answers_leave_room_under_a_limit_a_minute() -> None:
    clock = Clock()
    limiter = RateLimiter(local=LocalLimitStore(clock=clock), clock=clock, sleep=clock.skip)
    tenant = scope(output_tokens_per_min=600)
    for _ in range(8):
        reservation = await limiter.reserve([tenant], input_tokens=5, most_output=2000, tenant="acme", surface="chat")
        assert reservation.allow(32)
        await reservation.settle(5, 32)


@pytest.mark.parametrize(
    ("limits", "most", "needed"),
    [
        ({"output_tokens_per_min": 600}, 2000, "88 left; the request reserves 512 (estimated from recent answers"),
        ({"output_tokens_per_min": 600}, 100, "88 left; the answer may have 100. Retry in"),
        ({"input_tokens_per_min": 60}, 100, "10 left; the prompt has 50. Retry in"),
    ],
)
@asynchronous
async def test_a_refusal_says_what_is_left_and_what_the_request_needs(
    limits: dict[str, int], most: int, needed: str
) -> None:
    clock = Clock()
    limiter = RateLimiter(local=LocalLimitStore(clock=clock), clock=clock, sleep=clock.skip)
    tenant = scope(**limits)
    await limiter.reserve([tenant], input_tokens=50, most_output=512)
    error = await refusal(limiter, tenant, input_tokens=50, most=most)
    assert needed in str(error)
