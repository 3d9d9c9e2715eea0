"""The ledger's usage, as the admin API exports it.

Owns the way from the export's filters to the ledger's query. How sums are joined and written is ledger.export's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from headrace.gateway.ledger.ledger_store import LedgerStore, UsageQuery
from headrace.gateway.ledger.usage_export import usage_csv, usage_json
from headrace.server.admin.admin_protocols import UsageFilters


class UsageLedger(Protocol):
    """Of the ledger, what an export needs."""

    store: LedgerStore

    async def flush(self) -> None: ...


class LedgerUsage:
    def __init__(self, ledger: UsageLedger, *, flush_s: float = 2.0) -> None:
        """`flush_s`: that what has just ended may take to get into the store; then the export is without it."""
        self._ledger = ledger
        self._flush_s = flush_s

    async def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._flush_s):
                await self._ledger.flush()
        query = UsageQuery(filters.by, filters.first_day, filters.last_day, filters.tenant)
        written = (usage_csv if filters.format == "csv" else usage_json)(self._ledger.store, query)
        async for piece in written:
            yield piece
