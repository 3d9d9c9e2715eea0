"""Holds budget for running requests, in this process or in a database that gateways share.

Both implementations decide whether a request may be served and never let a budget be exceeded by reservations.
LocalBudgetHolds keeps exact sums in memory: stored + waiting to be written + held. It reads a stored sum once, when its
period is first used. SharedBudgetHolds asks the database in one statement with a timeout and backs off when it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import (
    HELD,
    UNAVAILABLE,
    Admitted,
    BudgetBook,
    BudgetDecision,
    BudgetStatus,
    decide,
)
from headrace.gateway.ledger.ledger_records import BudgetScope, ReservedCharge, ScopeSums, Settlement, scopes_of
from headrace.gateway.ledger.ledger_store import SharedLedgerStore
from headrace.gateway.ledger.periods import Calendar, month_of
from headrace.gateway.postgres_pool import StoreBusyError

log: Final = logging.getLogger(__name__)

_LONGEST_PAUSE: Final = 30.0  # seconds of backoff, at most


class OpenCharge(msgspec.Struct):
    """A request from its reservation until its charge is stored."""

    reserved: ReservedCharge
    most: int | None = None  # output tokens, at most
    slot: int | None = None  # of the journal
    held: int = 0  # micros
    scopes: tuple[BudgetScope, ...] = ()  # scopes with a budget that it counts in
    output_tokens: int = 0
    machine_us: int = 0
    settled: Settlement | None = None
    since: float = 0.0  # when it began to wait for the store
    denied: bool = False  # an extension was denied
    extending: asyncio.Task[None] | None = None
    asked: bool = False  # a shared store may hold budget for it
    stored: bool = False  # a shared store knows it
    reported_tokens: int = 0  # output tokens that a shared store knows of

    @property
    def id(self) -> str:
        return self.reserved.entry.id


Estimate = Callable[[str], int]  # variant → micros
Ended = Callable[[BudgetStatus, BudgetScope], None]


class BudgetHolds(Protocol):
    early: bool  # extensions take time and must be requested before they are needed

    async def hold(self, open: OpenCharge, estimate: Estimate, now: float, *, falls: bool) -> BudgetDecision: ...

    def extend(self, open: OpenCharge, need: int, more: int) -> bool:
        """Hold at least `need` micros and up to `more`. Return whether the request may go on."""
        ...

    def release(self, open: OpenCharge) -> None: ...
    def settle(self, open: OpenCharge, micros: int) -> None: ...
    def written(self, open: OpenCharge, micros: int, *, counted: bool) -> None: ...
    def declared(self, tenant: str, running: Iterable[OpenCharge]) -> None: ...
    def forget(self, now: float) -> None: ...


class StoreBackoff:
    """Exponential backoff for a store that does not answer."""

    def __init__(self, monotonic: Callable[[], float], *, first_s: float = 1.0) -> None:
        self._monotonic = monotonic
        self._first = self._length = first_s
        self._until = 0.0

    @property
    def is_active(self) -> bool:
        return self._monotonic() < self._until

    def failed(self) -> bool:
        """Start or extend the backoff. Return False if it is already active."""
        if self.is_active:
            return False
        self._until = self._monotonic() + self._length
        self._length = min(self._length * 2, _LONGEST_PAUSE)
        return True

    def answered(self) -> None:
        self._length = self._first
        self._until = 0.0


class _Sum(msgspec.Struct):
    stored: int | None = None  # None: not read yet
    waiting: int = 0  # charged, not stored yet
    held: int = 0

    @property
    def spent(self) -> int:
        return (self.stored or 0) + self.waiting

    def fits(self, budget: BudgetConfig, micros: int, variant: str) -> bool:
        return self.spent + self.held + micros <= budget.limit_for(variant)


class LocalBudgetHolds:
    early = False

    def __init__(
        self,
        accounts: BudgetBook,
        calendar: Calendar,
        read: Callable[[Sequence[BudgetScope]], Awaitable[ScopeSums]],
        writing: asyncio.Lock,  # held while stored and waiting sums change together
        *,
        wait_s: float,
        monotonic: Callable[[], float],
        ended: Ended,
    ) -> None:
        self._accounts = accounts
        self._calendar = calendar
        self._read = read
        self._writing = writing
        self._wait = wait_s
        self._ended = ended
        self._pause = StoreBackoff(monotonic)
        self._sums: dict[BudgetScope, _Sum] = {}
        self._reading: dict[BudgetScope, asyncio.Task[None]] = {}

    async def hold(self, open: OpenCharge, estimate: Estimate, now: float, *, falls: bool) -> BudgetDecision:
        entry = open.reserved.entry
        budgets = self._accounts.of(entry.tenant).for_endpoint(entry.endpoint)
        if not budgets:
            return Admitted(estimate(entry.variant))
        scopes = _scopes(open, budgets)
        sums = [self._sum(scope) for scope in scopes]
        if not _known(sums):
            await self._load_sums(scopes)
            # Budgets and sums may have changed while waiting.
            budgets = self._accounts.of(entry.tenant).for_endpoint(entry.endpoint)
            scopes = _scopes(open, budgets)
            sums = [self._sum(scope) for scope in scopes]
        variant, checked = entry.variant, _known(sums)
        micros = estimate(variant)
        if not checked:
            if self._accounts.of(entry.tenant).when_down == "closed":
                return UNAVAILABLE
        elif not all(each.fits(budget, micros, variant) for each, budget in zip(sums, budgets, strict=True)):
            standings = [self._standing(*each) for each in zip(budgets, scopes, strict=True)]
            for standing, scope in zip(standings, scopes, strict=True):
                if standing.is_spent(micros, variant):
                    self._ended(standing, scope)
            return decide(standings, variant, estimate, self._calendar, now, falls=falls)
        open.scopes, open.held = scopes, micros
        for sum in sums:
            sum.held += micros
        return Admitted(micros, checked)

    def extend(self, open: OpenCharge, need: int, more: int) -> bool:
        entry = open.reserved.entry
        target = more
        for scope in open.scopes:
            budget = self._accounts.budget(*scope)
            if budget is not None:
                sum = self._sum(scope)
                target = min(target, budget.limit_for(entry.variant) - sum.spent - sum.held + open.held)
        if target < need:
            return False
        for scope in open.scopes:
            self._sum(scope).held += target - open.held
        open.held = target
        return True

    def release(self, open: OpenCharge) -> None:
        for scope in open.scopes:
            self._sum(scope).held -= open.held
        open.held = 0

    def settle(self, open: OpenCharge, micros: int) -> None:
        entry = open.reserved.entry
        self.release(open)
        open.scopes = _scopes(open, self._accounts.of(entry.tenant).for_endpoint(entry.endpoint))
        for scope in open.scopes:
            self._sum(scope).waiting += micros

    def written(self, open: OpenCharge, micros: int, *, counted: bool) -> None:
        for scope in open.scopes:
            sum = self._sum(scope)
            sum.waiting -= micros
            if counted and sum.stored is not None:
                sum.stored += micros

    def declared(self, tenant: str, running: Iterable[OpenCharge]) -> None:
        """Apply changed budgets: running requests count in the new ones from now on."""
        for scope in [scope for scope in self._sums if scope.tenant == tenant]:
            if self._accounts.budget(*scope) is None:
                del self._sums[scope]  # no longer maintained
            else:
                self._sums[scope].held = self._sums[scope].waiting = 0
        for open in running:
            entry = open.reserved.entry
            if entry.tenant == tenant:
                open.scopes = _scopes(open, self._accounts.of(tenant).for_endpoint(entry.endpoint))
                for scope in open.scopes:
                    sum = self._sum(scope)
                    sum.held += open.held
                    sum.waiting += 0 if open.settled is None else open.settled.micros

    def forget(self, now: float) -> None:
        """Drop sums of past periods. If the clock goes back, they are read again."""
        day = self._calendar.day(now)
        for scope, sum in list(self._sums.items()):
            if scope.period not in (day, month_of(day)) and not sum.held and not sum.waiting:
                del self._sums[scope]

    def standings(self, tenant: str, day: str) -> list[BudgetStatus]:
        """Return the status of budgets whose sums are known."""
        budgets = self._accounts.of(tenant).budgets
        scopes = [BudgetScope(tenant, budget.endpoint, budget.label(day)) for budget in budgets]
        return [self._standing(*each) for each in zip(budgets, scopes, strict=True) if _known([self._sum(each[1])])]

    def _standing(self, budget: BudgetConfig, scope: BudgetScope) -> BudgetStatus:
        sum = self._sum(scope)
        return BudgetStatus(budget, scope.period, sum.spent, sum.held)

    def _sum(self, scope: BudgetScope) -> _Sum:
        found = self._sums.get(scope)
        if found is None:
            found = self._sums[scope] = _Sum()
        return found

    async def _load_sums(self, scopes: Sequence[BudgetScope]) -> None:
        """Read missing sums; return when they are read or the timeout has passed."""
        missing = [scope for scope in scopes if self._sum(scope).stored is None]
        new = [scope for scope in missing if scope not in self._reading]
        if new and not self._pause.is_active:
            task = asyncio.create_task(self._read_sums(new))
            for scope in new:
                self._reading[scope] = task
        waiting = {self._reading[scope] for scope in missing if scope in self._reading}
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=self._wait)
            if late:
                self._pause.failed()

    async def _read_sums(self, scopes: Sequence[BudgetScope]) -> None:
        try:
            async with self._writing:
                found = await self._read(scopes)
                for scope in scopes:
                    sum = self._sums.get(scope)  # None: no budget counts it any more
                    if sum is not None and sum.stored is None:
                        sum.stored = found.get(scope, 0)
            self._pause.answered()
        except Exception as error:
            if self._pause.failed():
                log.error("cannot read what is spent: %s", error)
        finally:
            for scope in scopes:
                self._reading.pop(scope, None)


class SharedBudgetHolds:
    early = True

    def __init__(
        self,
        accounts: BudgetBook,
        calendar: Calendar,
        store: SharedLedgerStore,
        *,
        monotonic: Callable[[], float],
        ended: Ended,
        release_later: Callable[[str], None],  # called with requests that may still hold budget in the database
    ) -> None:
        self._accounts = accounts
        self._calendar = calendar
        self._store = store
        self._ended = ended
        self._release_later = release_later
        self._pause = StoreBackoff(monotonic)

    async def hold(self, open: OpenCharge, estimate: Estimate, now: float, *, falls: bool) -> BudgetDecision:
        entry = open.reserved.entry
        account = self._accounts.of(entry.tenant)
        budgets = account.for_endpoint(entry.endpoint)
        micros = estimate(entry.variant)
        if not budgets:
            return Admitted(micros)
        open.scopes = _scopes(open, budgets)
        standings = await self._ask(open, budgets, micros)
        if standings is None:
            return UNAVAILABLE if account.when_down == "closed" else Admitted(micros, checked=False)
        if not standings:
            return Admitted(micros)
        for standing, scope in zip(standings, open.scopes, strict=True):
            if standing.is_spent(micros, entry.variant):
                self._ended(standing, scope)
        verdict = decide(standings, entry.variant, estimate, self._calendar, now, falls=falls)
        # The database denied it by the same sums, so do not admit it here.
        return HELD if isinstance(verdict, Admitted) else verdict

    async def _ask(self, open: OpenCharge, budgets: Sequence[BudgetConfig], micros: int) -> list[BudgetStatus] | None:
        """Ask the database to hold. Return [] on success, the statuses if denied, None without an answer."""
        if self._pause.is_active:
            return None
        entry, day = open.reserved.entry, open.reserved.day
        by_scope = dict(zip(_scopes(open, budgets), budgets, strict=True))
        scopes = scopes_of(entry.tenant, entry.endpoint, day)
        limits = [by_scope[scope].limit_for(entry.variant) if scope in by_scope else None for scope in scopes]
        open.asked = True
        try:
            held, sums = await self._store.hold(open.reserved, micros, limits)
        except StoreBusyError:
            return None
        except Exception as error:
            if self._pause.failed():
                log.error("the ledger's database does not answer: %s", str(error) or type(error).__name__)
            return None
        self._pause.answered()
        if held:
            open.held, open.stored = micros, True
            return []
        open.asked = open.stored
        found = dict(zip(scopes, sums, strict=True))
        return [BudgetStatus(budget, scope.period, *found[scope]) for scope, budget in by_scope.items()]

    def extend(self, open: OpenCharge, need: int, more: int) -> bool:
        """Request the extension in the background and let the request go on."""
        if open.extending is None and not open.denied:
            open.extending = asyncio.create_task(self._extend(open, more))
            open.extending.add_done_callback(partial(_extended, open))
        return need <= open.held or not open.denied

    async def _extend(self, open: OpenCharge, more: int) -> None:
        entry = open.reserved.entry
        account = self._accounts.of(entry.tenant)
        budgets = account.for_endpoint(entry.endpoint)
        if not budgets or open.settled is not None:
            return
        standings = await self._ask(open, budgets, more)
        if standings:
            open.denied = True
            room = min(each.budget.limit_for(entry.variant) - each.spent - each.held for each in standings)
            if open.held < room < more and open.settled is None:
                await self._ask(open, budgets, room)
        elif standings is None:
            open.denied = account.when_down == "closed"
        if open.settled is not None:  # settled in the meantime: give back the extension
            self._release_later(open.id)

    def release(self, open: OpenCharge) -> None:
        if open.asked or open.stored:
            self._release_later(open.id)
        open.held = 0

    def settle(self, open: OpenCharge, micros: int) -> None:
        """The store gives back what was held when it writes the charge."""

    def written(self, open: OpenCharge, micros: int, *, counted: bool) -> None: ...

    def declared(self, tenant: str, running: Iterable[OpenCharge]) -> None: ...

    def forget(self, now: float) -> None: ...


def _known(sums: Iterable[_Sum]) -> bool:
    return all(sum.stored is not None for sum in sums)


def _scopes(open: OpenCharge, budgets: Iterable[BudgetConfig]) -> tuple[BudgetScope, ...]:
    entry, day = open.reserved.entry, open.reserved.day
    return tuple(BudgetScope(entry.tenant, budget.endpoint, budget.label(day)) for budget in budgets)


def _extended(open: OpenCharge, task: asyncio.Task[None]) -> None:
    open.extending = None
    if not task.cancelled() and task.exception() is not None:
        log.error("a budget hold could not be extended", exc_info=task.exception())
