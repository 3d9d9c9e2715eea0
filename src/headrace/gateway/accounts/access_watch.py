"""Ends what runs for a key that is revoked or a tenant that is deleted.

What runs for a tenant that is suspended goes on to its end, and so does what a key began before it expired. Knows
neither answers nor connections: whoever runs something registers a function that ends it with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.api_errors import ApiError
from headrace.gateway.serving.exchange import Caller

End: TypeAlias = Callable[[ApiError], None]


class AccessWatch:
    """All of it belongs to one event loop. Bounded by the requests that the server runs."""

    def __init__(self, directory: AccountDirectory) -> None:
        self._directory = directory
        self._running: dict[tuple[str, str], dict[End, None]] = {}  # by tenant and key

    def watch(self, caller: Caller, end: End) -> Callable[[], None]:
        """Call `end` when the caller loses its access. Return a function that ends the watch."""
        if not caller.key:
            return _unwatched  # there is nothing to lose
        place = (caller.tenant, caller.key)
        self._running.setdefault(place, {})[end] = None

        def unwatch() -> None:
            ends = self._running.get(place, {})
            ends.pop(end, None)
            if not ends:
                self._running.pop(place, None)

        return unwatch

    def take(self, changes: AccountChanges) -> None:
        """Follow changed account records. Call after the directory has applied them."""
        changed = {(record.kind, record.id) for record in changes.records}
        for (tenant, key), ends in list(self._running.items()):
            if changes.whole or ("key", key) in changed or ("tenant", tenant) in changed:
                try:
                    self._directory.on_behalf(tenant, key=key)
                except ApiError as error:
                    if error.code != "tenant_suspended":
                        for end in list(ends):
                            end(error)


def _unwatched() -> None:
    """Ends no watch."""
