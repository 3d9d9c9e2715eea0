"""This gateway's view of the shared state, and how it stays true: changes go out, those of others come in.

Owns Shared: the records as this gateway knows them, the epoch up to which it does, the poll that finds newer ones, and
the making of changes. What follows from a record is its listeners' (directory, switches, caches).

    commit ──▶ Store: one transaction, epoch + 1 ──▶ applied here at once
                 ▲
    poll, each second: anything newer than applied_epoch? ──▶ applied; so others follow within poll_s + answer_s

A storage that does not answer costs a bounded wait each time. Meanwhile everything goes on with what is known, and
`age` says how old that is. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
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

log: Final = structlog.stdlib.get_logger("headrace.shared")

TRIES: Final = 8  # of a change that others are faster with
Listener = Callable[[AccountChanges], None]


class AccountSync:
    def __init__(
        self,
        store: AccountStore,
        *,
        poll_s: float = 1.0,
        uses_s: float = 60.0,  # between two writings of when keys were last used
        taken_uses: Callable[[], Mapping[str, int]] | None = None,  # hands over what is to be written of that
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.epoch = 0  # the newest that is known to exist
        self.applied_epoch = 0  # up to which everything is applied here
        self.loaded = False  # the state was read at least once
        self._poll_s = poll_s
        self._uses_s = uses_s
        self._taken_uses = taken_uses
        self._monotonic = monotonic
        self._held: dict[str, dict[str, AccountRecord]] = {}
        self._listeners: list[Listener] = []
        self._seen = monotonic()  # the last answer of the storage
        self._told: float | None = None  # the storage's clock at that answer
        self._written = monotonic()
        self._failing = False
        self._polling: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # one question to the storage at a time: answers are applied in their order

    @property
    def age(self) -> float:
        """Seconds since the storage last answered; since the start, where it never did."""
        return max(0.0, self._monotonic() - self._seen)

    def now(self) -> float:
        """By the storage's clock, on which all gateways agree. What is kept and compared with it later is in this."""
        return time.time() if self._told is None else self._told + self.age

    def held(self, kind: str) -> Mapping[str, AccountRecord]:
        return self._held.get(kind, {})

    def get(self, kind: str, id: str) -> AccountRecord:
        """With the version 0 and no value where there is none."""
        return self.held(kind).get(id) or AccountRecord(kind, id, 0, None)

    def listen(self, listener: Listener) -> None:
        """Hears of all that is applied, in the order of epochs for each record. Must not wait."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Reads the state, where the storage answers; if not, the poll goes on trying."""
        await self.refresh()
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
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
        """Applies what is new; whether the storage answered."""
        async with self._turn:
            return await self._refresh()

    async def _refresh(self) -> bool:
        try:
            self._take(await self.store.changes(self.applied_epoch))
        except ApiError as error:
            if not self._failing:  # once, not each second
                log.error("the shared state cannot be read", reason=error.message, applied_epoch=self.applied_epoch)
            self._failing = True
            return False
        except Exception as error:  # a bug must not end the poll: a revoked key would live on
            if not self._failing:
                log.error("the shared state cannot be read", exc_info=error)
            self._failing = True
            return False
        if self._failing:
            log.info("the shared state can be read again", applied_epoch=self.applied_epoch)
        self._failing = False
        return True

    def _take(self, changes: AccountChanges) -> None:
        self._seen, self._told = self._monotonic(), changes.now
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
        told = AccountChanges(epoch=changes.epoch, now=changes.now, records=tuple(fresh), whole=changes.whole)
        for listener in self._listeners:
            try:
                listener(told)
            except Exception as error:  # a bug; the others are to hear of it all the same
                log.error("a change is not followed", exc_info=error)

    async def commit(self, plan: Callable[[], AccountChange]) -> CommitResult:
        """Makes a change; `plan` says which, from what is held now, and again where somebody else was faster.

        Whatever `plan` raises ends it. ApiError where the storage does not answer.
        """
        async with self._turn:
            for _ in range(TRIES):
                change = plan()
                try:
                    done = await self.store.commit(change)
                except VersionConflictError:
                    if not await self._refresh():
                        break
                    continue
                self._made(change, done)
                return done
        raise ApiError(
            "others change the same at this moment; try again",
            kind="overloaded_error",
            code="conflict",
            retry_after=1.0,
        )

    def _made(self, change: AccountChange, done: CommitResult) -> None:
        """What was just written holds here at once, whatever else is still to be heard of."""
        self._seen, self._told = self._monotonic(), done.now
        self.epoch = max(self.epoch, done.epoch)
        records = tuple(AccountRecord(write.kind, write.id, done.epoch, write.value) for write in change.writes)
        self._apply(AccountChanges(epoch=self.applied_epoch, now=done.now, records=records))
        if done.epoch == self.applied_epoch + 1 and self.loaded:
            self.applied_epoch = done.epoch
        entry = change.entry
        # The log has the chain's head: whoever remakes the chain would have to change the log as well.
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
                log.warning("when keys were last used is not written", reason=error.message)
