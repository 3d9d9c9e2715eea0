"""What the ledger asks of a store, and the batches that it hands to one.

Owns the contracts Store and SharedStore. A store keeps charges, their sums by day and by budget, and alerts; it writes
a batch whole or not at all, and a charge that it has already it does not count again.
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
# tenant, endpoint, period → the budget that counts this, if there is one
FindBudget: TypeAlias = Callable[[str, str, str], BudgetConfig | None]


class StoreBusyError(TimeoutError):
    """The store is well, and has more to do than it can."""


class BudgetAlert(msgspec.Struct, frozen=True):
    """A budget has reached a threshold. There is at most one of a scope and a threshold, ever."""

    scope: BudgetScope
    percent: int  # 0: a request was refused, or fell to another variant, for want of money
    limit: int  # micros
    spent: int
    at: int  # seconds since 1970

    @property
    def id(self) -> str:
        """The same whoever sends it, however often."""
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
    """How far an exchange has come."""

    id: str
    output_tokens: int
    machine_us: int
    micros: int  # what it would be charged if it ended here


class LedgerBatch(msgspec.Struct):
    charges: list[LedgerCharge] = []
    alerts: list[BudgetAlert] = []
    # Of shared stores alone.
    opened: list[ReservedCharge] = []  # that run, and hold nothing of a budget
    moved: list[ChargeProgress] = []
    released: list[str] = []


class WriteResult(msgspec.Struct, frozen=True):
    known: frozenset[str]  # ids of charges that were there before and count no second time
    alerts: list[BudgetAlert]  # that nobody had recorded before


class UsageQuery(msgspec.Struct, frozen=True):
    """Which sums, and what they are told apart by."""

    by: tuple[Dimension, ...] = ("day", "tenant", "key", "endpoint", "model", "variant")
    first_day: str = "0000-00-00"
    last_day: str = "9999-99-99"
    tenant: str | None = None


SumRow: TypeAlias = tuple[DayKey, DaySum]


class LedgerStore(Protocol):
    async def open(self, run: str, previous: str) -> None:
        """`run`: this process, among all that ever were; `previous`: the one before it in the same place, or empty."""
        ...

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult: ...

    async def spent(self, scopes: Sequence[BudgetScope]) -> ScopeSums: ...

    async def prune(self, before: str) -> int:
        """Drops charges of days before this one, at most some; their sums stay. How many it were."""
        ...

    async def next_alert(self) -> BudgetAlert | None:
        """One that still has to be sent, for this process alone to send."""
        ...

    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None: ...

    def sums(self, query: UsageQuery) -> AsyncIterator[list[SumRow]]:
        """Daily sums, in the order of what they are told apart by, as of one moment, some at a time."""
        ...

    async def sources(self, query: UsageQuery) -> list[str]:
        """What has saved money there."""
        ...

    async def tend(self, running: Container[str]) -> list[LedgerCharge]:
        """Called every few seconds, with the exchanges that run here. Exchanges of servers that died, now ours to
        charge with what is known of them."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SharedLedgerStore(LedgerStore, Protocol):
    """Several gateways have it, and it keeps what they hold of budgets."""

    async def hold(
        self, reserved: ReservedCharge, micros: int, limits: Sequence[int | None]
    ) -> tuple[bool, list[tuple[int, int]]]:
        """Reserve all or nothing, in one statement, in place of what this exchange held before. `limits` are those of
        records.scopes_of, where None is no budget; returned is what is spent and held in each by others."""
        ...
