"""Parts that follow the shared state: one that fails keeps none of the others from it."""

from __future__ import annotations

from pathlib import Path

from headrace.gateway.accounts.account_records import TenantRecord
from headrace.gateway.accounts.account_store import AccountChange, AccountChanges, RecordWrite
from headrace.gateway.accounts.account_sync import AccountSync
from tests.support.accounts import entry, gateways
from tests.support.file_storage import asynchronous


def test_a_listener_that_fails_keeps_nobody_from_a_change(tmp_path: Path) -> None:
    def broken(changes: AccountChanges) -> None:
        raise RuntimeError

    async def test() -> None:
        async with gateways(tmp_path) as standing:
            shared, heard = AccountSync(standing.store()), list[str]()
            shared.listen(broken)
            shared.listen(lambda changes: heard.extend(record.id for record in changes.records))
            record = TenantRecord(created=1, changed=1)
            await shared.commit(lambda: AccountChange(entry=entry(), writes=(RecordWrite("tenant", "a", record, 0),)))
            other = standing.store()
            await other.commit(AccountChange(entry=entry(), writes=(RecordWrite("tenant", "b", record, 0),)))
            assert await shared.refresh()
            assert heard == ["a", "b"]
            assert shared.applied_epoch == 2

    asynchronous(test)
