"""Fast mode: whose switch counts, what it asks of a request, and that it ends whatever the clocks do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.config.tenant_section import FastConfig, TenantConfig
from headrace.gateway.accounts.account_records import ALL_TENANTS, AccountRecord, FastRecord
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.fast_mode import FastModeSwitches
from tests.support.accounts import WHO, declared, gateways
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous, refused

SERVED = ("mini", "mini@int4", "draft", "large", "large@int4")
CONFIG = FastConfig(
    variant="@int4",
    variants={"large": "mini@int4", "large@int4": "draft"},
    prompt_tokens=512,
    max_tokens=64,
    slow_tools=("browse",),
)
T = 1_000_000


def record(
    id: str = ALL_TENANTS, *, on: bool = True, since: int = T, seconds: int = 60, version: int = 1
) -> AccountRecord:
    value = FastRecord(on=on, reason="storm", by="ops", since=since, until=since + seconds)
    return AccountRecord("fast", id, version, value)


def changes(records: Iterable[AccountRecord], *, now: float = T, whole: bool = False) -> AccountChanges:
    return AccountChanges(epoch=1, now=now, records=tuple(records), whole=whole)


def made(monotonic: Clock | None = None, config: FastConfig = CONFIG) -> FastModeSwitches:
    return FastModeSwitches(config, served=SERVED, monotonic=monotonic or Clock(0.0))


def test_off_by_default() -> None:
    assert made().fast("red", "mini") is None


def test_what_it_asks_of_a_request() -> None:
    switches = made()
    switches.take(changes([record()]))
    found = switches.fast("red", "mini")
    assert found is not None
    assert (found.variant, found.prompt_tokens, found.max_tokens) == ("mini@int4", 512, 64)
    assert (found.slow_tools, found.tenant, found.reason) == (frozenset({"browse"}), ALL_TENANTS, "storm")


@pytest.mark.parametrize(
    ("model", "variant"),
    [("mini", "mini@int4"), ("mini@int4", None), ("draft", None), ("large", "mini@int4"), ("large@int4", "draft")],
)
def test_which_variant_answers(model: str, variant: str | None) -> None:
    switches = made()
    switches.take(changes([record()]))
    found = switches.fast("red", model)
    assert found is not None
    assert found.variant == variant


def test_a_variant_for_all_and_none_at_all() -> None:
    for config, variant in (
        (FastConfig(variant="draft"), "draft"),
        (FastConfig(max_tokens=8), None),
        (FastConfig(variant="x"), None),
    ):
        switches = made(config=config)
        switches.take(changes([record()]))
        found = switches.fast("red", "mini")
        assert found is not None
        assert found.variant == variant


def test_a_switch_from_before_the_section_was_emptied_has_no_effect() -> None:
    switches = made(config=FastConfig())
    switches.take(changes([record()]))
    assert switches.fast("red", "mini") is None


def test_a_tenants_own_switch_goes_before_that_of_all() -> None:
    monotonic = Clock(0.0)
    switches = made(monotonic)
    switches.take(changes([record("red"), record("blue", on=False, seconds=30)]))
    assert switches.fast("red", "mini")
    assert not switches.fast("blue", "mini")
    assert not switches.fast("green", "mini")
    switches.take(changes([record()]))
    assert switches.fast("green", "mini")
    assert not switches.fast("blue", "mini")
    monotonic.now += 30
    assert switches.fast("blue", "mini")  # its exception has ended
    switches.take(changes([AccountRecord("fast", ALL_TENANTS, 2, None)]))
    assert not switches.fast("blue", "mini")
    assert switches.fast("red", "mini")
    switches.take(changes([], whole=True))
    assert not switches.fast("red", "mini")


def test_it_ends_by_itself_and_being_told_again_changes_nothing() -> None:
    monotonic = Clock(0.0)
    switches = made(monotonic)
    switches.take(changes([record()]))
    monotonic.now = 59.9
    switches.take(changes([record()], now=T + 20, whole=True))
    assert switches.fast("red", "mini")
    assert [round(left, 6) for _, _, left in switches.live()] == [0.1]
    monotonic.now = 60.0
    assert switches.fast("red", "mini") is None
    assert list(switches.live()) == []
    assert [each.id for each in switches.expired()] == [ALL_TENANTS]
    switches.take(changes([record(version=2, since=T + 60)], now=T + 60))
    assert switches.fast("red", "mini")


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (T, 60.0),
        (T + 45, 15.0),  # another gateway, or after a restart
        (T + 60, 0.0),
        (T + 90_000, 0.0),  # the clock jumped ahead meanwhile
        (T - 90_000, 60.0),  # or back: never longer than it was meant for
    ],
)
def test_after_a_restart_it_lasts_its_time_at_most(now: float, left: float) -> None:
    monotonic = Clock(500.0)
    switches = made(monotonic)
    switches.take(changes([record()], now=now))
    if left:
        monotonic.now = 500.0 + left - 0.01
        assert switches.fast("red", "mini")
    monotonic.now = 500.0 + left
    assert not switches.fast("red", "mini")


def test_a_wall_clock_that_jumps_does_not_end_or_keep_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),), fast=CONFIG)
            await gateway.operations.set_fast(WHO, None, on=True, ttl_s=60.0, reason="storm")
            for jump in (90_000.0, -200_000.0):
                standing.clock.now += jump
                await gateway.shared.refresh()
                assert gateway.switches.fast("red", "mini")
            standing.monotonic.now += 60.0
            assert gateway.switches.fast("red", "mini") is None

    asynchronous(test)


def test_it_outlives_a_restart_and_reaches_other_gateways(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one = await standing.gateway(keys=(declared(),), fast=CONFIG)
            other = await standing.gateway(keys=(declared(),), fast=CONFIG)
            await one.operations.create_tenant(WHO, "red", TenantConfig())
            await one.operations.set_fast(WHO, "red", on=True, ttl_s=60.0, reason="storm")
            await other.shared.refresh()
            standing.clock.now += 20
            standing.monotonic.now += 20
            again = await standing.gateway(keys=(declared(),), fast=CONFIG)
            for each in (one, other, again):
                assert each.switches.fast("red", "mini")
                assert [round(left) for _, _, left in each.switches.live()] == [40]
            await other.operations.clear_fast(WHO, "red")
            await one.shared.refresh()
            assert not one.switches.fast("red", "mini")

    asynchronous(test)


def test_what_has_expired_is_removed_with_the_next_switch(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),), fast=CONFIG)
            for name in ("a", "b", "c"):
                await gateway.operations.create_tenant(WHO, name, TenantConfig())
                await gateway.operations.set_fast(WHO, name, on=True, ttl_s=60.0, reason="storm")
            standing.monotonic.now += 61.0
            await gateway.operations.set_fast(WHO, "a", on=True, ttl_s=60.0, reason="again")
            assert sorted(gateway.shared.held("fast")) == ["a"]
            error = await refused(gateway.operations.clear_fast(WHO, "b"))
            assert (error.status, error.code) == (404, "fast_not_set")

    asynchronous(test)


@pytest.mark.parametrize("ttl", [0.0, -1.0, 86_401.0])
def test_how_long_it_may_be_asked_for_is_bounded(tmp_path: Path, ttl: float) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),), fast=CONFIG)
            error = await refused(gateway.operations.set_fast(WHO, None, on=True, ttl_s=ttl, reason="storm"))
            assert error.parameter == "ttl_s"
            error = await refused(gateway.operations.set_fast(WHO, "nobody", on=True, ttl_s=5.0, reason="storm"))
            assert error.code == "tenant_not_found"

    asynchronous(test)
