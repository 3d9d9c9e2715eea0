"""Off, record, share, on: for all tenants and for one."""

from __future__ import annotations

import pytest

from headrace.gateway.caches.cache_modes import FULL_ACCESS, NO_ACCESS, RECORD_ONLY, CacheAccess, CacheMode, CachePolicy

TENANTS = [f"tenant-{number}" for number in range(2000)]


@pytest.mark.parametrize(
    ("mode", "uses"), [("off", NO_ACCESS), ("record", RECORD_ONLY), ("on", FULL_ACCESS), ("share", RECORD_ONLY)]
)
def test_a_mode_says_what_may_be_done(mode: CacheMode, uses: CacheAccess) -> None:
    assert CachePolicy(mode=mode).access("a") == uses
    assert CachePolicy(mode=mode).access("a", requested="off") == NO_ACCESS


def test_a_tenant_may_have_a_mode_of_its_own() -> None:
    modes = CachePolicy(mode="on", tenants={"a": "off", "b": "record"})
    assert [modes.access(tenant) for tenant in "abc"] == [NO_ACCESS, RECORD_ONLY, FULL_ACCESS]


def test_a_share_of_the_tenants_is_served_and_the_others_are_recorded() -> None:
    modes = CachePolicy(mode="share", share=0.25)
    served = [tenant for tenant in TENANTS if modes.access(tenant) == FULL_ACCESS]
    assert 0.2 < len(served) / len(TENANTS) < 0.3
    assert all(modes.access(tenant) == RECORD_ONLY for tenant in TENANTS if tenant not in served)
    assert all(CachePolicy(mode="share", share=1.0).is_selected(tenant) for tenant in TENANTS)


def test_who_is_in_a_share_stays_in_it_as_it_grows() -> None:
    served = [
        {tenant for tenant in TENANTS if CachePolicy(share=share).is_selected(tenant)} for share in (0.1, 0.3, 0.9)
    ]
    assert served[0] < served[1] < served[2]


def test_two_caches_choose_their_tenants_apart() -> None:
    one, other = (
        {tenant for tenant in TENANTS if CachePolicy(share=0.5, salt=salt).is_selected(tenant)} for salt in "xy"
    )
    assert one != other
