"""A thousand requests at once, of random sizes, under random limits: not one token over, not one refused in vain."""

from __future__ import annotations

import pytest

from headrace.gateway.limits.limit_errors import LimitError
from headrace.gateway.limits.limit_scopes import LimitScope, LimitSet
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.output_estimates import OutputEstimates
from headrace.gateway.limits.rate_limiter import RateLimiter
from tests.support.clock import Clock
from tests.support.running_server import asynchronous
from tests.support.stores.limit_oracle import Plan, admitted, random_plans, random_scopes, simulate


def limiter_on(clock: Clock, *, entries: int = 1 << 20) -> RateLimiter:
    local = LocalLimitStore(entries=entries, clock=clock)
    return RateLimiter(local=local, clock=clock, sleep=clock.skip, estimates=OutputEstimates(first_tokens=100))


@pytest.mark.parametrize("seed", range(4))
@asynchronous
async def test_a_thousand_at_once_never_pass_a_limit_and_none_is_refused_in_vain(seed: int) -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    scopes = random_scopes(seed)
    oracle = await simulate(limiter, clock, random_plans(seed, 1000, scopes=scopes))
    assert oracle.over() == []
    assert oracle.admitted >= 50
    assert oracle.refused >= 50
    assert oracle.checked > 0
    # All is settled: what is refused now is refused by what was really used.
    later = random_plans(seed + 100, 300, within=90_000, scopes=scopes)
    for plan in later:
        plan.pieces = []
    start = clock.millis
    for plan in sorted(later, key=lambda plan: plan.arrival):
        clock.millis = max(clock.millis, start + plan.arrival)
        fits = not oracle.missing(plan, clock.millis)
        assert await admitted(limiter, *plan.scopes, input_tokens=plan.input_tokens, most=plan.most) == fits


@pytest.mark.parametrize("seed", range(2))
@asynchronous
async def test_with_little_memory_a_limit_is_kept_all_the_same(seed: int) -> None:
    clock = Clock()
    limiter = limiter_on(clock, entries=8)
    oracle = await simulate(limiter, clock, random_plans(seed, 1000, scopes=random_scopes(seed)), strict=False)
    assert oracle.over() == []
    assert oracle.admitted >= 50
    # With eight entries, a grain is a quarter of a span, and nothing counts longer than that beyond it.
    clock.millis += 60_000 * 5 // 4
    assert await admitted(limiter, *random_scopes(seed)[0])


@asynchronous
async def test_the_whole_of_a_limit_can_be_used() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    scopes = (LimitScope("tenant", "acme", LimitSet(output_tokens_per_min=10_000, requests_per_min=1000)),)
    plans = [Plan(0, scopes, 1, 10, 10, [(5, 10)], 0, "settled") for _ in range(1000)]
    oracle = await simulate(limiter, clock, plans)
    assert (oracle.admitted, oracle.over()) == (1000, [])
    with pytest.raises(LimitError):
        await limiter.reserve(scopes, input_tokens=1, most_output=10)


@asynchronous
async def test_a_clock_that_jumps_back_neither_frees_nor_freezes() -> None:
    clock = Clock()
    limiter = limiter_on(clock)
    scopes = (LimitScope("tenant", "acme", LimitSet(requests_per_s=1)),)
    assert await (await limiter.reserve(scopes, input_tokens=1, most_output=1)).settle(1, 1) is None
    clock.millis += 600
    assert not await admitted(limiter, *scopes)
    clock.millis -= 3_600_000
    assert not await admitted(limiter, *scopes)
    clock.millis += 399
    assert not await admitted(limiter, *scopes)
    clock.millis += 1
    assert await admitted(limiter, *scopes)
