"""Keys, tenants and switches of several processes: the main process keeps them and tells the fronts of every change.

A change is answered once every front has applied it, so that a key revoked by one process is revoked in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.gateway.accounts.account_records import decode_records, encode_value
from headrace.gateway.accounts.account_store import (
    AccountChange,
    AccountChanges,
    AccountStore,
    AuditPage,
    CommitResult,
)
from headrace.gateway.api_errors import ApiError
from headrace.server.processes.channel import CallHandler, Channel

_Row = tuple[str, str, int, str | None]
_Changes = tuple[int, float, list[_Row], bool]


def account_handlers(store: AccountStore) -> dict[str, CallHandler]:
    """The main process's side."""

    async def changes(since: int) -> _Changes:
        found = await store.changes(since)
        rows: list[_Row] = [
            (each.kind, each.id, each.version, None if each.value is None else encode_value(each.value))
            for each in found.records
        ]
        return found.epoch, found.now, rows, found.whole

    return {
        "account_changes": CallHandler(tuple[int], changes),
        "key_uses": CallHandler(tuple[()], store.uses),
        "touch_keys": CallHandler(tuple[dict[str, int]], store.touch),
    }


class FrontAccountStore:
    """A front process's side. Front processes have no admin API, so they commit nothing."""

    def __init__(self, channel: Callable[[], Channel], *, shared: bool) -> None:
        self.shared = shared
        self._channel = channel

    async def changes(self, since: int) -> AccountChanges:
        found: _Changes = await self._channel().call("account_changes", since, type=_Changes)
        epoch, now, rows, whole = found
        return AccountChanges(epoch=epoch, now=now, records=decode_records(rows), whole=whole)

    async def uses(self) -> dict[str, int]:
        return await self._channel().call("key_uses", type=dict[str, int])

    async def touch(self, uses: Mapping[str, int]) -> None:
        if self._channel().is_open:
            await self._channel().call("touch_keys", dict(uses), type=None)

    async def commit(self, change: AccountChange) -> CommitResult:
        raise ApiError("Only the main process changes accounts.", kind="server_error", code="internal_error")

    async def audit(
        self, *, after: int = 0, before: int | None = None, limit: int = 100, newest: bool = False
    ) -> AuditPage:
        raise ApiError("Only the main process has the audit log.", kind="server_error", code="internal_error")

    async def close(self) -> None:
        """The main process closes it."""
