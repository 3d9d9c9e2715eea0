"""Usage and budgets in the admin API, read from the ledger.

headrace.gateway.ledger.usage_export groups the sums and formats them; budget_report computes what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, Literal, Protocol

import msgspec

from headrace.gateway.ledger.budget_report import BudgetLine, Budgets
from headrace.gateway.ledger.ledger_store import Dimension, LedgerStore, UsageQuery
from headrace.gateway.ledger.usage_export import usage_csv, usage_json

BY: Final[tuple[Dimension, ...]] = ("day", "tenant", "key", "endpoint", "model", "variant")


class UsageFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of the usage export, and the columns to group by."""

    tenant: str | None = None  # None: all tenants
    first_day: str = "0000-00-00"
    last_day: str = "9999-99-99"  # inclusive
    by: tuple[Dimension, ...] = BY
    format: Literal["csv", "json"] = "csv"


class UsageExport(Protocol):
    def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        """Yield the export in pieces: CSV with a heading, or one JSON object."""
        ...

    async def budgets(self, budgets: Budgets) -> dict[str, Any]:
        """Return what is spent, reserved and left of each, and the currency."""
        ...


class UsageLedger(Protocol):
    """The part of the ledger that an export needs."""

    store: LedgerStore

    async def flush(self) -> None: ...

    async def budget_lines(self, budgets: Budgets) -> list[BudgetLine]: ...


class LedgerUsage:
    def __init__(self, ledger: UsageLedger, *, currency: str = "", flush_s: float = 2.0) -> None:
        """`flush_s`: how long to wait for recent charges to be stored; after that the export omits them."""
        self._currency = currency
        self._ledger = ledger
        self._flush_s = flush_s

    async def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        await self._flush()
        query = UsageQuery(filters.by, filters.first_day, filters.last_day, filters.tenant)
        if filters.format == "csv":
            pieces = usage_csv(self._ledger.store, query)
        else:
            pieces = usage_json(self._ledger.store, query, currency=self._currency)
        async for piece in pieces:
            yield piece

    async def budgets(self, budgets: Budgets) -> dict[str, Any]:
        await self._flush()
        lines = await self._ledger.budget_lines(budgets)
        return {"currency": self._currency, "data": msgspec.to_builtins(lines)}

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._flush_s):
                await self._ledger.flush()
