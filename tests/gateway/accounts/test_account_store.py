"""The storage of shared state: versions, epochs, what is forgotten, and the audit log's bounds."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from headrace.config.tenant_section import TenantConfig
from headrace.gateway.accounts import account_store as module
from headrace.gateway.accounts.account_records import MarkRecord, TenantRecord
from headrace.gateway.accounts.account_store import (
    AccountChange,
    AccountStore,
    AuditRetention,
    RecordWrite,
    VersionConflictError,
)
from headrace.gateway.accounts.audit_log import ChainVerifier, VerificationResult
from tests.support.accounts import entry, gateways
from tests.support.file_storage import asynchronous, refused


def tenant(weight: float = 1.0) -> TenantRecord:
    return TenantRecord(settings=TenantConfig(weight=weight), created=1, changed=1)


def writing(*writes: RecordWrite, what: str = "test") -> AccountChange:
    return AccountChange(entry=entry(what), writes=writes)


async def verified(store: AccountStore) -> VerificationResult:
    span = await store.audit(limit=100_000)
    checking = ChainVerifier(span.anchor)
    for row in span.rows:
        checking.add(row)
    return checking.end(span.head)


def test_each_change_is_an_epoch_and_is_told_since_any_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            assert (await store.changes(0)).epoch == 0
            assert (await store.commit(writing(RecordWrite("tenant", "a", tenant(), 0)))).epoch == 1
            done = await store.commit(
                writing(RecordWrite("tenant", "a", tenant(2.0), 1), RecordWrite("tenant", "b", tenant(), 0))
            )
            assert done.epoch == 2
            await store.commit(writing(RecordWrite("tenant", "b", None, 2)))
            told = await store.changes(0)
            assert [(r.id, r.version, r.value is None) for r in told.records] == [("a", 2, False), ("b", 3, True)]
            assert told.now == standing.clock.now
            assert [(r.id, r.value) for r in (await store.changes(2)).records] == [("b", None)]
            assert (await store.changes(3)).records == ()

    asynchronous(test)


def test_a_change_of_what_is_no_longer_there_is_not_made_at_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            await store.commit(writing(RecordWrite("tenant", "a", tenant(), 0)))
            for wrong in (
                writing(RecordWrite("tenant", "b", tenant(), 0), RecordWrite("tenant", "a", tenant(), 0)),
                writing(RecordWrite("tenant", "b", tenant(), 0), RecordWrite("tenant", "a", tenant(), 7)),
                writing(RecordWrite("tenant", "b", tenant(), 1)),
                AccountChange(
                    entry=entry(), writes=(RecordWrite("tenant", "b", tenant(), 0),), expects=(("tenant", "a", 2),)
                ),
                AccountChange(
                    entry=entry(), writes=(RecordWrite("tenant", "b", tenant(), 0),), expects=(("tenant", "c", 1),)
                ),
            ):
                with pytest.raises(VersionConflictError):
                    await store.commit(wrong)
            assert (await store.changes(0)).epoch == 1
            assert [r.id for r in (await store.changes(0)).records] == ["a"]
            assert len((await store.audit()).rows) == 1
            # What was removed may be made again.
            await store.commit(writing(RecordWrite("tenant", "a", None, 1)))
            await store.commit(writing(RecordWrite("tenant", "a", tenant(), 0)))

    asynchronous(test)


def test_of_changes_at_the_same_time_none_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            stores = [standing.store() for _ in range(4)]
            await stores[0].commit(writing(RecordWrite("mark", "n", MarkRecord(at=0), 0)))

            async def add(store: AccountStore) -> None:
                while True:
                    (record,) = (await store.changes(0)).records
                    assert isinstance(record.value, MarkRecord)
                    raised = MarkRecord(at=record.value.at + 1)
                    try:
                        await store.commit(writing(RecordWrite("mark", "n", raised, record.version)))
                        return
                    except VersionConflictError:
                        await asyncio.sleep(0)

            await asyncio.gather(*(add(stores[n % 4]) for n in range(24)))
            (record,) = (await stores[0].changes(0)).records
            assert record.value == MarkRecord(at=24)
            assert (await verified(stores[0])).rows == 25

    asynchronous(test)


def test_who_has_not_heard_of_what_is_forgotten_is_told_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            for name in "abcdef":
                await store.commit(writing(RecordWrite("tenant", name, tenant(), 0)))
            for version, name in enumerate("abcd", start=1):
                await store.commit(writing(RecordWrite("tenant", name, None, version)))
            early = await store.changes(6)
            assert early.whole
            assert sorted(r.id for r in early.records if r.value is not None) == ["e", "f"]
            late = await store.changes(8)
            assert not late.whole
            assert sorted(r.id for r in late.records) == ["c", "d"]
            put_back = await store.changes(99)  # the file is an older one
            assert put_back.whole

    asynchronous(test)


def test_the_audit_log_keeps_its_bound_and_stays_verifiable(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store(retention=AuditRetention(rows=20))
            for number in range(120):
                await store.commit(writing(what=f"w.{number}"))
                assert len((await store.audit(limit=1000)).rows) <= 20
                assert (await verified(store)).good
            span = await store.audit(limit=1000)
            assert span.anchor.seq > 90
            assert span.rows[-1].seq == span.head.seq

    asynchronous(test)


def test_old_rows_go_but_never_the_newest_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST", 3)

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store(retention=AuditRetention(days=10))
            for number in range(6):
                at = int(standing.clock.now)
                await store.commit(AccountChange(entry=entry(f"w.{number}", at=at)))
                standing.clock.now += 86_400
            assert len((await store.audit()).rows) == 6
            standing.clock.now += 400 * 86_400  # the clock jumps ahead
            await store.commit(AccountChange(entry=entry("late", at=int(standing.clock.now))))
            span = await store.audit()
            assert [row.seq for row in span.rows] == [5, 6, 7, 8]  # the last says that the others went
            assert '"audit.prune"' in span.rows[-1].body
            assert (await verified(store)).good

    asynchronous(test)


def test_rows_of_the_audit_log_are_neither_changed_nor_removed_by_mistake(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store()
            await store.commit(writing())
            for statement in ("UPDATE audit SET body = ''", "DELETE FROM audit"):
                with pytest.raises(sqlite3.IntegrityError):
                    await standing.database.run(lambda connection, s=statement: connection.execute(s).rowcount)
            assert (await verified(store)).good

    asynchronous(test)


def test_tampering_with_the_file_shows_and_stops_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store(retention=AuditRetention(rows=12))
            for _ in range(8):
                await store.commit(writing())

            def tamper(connection: sqlite3.Connection) -> None:
                connection.execute("DROP TRIGGER audit_never_changes")
                connection.execute("UPDATE audit SET body = replace(body, 'ops', 'you') WHERE seq = 4")

            await standing.database.run(tamper)
            found = await verified(store)
            assert (found.good, found.broken_at) == (False, 4)

            def remove(connection: sqlite3.Connection) -> None:
                connection.execute("DROP TRIGGER IF EXISTS audit_keeps_its_end")
                connection.execute("DELETE FROM audit WHERE seq > 2")

            await standing.database.run(remove)
            await store.commit(writing())
            assert not (await verified(store)).good
            for _ in range(20):
                await store.commit(writing())

    asynchronous(test)


def test_uses_are_kept_where_they_are_later_and_the_key_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            gateway = await standing.gateway(keys=())
            store = gateway.shared.store
            await store.commit(writing(RecordWrite("tenant", "a", tenant(), 0)))
            await store.touch({"key_1": 5})
            assert await store.uses() == {}

            def put(connection: sqlite3.Connection) -> None:
                connection.execute("INSERT INTO shared_records VALUES ('key', 'key_1', 1, '{}')")

            await standing.database.run(put)
            await store.touch({"key_1": 5, "key_2": 6})
            await store.touch({"key_1": 4})
            assert await store.uses() == {"key_1": 5}

    asynchronous(test)


def test_a_storage_that_does_not_answer_costs_a_bounded_wait(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateways(tmp_path) as standing:
            store = standing.store(answer_s=0.05)
            begun, on = threading.Event(), threading.Event()

            def wait(_: sqlite3.Connection) -> None:
                begun.set()
                on.wait(20.0)

            waiting = asyncio.create_task(standing.database.run(wait))
            await asyncio.to_thread(begun.wait, 20.0)
            try:
                for ask in (store.changes(0), store.commit(writing()), store.uses(), store.audit()):
                    error = await refused(ask)
                    assert error.status == 503
            finally:
                on.set()
            await waiting

    asynchronous(test)
