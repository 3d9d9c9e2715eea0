"""The interface LedgerStore, the batches written to it and the leases taken from it.

A store keeps charges, their sums by day and by budget, leases of budgets, and alerts. It writes a batch completely or
not at all and does not count a charge twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Container, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.ledger_records import BudgetScope, DayKey, DaySum, LedgerCharge, ReservedCharge

EVERYTHING: Final = 2**62  # micros, the lease of a store's only process
LAPSE: Final = 2**20  # more than answers can be under way
Dimension = Literal["day", "tenant", "key", "endpoint", "model", "variant", "surface"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("day", "tenant", "key", "endpoint", "model", "variant", "surface")
# (tenant, endpoint, period) → the budget that counts it, or None
FindBudget: TypeAlias = Callable[[str, str, str], BudgetConfig | None]


class BudgetAlert(msgspec.Struct, frozen=True):
    """A budget reached a threshold. There is at most one alert per scope and threshold."""

    scope: BudgetScope
    percent: int  # 0: a request was rejected or moved to the fallback variant
    limit: int  # micros
    spent: int
    at: int  # seconds since 1970

    @property
    def id(self) -> str:
        """An id that is the same on every send."""
        return hashlib.sha256("\0".join((*self.scope, str(self.percent))).encode()).hexdigest()[:32]

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "event": "budget.threshold" if self.percent else "budget.refused",
            "tenant": self.scope.tenant,
            "endpoint": self.scope.endpoint or None,
            "period": self.scope.period,
            "percent": self.percent or None,
            "limit_micros": self.limit,
            "spent_micros": self.spent,
            "at": self.at,
        }

    def log_fields(self) -> dict[str, Any]:
        """Return what a log line says, without what has no value. The log has its own `event`, so ours is `alert`."""
        fields = self.as_json()
        return {"alert": fields.pop("event")} | {name: value for name, value in fields.items() if value is not None}


def alerts_due(scope: BudgetScope, budget: BudgetConfig | None, spent: int, now: int) -> list[BudgetAlert]:
    """Return an alert for every threshold that the spending has reached."""
    if budget is None:
        return []
    return [BudgetAlert(scope, each, budget.limit_micros, spent, now) for each in budget.alerts_reached(spent)]


class ChargeProgress(msgspec.Struct, frozen=True):
    """Progress of a running request."""

    id: str
    output_tokens: int
    machine_us: int
    micros: int  # charge if it ended now


class LedgerBatch(msgspec.Struct):
    charges: list[LedgerCharge] = []
    alerts: list[BudgetAlert] = []
    # Shared stores only.
    opened: list[ReservedCharge] = []  # running
    moved: list[ChargeProgress] = []
    released: list[str] = []


class BudgetReading(msgspec.Struct, frozen=True):
    """A budget as the store has it. Of two readings, the one with the higher version is newer."""

    spent: int  # micros, by all gateways
    version: int
    others: int = 0  # leased to other gateways
    leased: int = EVERYTHING  # to this process


class LeaseRequest(msgspec.Struct, frozen=True):
    scope: BudgetScope
    limit: int  # micros
    micros: int  # needed beyond what is leased; negative: given back
    least: int = 0  # of these, the smallest part that is of use
    version: int = 0  # something is given back only while the lease has this version


class LeaseRenewal(msgspec.Struct, frozen=True):
    lapsed: bool = False  # all leases have ended, and have versions that are LAPSE higher
    wanted: tuple[BudgetScope, ...] = ()  # other gateways need more of these


class WriteResult(msgspec.Struct, frozen=True):
    known: frozenset[str]  # ids of charges that the store already had
    alerts: list[BudgetAlert]  # recorded for the first time
    readings: dict[BudgetScope, BudgetReading]  # of everything that the charges count in


class UsageQuery(msgspec.Struct, frozen=True):
    """A query of daily sums: filters, and the columns to group by."""

    by: tuple[Dimension, ...] = ("day", "tenant", "key", "endpoint", "model", "variant")
    first_day: str = "0000-00-00"
    last_day: str = "9999-99-99"
    tenant: str | None = None


SumRow: TypeAlias = tuple[DayKey, DaySum]


class LedgerStore(Protocol):
    shared: bool  # with other gateways

    async def open(self, run: str, previous: str) -> None:
        """Start. `run`: unique name of this process; `previous`: name of the run before it, or empty."""
        ...

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult: ...

    async def lease(self, requests: Sequence[LeaseRequest]) -> dict[BudgetScope, BudgetReading]:
        """Lease what is left of budgets, in sorted order: what is needed or, if it is more, a share."""
        ...

    async def renew(self) -> LeaseRenewal:
        """Report that this process is alive, and renew its leases."""
        ...

    async def end_leases(self, run: str) -> None:
        """Give back all leases of a process that has ended, or ends now."""
        ...

    async def prune(self, before: str) -> int:
        """Delete a bounded number of charges before this day and return how many. Sums stay."""
        ...

    async def next_alert(self) -> BudgetAlert | None:
        """Claim an alert that still has to be sent."""
        ...

    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None: ...

    def sums(self, query: UsageQuery) -> AsyncIterator[list[SumRow]]:
        """Yield chunks of daily sums in group order, as of one moment."""
        ...

    async def sources(self, query: UsageQuery) -> list[str]:
        """Return the sources of savings."""
        ...

    async def tend(self, running: Container[str], day: str) -> list[LedgerCharge]:
        """Maintain the store every few seconds. `running`: ids of requests that run here. `day`: today.

        Return provisional charges of servers that died, which this process takes over.
        """
        ...

    async def close(self) -> None: ...
