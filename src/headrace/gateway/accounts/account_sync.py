"""Keeps this gateway's copy of the account records up to date and commits changes.

Listeners (directory, fast mode, caches) apply the records.

    commit ──▶ AccountStore: one transaction, epoch + 1 ──▶ applied here at once
                 ▲
    poll, each second: anything newer than applied_epoch? ──▶ applied; other gateways follow within poll_s + answer_s

A store that does not answer costs a bounded wait. The gateway then continues with the known records; `age` says how old
they are. Use from one event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from headrace.gateway.accounts.account_records import AccountRecord
from headrace.gateway.accounts.account_store import (
    AccountChange,
    AccountChanges,
    AccountStore,
    CommitResult,
    VersionConflictError,
)
from headrace.gateway.api_errors import ApiError
from headrace.tasks import end_tasks

log: Final = structlog.stdlib.get_logger("headrace.shared")

TRIES: Final = 8  # attempts of a change that conflicts with others
Listener = Callable[[AccountChanges], None]


class AccountSync:
    def __init__(
        self,
        store: AccountStore,
        *,
        poll_s: float = 1.0,
        uses_s: float = 60.0,  # interval of writing when keys were last used
        taken_uses: Callable[[], Mapping[str, int]] | None = None,  # returns the uses to write
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.epoch = 0  # newest known epoch
        self.applied_epoch = 0  # everything up to here is applied
        self.loaded = False  # the records were read at least once
        self._poll_s = poll_s
        self._uses_s = uses_s
        self._taken_uses = taken_uses
        self._monotonic = monotonic
        self._held: dict[str, dict[str, AccountRecord]] = {}
        self._listeners: list[Listener] = []
        self.spread: Callable[[], Awaitable[None]] | None = None  # tells this machine's other processes of a commit
        self._seen = monotonic()  # time of the store's last answer
        self._store_time: float | None = None  # the store's clock at that answer
        self._written = monotonic()
        self._failing = False
        self._polling: asyncio.Task[None] | None = None
        self._call_lock = asyncio.Lock()  # one call to the store at a time, so that answers are applied in order

    @property
    def age(self) -> float:
        """Seconds since the store last answered, or since the start."""
        return max(0.0, self._monotonic() - self._seen)

    def now(self) -> float:
        """Return the time of the store's clock, which all gateways share."""
        return time.time() if self._store_time is None else self._store_time + self.age

    def held(self, kind: str) -> Mapping[str, AccountRecord]:
        return self._held.get(kind, {})

    def get(self, kind: str, id: str) -> AccountRecord:
        """Return a record; with version 0 and no value if it does not exist."""
        return self.held(kind).get(id) or AccountRecord(kind, id, 0, None)

    def listen(self, listener: Listener) -> None:
        """Call `listener` with all changes, per record in order of epochs. It must not block."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Read the records and start polling. If the store does not answer, polling retries."""
        await self.refresh()
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        await end_tasks([self._polling])
        self._polling = None
        await self._write_uses()
        await self.store.close()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.refresh()
            if self._monotonic() - self._written >= self._uses_s:
                await self._write_uses()

    async def refresh(self) -> bool:
        """Apply new changes. Return whether the store answered."""
        async with self._call_lock:
            return await self._refresh()

    async def _refresh(self) -> bool:
        try:
            self._take(await self.store.changes(self.applied_epoch))
        except ApiError as error:
            if not self._failing:  # log once, not every second
                log.error("cannot read the account records", reason=error.message, applied_epoch=self.applied_epoch)
            self._failing = True
            return False
        except Exception as error:  # a bug must not stop polling, or a revoked key would stay valid
            if not self._failing:
                log.error("cannot read the account records", exc_info=error)
            self._failing = True
            return False
        if self._failing:
            log.info("account records can be read again", applied_epoch=self.applied_epoch)
        self._failing = False
        return True

    def _take(self, changes: AccountChanges) -> None:
        self._seen, self._store_time = self._monotonic(), changes.now
        first, self.loaded = not self.loaded, True
        if changes.epoch <= self.applied_epoch and not (changes.whole or first):
            return
        self._apply(changes)
        self.applied_epoch = changes.epoch
        self.epoch = changes.epoch if changes.whole else max(self.epoch, changes.epoch)

    def _apply(self, changes: AccountChanges) -> None:
        if changes.whole:
            self._held.clear()
        fresh: list[AccountRecord] = []
        for record in changes.records:
            known = self._held.setdefault(record.kind, {})
            before = known.get(record.id)
            if before is not None and before.version >= record.version:
                continue
            fresh.append(record)
            if record.value is None:
                known.pop(record.id, None)
            else:
                known[record.id] = record
        applied = AccountChanges(epoch=changes.epoch, now=changes.now, records=tuple(fresh), whole=changes.whole)
        for listener in self._listeners:
            try:
                listener(applied)
            except Exception as error:  # a bug in one listener must not affect the others
                log.error("a change was not applied", exc_info=error)

    async def commit(self, plan: Callable[[], AccountChange]) -> CommitResult:
        """Commit the change that `plan` makes from the current records; plan again on a conflict.

        Exceptions of `plan` pass through. Raise ApiError if the store does not answer.
        """
        done = await self._commit(plan)
        if self.spread is not None:
            await self.spread()
        return done

    async def _commit(self, plan: Callable[[], AccountChange]) -> CommitResult:
        async with self._call_lock:
            for _ in range(TRIES):
                change = plan()
                try:
                    done = await self.store.commit(change)
                except VersionConflictError:
                    if not await self._refresh():
                        break
                    continue
                self._apply_commit(change, done)
                return done
        raise ApiError(
            "Others are changing the same record. Try again.",
            kind="overloaded_error",
            code="conflict",
            retry_after=1.0,
        )

    def _apply_commit(self, change: AccountChange, done: CommitResult) -> None:
        """Apply a committed change at once, before the next poll."""
        self._seen, self._store_time = self._monotonic(), done.now
        self.epoch = max(self.epoch, done.epoch)
        records = tuple(AccountRecord(write.kind, write.id, done.epoch, write.value) for write in change.writes)
        self._apply(AccountChanges(epoch=self.applied_epoch, now=done.now, records=records))
        if done.epoch == self.applied_epoch + 1 and self.loaded:
            self.applied_epoch = done.epoch
        entry = change.entry
        # The log contains the chain's head, so a rewritten chain would contradict it.
        log.info(
            "changed",
            what=entry.what,
            target=entry.target,
            who=entry.who,
            request=entry.request,
            epoch=done.epoch,
            audit=str(done.head),
        )

    async def _write_uses(self) -> None:
        self._written = self._monotonic()
        uses: Mapping[str, int] = {} if self._taken_uses is None else self._taken_uses()
        if uses:
            try:
                await self.store.touch(uses)
            except ApiError as error:
                log.warning("cannot write when keys were last used", reason=error.message)
