"""The interfaces LedgerStore and SharedLedgerStore, and the batches written to them.

A store keeps charges, their sums by day and by budget, and alerts. It writes a batch completely or not at all and does
not count a charge twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Container, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.ledger_records import BudgetScope, DayKey, DaySum, LedgerCharge, ReservedCharge, ScopeSums

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
    opened: list[ReservedCharge] = []  # running, without a budget hold
    moved: list[ChargeProgress] = []
    released: list[str] = []


class WriteResult(msgspec.Struct, frozen=True):
    known: frozenset[str]  # ids of charges that the store already had
    alerts: list[BudgetAlert]  # recorded for the first time


class UsageQuery(msgspec.Struct, frozen=True):
    """Which daily sums to read, and the columns to group by."""

    by: tuple[Dimension, ...] = ("day", "tenant", "key", "endpoint", "model", "variant")
    first_day: str = "0000-00-00"
    last_day: str = "9999-99-99"
    tenant: str | None = None


SumRow: TypeAlias = tuple[DayKey, DaySum]


class LedgerStore(Protocol):
    async def open(self, run: str, previous: str) -> None:
        """Start. `run`: unique name of this process; `previous`: name of the run before it, or empty."""
        ...

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult: ...

    async def spent(self, scopes: Sequence[BudgetScope]) -> ScopeSums: ...

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

    async def tend(self, running: Container[str]) -> list[LedgerCharge]:
        """Maintain the store every few seconds. `running`: ids of requests that run here.

        Return provisional charges of servers that died, which this process takes over.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SharedLedgerStore(LedgerStore, Protocol):
    """A store shared by gateways, which also keeps their budget holds."""

    async def hold(
        self, reserved: ReservedCharge, micros: int, limits: Sequence[int | None]
    ) -> tuple[bool, list[tuple[int, int]]]:
        """Replace what this request holds, all scopes or none, in one statement.

        `limits` belong to ledger_records.scopes_of; None: no budget. Return whether it is held, and per scope what is
        spent and what others hold.
        """
        ...
