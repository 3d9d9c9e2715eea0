"""Usage exports of the admin API: their filters, and the export from the ledger.

headrace.gateway.ledger.usage_export groups the sums and formats them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, Literal, Protocol

import msgspec

from headrace.gateway.ledger.ledger_store import Dimension, LedgerStore, UsageQuery
from headrace.gateway.ledger.usage_export import usage_csv, usage_json

BY: Final[tuple[Dimension, ...]] = ("day", "tenant", "key", "endpoint", "model", "variant")


class UsageFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage to export, and the columns to group by."""

    tenant: str | None = None  # None: all tenants
    first_day: str = "0000-00-00"
    last_day: str = "9999-99-99"  # inclusive
    by: tuple[Dimension, ...] = BY
    format: Literal["csv", "json"] = "csv"


class UsageExport(Protocol):
    def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        """Yield the export in pieces: CSV with a heading, or one JSON object."""
        ...


class UsageLedger(Protocol):
    """The part of the ledger that an export needs."""

    store: LedgerStore

    async def flush(self) -> None: ...


class LedgerUsage:
    def __init__(self, ledger: UsageLedger, *, flush_s: float = 2.0) -> None:
        """`flush_s`: how long to wait for recent charges to be stored; after that the export omits them."""
        self._ledger = ledger
        self._flush_s = flush_s

    async def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._flush_s):
                await self._ledger.flush()
        query = UsageQuery(filters.by, filters.first_day, filters.last_day, filters.tenant)
        pieces = (usage_csv if filters.format == "csv" else usage_json)(self._ledger.store, query)
        async for piece in pieces:
            yield piece
