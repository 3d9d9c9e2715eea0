"""What the ledger writes down: an exchange when it is admitted, what it took when it has ended, and sums of that.

Owns the shape of those records and how charges add up, for the journal and for every store alike. Knows no database.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

import msgspec

from headrace.gateway.ledger.periods import month_of
from headrace.gateway.ledger.prices import Price

CRASHED: Final = "crashed"  # how an exchange ended whose server died


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An exchange that wants to be served: whose it is, and of what."""

    id: str  # unique for as long as the ledger keeps charges
    tenant: str
    endpoint: str  # the route's path
    model: str  # as the client named it
    variant: str  # that is to answer
    key: str = ""  # its name
    surface: str = ""
    prompt_tokens: int = 0
    counted: bool = True  # False: a further part of a request that is counted already (a cascade's draft, a hedge)


class ReservedCharge(msgspec.Struct, frozen=True, array_like=True):
    """What is fixed when an exchange is admitted. Its charge belongs to this day, whenever it ends."""

    entry: LedgerEntry
    day: str
    at: int  # seconds since 1970
    price: Price


class Settlement(msgspec.Struct, frozen=True, array_like=True):
    """What an exchange took in the end."""

    variant: str
    ended: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    machine_us: int
    micros: int
    saved: dict[str, int]  # micros, by what saved them: a cache or a route
    final: bool = True  # False: what is known of a server that seems dead; its own word replaces it


class LedgerCharge(NamedTuple):
    """One exchange, ended."""

    reserved: ReservedCharge
    settled: Settlement

    @property
    def id(self) -> str:
        return self.reserved.entry.id


class BudgetScope(NamedTuple):
    """What one budget counts: a tenant's money, all of it or that of one endpoint, in one day or month."""

    tenant: str
    endpoint: str  # empty: all of them
    period: str


class DayKey(NamedTuple):
    """Of a daily sum."""

    day: str
    tenant: str
    key: str
    endpoint: str
    model: str
    variant: str
    surface: str
    source: str  # empty: what was charged; else what saved the money that is summed here


class DaySum(NamedTuple):
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    machine_us: int
    micros: int  # charged; where the key has a source, saved

    def plus(self, other: DaySum) -> DaySum:
        return DaySum(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def negated(self) -> DaySum:
        return DaySum(*(-each for each in self))


DaySums: TypeAlias = dict[DayKey, DaySum]
ScopeSums: TypeAlias = dict[BudgetScope, int]
ZERO_SUM: Final = DaySum(0, 0, 0, 0, 0, 0)


def scopes_of(tenant: str, endpoint: str, day: str) -> tuple[BudgetScope, BudgetScope, BudgetScope, BudgetScope]:
    """Where a charge counts; in the order of their texts, which is the order in which rows are locked."""
    month = month_of(day)
    return (
        BudgetScope(tenant, "", month),
        BudgetScope(tenant, "", day),
        BudgetScope(tenant, endpoint, month),
        BudgetScope(tenant, endpoint, day),
    )


def add_charge(charge: LedgerCharge, days: DaySums, scopes: ScopeSums, *, sign: int = 1) -> None:
    """`sign` -1 takes a charge back."""
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
