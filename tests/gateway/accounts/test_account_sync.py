"""How gateways that share a storage stay alike, and what one does while the storage is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.config.tenant_section import AdminConfig, TenantConfig
from headrace.gateway.accounts.account_records import KeyScope, TenantRecord
from headrace.gateway.accounts.account_store import AccountChange, AccountChanges, RecordWrite, VersionConflictError
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import NewKey
from headrace.gateway.api_errors import ApiError
from tests.support.accounts import WHO, Faulty, bearer, declared, entry, gateways
from tests.support.file_storage import asynchronous, refused

NEW = NewKey(name="app", tenant="red", scope=KeyScope())


def test_what_one_gateway_changes_another_has_after_its_next_look(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one, other = [await standing.gateway(keys=(declared(),)) for _ in range(2)]
            await one.operations.create_tenant(WHO, "red", TenantConfig(weight=2.0))
            secret = (await one.operations.create_key(WHO, NEW))["secret"]
            assert one.directory.identify(bearer(secret)).weight == 2.0
            with pytest.raises(ApiError) as raised:
                other.directory.identify(bearer(secret))
            assert raised.value.code == "invalid_api_key"
            assert (other.shared.epoch, other.shared.applied_epoch) == (0, 0)
            await other.shared.refresh()
            assert (other.shared.epoch, other.shared.applied_epoch) == (2, 2)
            assert other.directory.identify(bearer(secret)).weight == 2.0
            # And back.
            await other.operations.change_tenant(WHO, "red", lambda _: TenantConfig(weight=3.0))
            await one.shared.refresh()
            assert one.directory.identify(bearer(secret)).weight == 3.0

    asynchronous(test)


def test_the_poll_finds_a_revocation_by_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one = await standing.gateway(keys=(declared(),))
            other = await standing.gateway(keys=(declared(),), admin=AdminConfig(poll_s=0.01))
            await one.operations.create_tenant(WHO, "red", TenantConfig())
            made = await one.operations.create_key(WHO, NEW)
            while other.shared.applied_epoch < 2:
                await asyncio.sleep(0.005)
            assert other.directory.identify(bearer(made["secret"])).key == made["id"]
            await one.operations.revoke_key(WHO, made["id"])
            while other.shared.applied_epoch < 3:
                await asyncio.sleep(0.005)
            with pytest.raises(ApiError):
                other.directory.identify(bearer(made["secret"]))

    asynchronous(test)


def test_a_change_is_planned_anew_where_another_gateway_was_faster(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one, other = [await standing.gateway(keys=(declared(),)) for _ in range(2)]
            await one.operations.create_tenant(WHO, "red", TenantConfig())
            await other.shared.refresh()
            await one.operations.change_tenant(
                WHO, "red", lambda before: TenantConfig(weight=2.0, metadata=before.metadata)
            )
            # The other still believes in a weight of 1; what it does not change stays as it is now.
            done = await other.operations.change_tenant(
                WHO, "red", lambda before: TenantConfig(weight=before.weight, metadata={"a": "b"})
            )
            assert (done["weight"], done["metadata"]) == (2.0, {"a": "b"})
            assert (await refused(other.operations.create_tenant(WHO, "red", TenantConfig()))).code == "name_taken"

    asynchronous(test)


def test_who_is_always_too_slow_is_told_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:

            class Unlucky(Faulty):
                async def commit(self, change: AccountChange) -> None:  # type: ignore[override]
                    raise VersionConflictError

            gateway = await standing.gateway(store=Unlucky(standing.database, clock=standing.clock))
            error = await refused(gateway.operations.create_tenant(WHO, "red", TenantConfig()))
            assert (error.status, error.code, error.retry_after) == (503, "conflict", 1.0)

    asynchronous(test)


def test_while_the_storage_is_gone_what_is_known_holds_and_changes_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            gateway = await standing.gateway(keys=(declared(),), store=store)
            await gateway.operations.create_tenant(WHO, "red", TenantConfig())
            made = await gateway.operations.create_key(WHO, NEW)
            store.gone = True
            standing.monotonic.now += 1000.0
            assert not await gateway.shared.refresh()
            assert gateway.shared.age == 1000.0
            assert gateway.directory.identify(bearer(made["secret"])).tenant == "red"
            assert (await refused(gateway.operations.revoke_key(WHO, made["id"]))).status == 503
            store.gone = False
            assert await gateway.shared.refresh()
            assert gateway.shared.age == 0.0

    asynchronous(test)


def test_a_tenant_that_fails_closed_is_refused_once_the_state_is_too_old(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            gateway = await standing.gateway(
                keys=(declared(),), store=store, admin=AdminConfig(poll_s=3600.0, stale_s=300.0)
            )
            secrets: dict[str, str] = {}
            for name, settings in (("open", TenantConfig(fail="open")), ("closed", TenantConfig(fail="closed"))):
                await gateway.operations.create_tenant(WHO, name, settings)
                made = await gateway.operations.create_key(WHO, NewKey(name="k", tenant=name, scope=KeyScope()))
                secrets[name] = made["secret"]
            store.gone = True
            standing.monotonic.now += 299.0
            assert gateway.directory.identify(bearer(secrets["closed"])).tenant == "closed"
            standing.monotonic.now += 2.0
            assert gateway.directory.identify(bearer(secrets["open"])).tenant == "open"
            with pytest.raises(ApiError) as raised:
                gateway.directory.identify(bearer(secrets["closed"]))
            assert (raised.value.status, raised.value.code) == (503, "keys_stale")
            assert gateway.directory.identify(bearer("root-secret")).tenant == "root"  # the configuration's own

    asynchronous(test)


def test_before_the_state_was_read_an_unknown_key_is_not_called_wrong(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            store.gone = True
            gateway = await standing.gateway(keys=(declared(),), store=store)
            with pytest.raises(ApiError) as raised:
                gateway.directory.identify(bearer("mr-something"))
            assert (raised.value.status, raised.value.code) == (503, "keys_unread")
            assert gateway.directory.identify(bearer("root-secret")).key == "root"
            store.gone = False
            await gateway.shared.refresh()
            with pytest.raises(ApiError) as raised:
                gateway.directory.identify(bearer("mr-something"))
            assert raised.value.status == 401

    asynchronous(test)


def test_a_server_with_only_a_socket_lets_nobody_in_before_it_knows_whether_there_are_keys(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            store.gone = True
            gateway = await standing.gateway(store=store, admin=AdminConfig(socket="admin.sock", poll_s=3600.0))
            with pytest.raises(ApiError):
                gateway.directory.identify({})
            store.gone = False
            await gateway.shared.refresh()
            assert gateway.directory.identify({}).tenant == ""
            # With the first key nobody comes in without one, and it stays so when the last is gone.
            await gateway.operations.create_tenant(WHO, "red", TenantConfig())
            made = await gateway.operations.create_key(WHO, NEW)
            await gateway.operations.revoke_key(WHO, made["id"])
            again = await standing.gateway()
            for each in (gateway, again):
                with pytest.raises(ApiError) as raised:
                    each.directory.identify({})
                assert raised.value.code == "missing_api_key"

    asynchronous(test)


def test_an_answer_that_comes_late_undoes_nothing(tmp_path: Path) -> None:
    """One gateway reads while another, and then itself, change the same."""

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            slow = asyncio.Event()

            class Slow(Faulty):
                waits = False

                async def changes(self, since: int) -> AccountChanges:
                    found = await super().changes(since)
                    if self.waits:
                        await slow.wait()
                    return found

            store = Slow(standing.database, clock=standing.clock)
            heard: list[int] = []
            shared = AccountSync(store)
            shared.listen(lambda changes: heard.extend(record.version for record in changes.records))
            other = standing.store()
            await shared.refresh()
            record = TenantRecord(created=1, changed=1)
            await other.commit(AccountChange(entry=entry(), writes=(RecordWrite("tenant", "a", record, 0),)))
            store.waits = True
            reading = asyncio.create_task(shared.refresh())
            await asyncio.sleep(0.01)

            def plan() -> AccountChange:
                return AccountChange(
                    entry=entry(), writes=(RecordWrite("tenant", "a", None, shared.get("tenant", "a").version),)
                )

            removing = asyncio.create_task(shared.commit(plan))
            await asyncio.sleep(0.01)
            slow.set()
            await asyncio.gather(reading, removing)
            assert shared.get("tenant", "a").value is None
            assert (heard, shared.applied_epoch, shared.epoch) == ([1, 2], 2, 2)
            assert await shared.refresh()
            assert shared.get("tenant", "a").value is None

    asynchronous(test)


def test_what_is_removed_while_others_change_does_not_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            one, other = AccountSync(standing.store()), standing.store()
            record = TenantRecord(created=1, changed=1)
            await other.commit(AccountChange(entry=entry(), writes=(RecordWrite("tenant", "a", record, 0),)))
            await one.refresh()
            await other.commit(AccountChange(entry=entry(), writes=(RecordWrite("tenant", "b", record, 0),)))
            await one.commit(lambda: AccountChange(entry=entry(), writes=(RecordWrite("tenant", "a", None, 1),)))
            assert (one.epoch, one.applied_epoch) == (3, 1)  # it has not heard of the second yet
            await one.refresh()
            assert (one.epoch, one.applied_epoch) == (3, 3)
            assert sorted(one.held("tenant")) == ["b"]

    asynchronous(test)


def test_when_keys_were_last_used_is_written_rarely_and_at_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=(declared(),))
            await gateway.operations.create_tenant(WHO, "red", TenantConfig())
            made = await gateway.operations.create_key(WHO, NEW)
            gateway.directory.identify(bearer(made["secret"]))
            assert (await gateway.operations.key(made["id"]))["last_used_at"] is None
            used = int(standing.clock.now)
            await gateway.close()
            other = await standing.gateway(keys=(declared(),))
            assert (await other.operations.key(made["id"]))["last_used_at"] == used
            assert (await other.shared.store.changes(0)).epoch == 2  # a use is no change

    asynchronous(test)
