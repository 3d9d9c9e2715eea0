"""The shared state in Postgres does what it does in sqlite: epochs, conflicts, what is forgotten, the audit log."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.config import names_of
from headrace.config.tenant_section import AdminConfig, FastConfig, TenantConfig
from headrace.gateway.accounts import postgres as module
from headrace.gateway.accounts.account_records import KeyScope, MarkRecord, TenantRecord
from headrace.gateway.accounts.account_services import AccountServices
from headrace.gateway.accounts.account_store import AccountChange, AuditRetention, RecordWrite, VersionConflictError
from headrace.gateway.accounts.admin_operations import NewKey
from headrace.gateway.accounts.audit_log import ChainVerifier
from headrace.gateway.accounts.postgres import PostgresAccountStore
from headrace.gateway.api_errors import ApiError
from tests.support.accounts import CONFIG, WHO, bearer, declared, entry
from tests.support.file_storage import asynchronous, refused
from tests.support.programs.postgres_server import Server, serving, why_not

if importlib.util.find_spec("asyncpg") is None:
    pytest.skip("asyncpg is not there: pip install 'headrace[postgres]'", allow_module_level=True)
if (reason := why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

Stores = Callable[..., PostgresAccountStore]


SERVED = names_of(CONFIG)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def stores(server: Server) -> Stores:
    """Stores on tables of their own."""
    schema = f"test_{secrets.token_hex(6)}"

    def one(*, answer_s: float = 60.0, **options: Any) -> PostgresAccountStore:
        return PostgresAccountStore(server.dsn, schema=schema, answer_s=answer_s, **options)

    return one


def tenant(weight: float = 1.0) -> TenantRecord:
    return TenantRecord(settings=TenantConfig(weight=weight), created=1, changed=1)


def writing(*writes: RecordWrite) -> AccountChange:
    return AccountChange(entry=entry(after={"texts": "ü☃ {}"}), writes=writes)


async def good(store: PostgresAccountStore) -> int:
    span = await store.audit(limit=10_000)
    checking = ChainVerifier(span.anchor)
    for row in span.rows:
        checking.add(row)
    verdict = checking.end(span.head)
    assert verdict.good, verdict.why
    return verdict.rows


def test_changes_epochs_and_conflicts(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 1)

    async def test() -> None:
        one, other = stores(), stores()
        assert (await one.changes(0)).epoch == 0
        for number, name in enumerate("abc", start=1):
            assert (await one.commit(writing(RecordWrite("tenant", name, tenant(), 0)))).epoch == number
        told = await other.changes(1)
        assert [(each.id, each.version) for each in told.records] == [("b", 2), ("c", 3)]
        assert abs(told.now - time.time()) < 3600
        for wrong in (
            writing(RecordWrite("tenant", "d", tenant(), 0), RecordWrite("tenant", "a", tenant(), 2)),
            AccountChange(
                entry=entry(), writes=(RecordWrite("tenant", "d", tenant(), 0),), expects=(("tenant", "a", 3),)
            ),
        ):
            with pytest.raises(VersionConflictError):
                await other.commit(wrong)
        assert (await one.changes(0)).epoch == 3
        await other.commit(writing(RecordWrite("tenant", "a", None, 1)))
        await other.commit(writing(RecordWrite("tenant", "b", None, 2)))
        whole = await one.changes(3)
        assert whole.whole
        assert sorted(each.id for each in whole.records if each.value is not None) == ["c"]
        assert (await one.changes(5)).records == ()
        assert await good(one) == 5
        await other.touch({"key_1": 5})
        assert await one.uses() == {}
        for each in (one, other):
            await each.close()

    asynchronous(test)


def test_of_changes_at_the_same_time_none_is_lost(stores: Stores) -> None:
    async def test() -> None:
        made = [stores(retention=AuditRetention(rows=10)) for _ in range(3)]
        await made[0].commit(writing(RecordWrite("mark", "n", MarkRecord(at=0), 0)))

        async def add(store: PostgresAccountStore) -> None:
            while True:
                (record,) = (await store.changes(0)).records
                assert isinstance(record.value, MarkRecord)
                try:
                    await store.commit(
                        writing(RecordWrite("mark", "n", MarkRecord(at=record.value.at + 1), record.version))
                    )
                    return
                except VersionConflictError:
                    await asyncio.sleep(0)

        await asyncio.gather(*(add(made[number % 3]) for number in range(24)))
        (record,) = (await made[1].changes(0)).records
        assert record.value == MarkRecord(at=24)
        assert await good(made[2]) <= 10
        for each in made:
            await each.close()

    asynchronous(test)


def test_two_gateways_share_tenants_keys_and_fast_mode(stores: Stores) -> None:
    async def test() -> None:
        admin = AdminConfig(poll_s=0.05)
        fast = FastConfig(max_tokens=64)
        one, other = [
            AccountServices(stores(), {}, served=SERVED, keys=(declared(),), admin=admin, fast=fast) for _ in range(2)
        ]
        for each in (one, other):
            await each.shared.start()

        async def followed() -> None:
            while other.shared.applied_epoch < one.shared.epoch:
                await asyncio.sleep(0.01)

        await one.operations.create_tenant(WHO, "red", TenantConfig())
        key = await one.operations.create_key(WHO, NewKey(name="k", tenant="red", scope=KeyScope()))
        await one.operations.set_fast(WHO, "red", on=True, ttl_s=60.0, reason="storm")
        await followed()
        assert other.directory.identify(bearer(key["secret"])).tenant == "red"
        assert other.switches.fast("red", "mini")
        await one.shared.store.touch({key["id"]: 7})
        assert (await other.operations.key(key["id"]))["last_used_at"] == 7
        await one.operations.revoke_key(WHO, key["id"])
        await followed()
        with pytest.raises(ApiError):
            other.directory.identify(bearer(key["secret"]))
        for each in (one, other):
            await each.close()

    asynchronous(test)


def test_a_database_that_is_not_there_is_an_error_of_the_storage() -> None:
    async def test() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store = PostgresAccountStore(
                f"postgresql://headrace@127.0.0.1:{free.getsockname()[1]}/postgres", answer_s=0.5
            )
            error = await refused(store.changes(0))
            assert (error.status, "5432" in error.message) == (503, False)
            await store.close()
        with pytest.raises(ValueError, match="Invalid schema"):
            PostgresAccountStore("", schema="a; DROP TABLE audit")

    asynchronous(test)


def test_a_database_that_is_frozen_costs_a_bounded_wait_and_is_back_afterwards(
    stores: Stores, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        store = stores()
        gateway = AccountServices(store, {}, served=SERVED, keys=(declared(),), admin=AdminConfig(poll_s=3600.0))
        await gateway.shared.start()
        await gateway.operations.create_tenant(WHO, "red", TenantConfig())
        key = await gateway.operations.create_key(WHO, NewKey(name="k", tenant="red", scope=KeyScope()))
        with server.frozen(), monkeypatch.context() as bounded:
            bounded.setattr(store, "_answer_s", 0.2)
            assert not await gateway.shared.refresh()
            assert (await refused(gateway.operations.revoke_key(WHO, key["id"]))).status == 503
            assert gateway.directory.identify(bearer(key["secret"])).tenant == "red"
        for _ in range(100):  # it may take a moment to wake up
            if await gateway.shared.refresh():
                break
        await gateway.operations.revoke_key(WHO, key["id"])
        await gateway.close()

    asynchronous(test)
