"""Holds budget for running requests out of what this process has leased.

Decides whether a request may be served, from what is stored, what waits to be written and what running requests hold.
Only what the lease does not cover waits for the store; budget_leases.py asks it.

If the store does not answer in time, the tenant's `budget_fail` decides: serve what is leased, serve by the last known
sum, or reject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budget_leases import BudgetLeases, ScopeSum
from headrace.gateway.ledger.budgets import (
    HELD,
    UNAVAILABLE,
    Admitted,
    BudgetBook,
    BudgetDecision,
    BudgetRefusal,
    BudgetStatus,
    decide,
)
from headrace.gateway.ledger.ledger_records import BudgetScope, ReservedCharge, Settlement
from headrace.gateway.ledger.ledger_store import BudgetReading, LedgerStore
from headrace.gateway.ledger.periods import Calendar, month_of


class OpenCharge(msgspec.Struct):
    """A request from its reservation until its charge is stored."""

    reserved: ReservedCharge
    most: int | None = None  # output tokens, at most
    slot: int | None = None  # of the journal
    held: int = 0  # micros
    scopes: tuple[BudgetScope, ...] = ()  # scopes with a budget that it counts in
    output_tokens: int = 0
    sent_tokens: int = 0  # of them, taken by the client's connection
    machine_us: int = 0
    settled: Settlement | None = None
    since: float = 0.0  # when it began to wait for the store
    stored: bool = False  # a shared store knows it
    reported_tokens: int = 0  # output tokens that a shared store knows of

    @property
    def id(self) -> str:
        return self.reserved.entry.id


Estimate: TypeAlias = Callable[[str], int]  # variant → micros
Ended: TypeAlias = Callable[[BudgetStatus, BudgetScope], None]


class BudgetHolds:
    def __init__(
        self,
        accounts: BudgetBook,
        calendar: Calendar,
        store: LedgerStore,
        *,
        wait_s: float,
        lease_s: float,
        monotonic: Callable[[], float],
        ended: Ended,
        went_down: Callable[[], None],
    ) -> None:
        self._accounts = accounts
        self._calendar = calendar
        self._ended = ended
        self._sums: dict[BudgetScope, ScopeSum] = {}
        self.leases = BudgetLeases(
            store, self._sums, wait_s=wait_s, lease_s=lease_s, monotonic=monotonic, went_down=went_down
        )

    async def hold(self, open: OpenCharge, estimate: Estimate, now: float, *, falls: bool) -> BudgetDecision:
        entry = open.reserved.entry
        micros = estimate(entry.variant)
        if not self._take(open, micros):
            wants = {scope: (limit, micros) for scope, limit in self._limits(open)}
            taken = await self.leases.ask(wants, lambda: self._take(open, micros))
            if not taken:
                return self._denied(open, estimate, now, falls=falls, answered=taken is not None)
        return Admitted(micros)

    def _denied(
        self, open: OpenCharge, estimate: Estimate, now: float, *, falls: bool, answered: bool
    ) -> BudgetDecision:
        """Decide on a request that the lease has no room for."""
        entry = open.reserved.entry
        account, micros = self._accounts.of(entry.tenant), estimate(entry.variant)
        is_alone = not answered and account.when_down == "open"
        if is_alone and self._take(open, micros, is_alone=True):
            return Admitted(micros, checked=False)
        statuses = [_status(*each, is_alone=is_alone) for each in self._budgets(open)]
        known = [each for each in statuses if each is not None]
        if len(known) < len(statuses) or (account.when_down == "closed" and not answered):
            return UNAVAILABLE
        for status in known:
            if status.is_spent(micros, entry.variant):
                self._ended(status, BudgetScope(entry.tenant, status.budget.endpoint, status.period))
        verdict = decide(known, entry.variant, estimate, self._calendar, now, falls=falls)
        if isinstance(verdict, Admitted):
            verdict = HELD  # others got it first
        is_spent = not isinstance(verdict, BudgetRefusal) or verdict.why == "budget"
        return verdict if answered or is_spent else UNAVAILABLE

    async def extend_later(self, open: OpenCharge, need: int, more: int) -> bool:
        """Lease what is missing, for a bounded time, and then `extend`."""
        wants = {scope: (limit, need - open.held) for scope, limit in self._limits(open)}
        taken = await self.leases.ask(wants, lambda: self.extend(open, need, more))
        if taken is None and self._accounts.of(open.reserved.entry.tenant).when_down == "open":
            return self.extend(open, need, more, is_alone=True)
        return bool(taken)

    def extend(self, open: OpenCharge, need: int, more: int, *, is_alone: bool = False) -> bool:
        """Hold at least `need` micros and up to `more`. Return whether the request may go on."""
        if open.settled is not None:
            return True
        target = more
        for scope, limit in self._limits(open):
            room = self._room(self._sum(scope), limit, is_alone=is_alone)
            target = target if room is None else min(target, room + open.held)
        if target < need:
            return False
        for scope in open.scopes:
            self._sum(scope).held += target - open.held
        open.held = target
        self._top_up(open)
        return True

    def release(self, open: OpenCharge) -> None:
        for scope in open.scopes:
            self._sum(scope).held -= open.held
        open.held = 0

    def settle(self, open: OpenCharge, micros: int) -> None:
        self.release(open)
        open.scopes = self._scopes(open)
        for scope in open.scopes:
            self._sum(scope).waiting += micros

    def written(self, open: OpenCharge, micros: int) -> None:
        """Stop counting a charge that the store has. Apply the store's answer in the same turn of the loop."""
        for scope in open.scopes:
            self._sum(scope).waiting -= micros

    def apply(self, readings: Mapping[BudgetScope, BudgetReading]) -> None:
        self.leases.apply(readings)

    async def renew(self) -> None:
        """Keep the leases, and give back what other gateways want."""
        await self.leases.renew()

    def declared(self, tenant: str, running: Iterable[OpenCharge]) -> None:
        """Apply changed budgets: running requests count in the new ones from now on."""
        for scope in [scope for scope in self._sums if scope.tenant == tenant]:
            self._sums[scope].held = self._sums[scope].waiting = 0
        for open in running:
            if open.reserved.entry.tenant == tenant:
                open.scopes = self._scopes(open)
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
        found = (
            _status(budget, scope, self._sums[scope])
            for budget in self._accounts.of(tenant).budgets
            if (scope := BudgetScope(tenant, budget.endpoint, budget.label(day))) in self._sums
        )
        return [each for each in found if each is not None]

    def _take(self, open: OpenCharge, micros: int, *, is_alone: bool = False) -> bool:
        """Hold this much, if every budget has room for it."""
        variant, account = open.reserved.entry.variant, self._accounts.of(open.reserved.entry.tenant)
        if account.when_down == "closed" and self.leases.health.is_down:
            return False
        scopes: list[BudgetScope] = []
        for budget, scope, sum in self._budgets(open):
            room = self._room(sum, budget.limit_for(variant), is_alone=is_alone)
            if room is not None and room < micros:
                return False
            scopes.append(scope)
        open.scopes, open.held = tuple(scopes), micros if scopes else 0
        for scope in scopes:
            self._sums[scope].held += micros
        self._top_up(open)
        return True

    def _room(self, sum: ScopeSum, limit: int, *, is_alone: bool) -> int | None:
        """Return how much more may be held. None: the sums are unknown, and the tenant is served anyway."""
        if is_alone:
            return sum.room_alone(limit)
        return sum.room(limit) if self.leases.are_valid else -1

    def _top_up(self, open: OpenCharge) -> None:
        for scope, limit in self._limits(open):
            self.leases.top_up(scope, limit)

    def _budgets(self, open: OpenCharge) -> Iterable[tuple[BudgetConfig, BudgetScope, ScopeSum]]:
        """Return the budgets that a request counts in today. They may change while it runs."""
        entry, day = open.reserved.entry, open.reserved.day
        for budget in self._accounts.of(entry.tenant).for_endpoint(entry.endpoint):
            scope = BudgetScope(entry.tenant, budget.endpoint, budget.label(day))
            yield budget, scope, self._sum(scope)

    def _scopes(self, open: OpenCharge) -> tuple[BudgetScope, ...]:
        return tuple(scope for _, scope, _ in self._budgets(open))

    def _limits(self, open: OpenCharge) -> list[tuple[BudgetScope, int]]:
        variant = open.reserved.entry.variant
        return [(scope, budget.limit_for(variant)) for budget, scope, _ in self._budgets(open)]

    def _sum(self, scope: BudgetScope) -> ScopeSum:
        found = self._sums.get(scope)
        if found is None:
            found = self._sums[scope] = ScopeSum()
        return found


def _status(budget: BudgetConfig, scope: BudgetScope, sum: ScopeSum, *, is_alone: bool = False) -> BudgetStatus | None:
    """Return what is spent and held; None if the store was never read."""
    if sum.reading is None:
        return None
    return BudgetStatus(budget, scope.period, sum.spent, sum.held + (0 if is_alone else sum.reading.others))
