"""Service of late: it fades, and neither a clock's beginning nor a long rest makes anything of it."""

from __future__ import annotations

import math

import pytest

from headrace.engine.scheduling.tenant_service import LATE, RecentService, TenantAccount


@pytest.mark.parametrize("now", [0.0, 43_854.0, 1e7, 4e9])  # seconds: a machine may be up for years
def test_a_clock_may_begin_anywhere(now: float) -> None:
    usage, account = RecentService(), TenantAccount("a")
    usage.tick(now)
    usage.add(account, 100.0)
    usage.tick(now + LATE)
    usage.add(account, 100.0)
    assert account.used > 0.0
    assert math.isfinite(account.used)


def test_an_engine_may_stand_for_days() -> None:
    usage, busy, other = RecentService(), TenantAccount("busy"), TenantAccount("other")
    now = 100.0
    for rest in (1.0, 3_600.0, 50_000.0, 30 * 86_400.0):
        now += rest
        usage.tick(now)
        usage.add(busy, 50_000.0)
        usage.add(other, 10.0)
        now += 0.5
        usage.tick(now)
        assert busy.over
        assert not other.over


def test_what_was_served_long_ago_counts_for_nothing() -> None:
    usage, early, late = RecentService(), TenantAccount("early"), TenantAccount("late")
    usage.tick(1.0)
    usage.add(early, 1e9)
    usage.tick(1.0 + 100 * LATE)
    usage.add(late, 50_000.0)
    usage.add(early, 10.0)
    usage.tick(2.0 + 100 * LATE)
    assert late.over
    assert not early.over
