"""The ledger's records: reservations, settlements, charges and their sums. Shared by the journal and all stores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

import msgspec

from headrace.gateway.ledger.periods import month_of
from headrace.gateway.ledger.prices import Price

CRASHED: Final = "crashed"  # `ended` of a request whose server died


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request to be charged: who pays, and for what."""

    id: str  # unique for as long as the ledger keeps charges
    tenant: str
    endpoint: str  # the route's path
    model: str  # as the client named it
    variant: str  # that should answer
    key: str = ""  # the key's name
    surface: str = ""
    prompt_tokens: int = 0
    counted: bool = True  # False: an extra part of a request that is already counted (a cascade's draft, a hedge)


class ReservedCharge(msgspec.Struct, frozen=True, array_like=True):
    """The part of a charge that is fixed when a request is admitted. The charge belongs to this day."""

    entry: LedgerEntry
    day: str
    at: int  # seconds since 1970
    price: Price


class Settlement(msgspec.Struct, frozen=True, array_like=True):
    """The usage and cost of a request."""

    variant: str
    ended: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    machine_us: int
    micros: int
    saved: dict[str, int]  # micros, by what saved them: a cache or a route
    final: bool = True  # False: provisional, of a server that seems dead; its own settlement replaces it


class LedgerCharge(NamedTuple):
    """A finished request."""

    reserved: ReservedCharge
    settled: Settlement

    @property
    def id(self) -> str:
        return self.reserved.entry.id


class BudgetScope(NamedTuple):
    """The spending that one budget counts: a tenant's spending in a day or month, in total or on one endpoint."""

    tenant: str
    endpoint: str  # empty: all of them
    period: str


class DayKey(NamedTuple):
    """The key of a daily sum."""

    day: str
    tenant: str
    key: str
    endpoint: str
    model: str
    variant: str
    surface: str
    source: str  # empty: charges; else the cache or route whose savings are summed


class DaySum(NamedTuple):
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    machine_us: int
    micros: int  # charged; with a source in the key: saved

    def plus(self, other: DaySum) -> DaySum:
        return DaySum(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def negated(self) -> DaySum:
        return DaySum(*(-each for each in self))


DaySums: TypeAlias = dict[DayKey, DaySum]
ScopeSums: TypeAlias = dict[BudgetScope, int]
ZERO_SUM: Final = DaySum(0, 0, 0, 0, 0, 0)


def scopes_of(tenant: str, endpoint: str, day: str) -> tuple[BudgetScope, BudgetScope, BudgetScope, BudgetScope]:
    """Return the scopes that a charge counts in, sorted, which is the order in which rows are locked."""
    month = month_of(day)
    return (
        BudgetScope(tenant, "", month),
        BudgetScope(tenant, "", day),
        BudgetScope(tenant, endpoint, month),
        BudgetScope(tenant, endpoint, day),
    )


def add_charge(charge: LedgerCharge, days: DaySums, scopes: ScopeSums, *, sign: int = 1) -> None:
    """Add a charge to the sums; `sign` -1 takes it back."""
    entry, day, settled = charge.reserved.entry, charge.reserved.day, charge.settled
    took = DaySum(
        int(entry.counted),
        settled.prompt_tokens,
        settled.cached_tokens,
        settled.output_tokens,
        settled.machine_us,
        settled.micros,
    )
    _add(days, _day_key(entry, day, settled.variant, ""), took, sign)
    for source, micros in settled.saved.items():
        _add(days, _day_key(entry, day, settled.variant, source), ZERO_SUM._replace(requests=1, micros=micros), sign)
    for scope in scopes_of(entry.tenant, entry.endpoint, day):
        scopes[scope] = scopes.get(scope, 0) + sign * settled.micros


def scopes_in(charges: Iterable[LedgerCharge]) -> set[BudgetScope]:
    """Return every scope that the charges count in."""
    entries = {(each.reserved.entry.tenant, each.reserved.entry.endpoint, each.reserved.day) for each in charges}
    return {scope for entry in entries for scope in scopes_of(*entry)}


def sums_of(charges: Iterable[LedgerCharge]) -> tuple[DaySums, ScopeSums]:
    days: DaySums = {}
    scopes: ScopeSums = {}
    for charge in charges:
        add_charge(charge, days, scopes)
    return days, scopes


def _day_key(entry: LedgerEntry, day: str, variant: str, source: str) -> DayKey:
    return DayKey(day, entry.tenant, entry.key, entry.endpoint, entry.model, variant, entry.surface, source)


def _add(days: DaySums, key: DayKey, sum: DaySum, sign: int) -> None:
    days[key] = days.get(key, ZERO_SUM).plus(sum if sign > 0 else sum.negated())
