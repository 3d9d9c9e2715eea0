"""RequestLedger: what the flow of a request needs of the ledger. Another process may keep the ledger itself."""

from __future__ import annotations

from typing import Protocol

from headrace.gateway.ledger.budgets import BudgetDecision
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.requests.text_request import TokenUsage


class RequestLedger(Protocol):
    """See Ledger for what each does."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def reserve(
        self, entry: LedgerEntry, *, output_tokens: int, most_tokens: int | None = None, falls: bool = True
    ) -> BudgetDecision: ...

    def progress(self, id: str, output_tokens: int) -> bool: ...

    def sent(self, id: str, output_tokens: int) -> None: ...

    async def extend(self, id: str, output_tokens: int) -> bool: ...

    def charge(
        self,
        id: str,
        usage: TokenUsage,
        *,
        ended: str,
        variant: str = "",
        hit: str = "",
        instead_of: str = "",
        entry: LedgerEntry | None = None,
    ) -> None: ...

    def release(self, id: str) -> None: ...

    def budget_left(self, tenant: str, endpoint: str) -> float | None: ...
