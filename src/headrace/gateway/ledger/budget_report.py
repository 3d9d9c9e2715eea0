"""Reports what is spent, reserved and left of tenants' budgets in their current day and month.

`spent` is what the store has, of all gateways; `reserved` is what running requests and other gateways hold, as this
process last heard of it. Reads only: budgets.py decides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import BudgetStatus
from headrace.gateway.ledger.ledger_store import LedgerStore, UsageQuery
from headrace.gateway.ledger.periods import Calendar

Budgets = Mapping[str, Sequence[BudgetConfig]]  # by tenant


class BudgetLine(msgspec.Struct, frozen=True):
    tenant: str
    period: str  # 2026-01-31 or 2026-01
    endpoint: str  # empty: all
    limit_micros: int
    spent_micros: int
    reserved_micros: int
    left_micros: int
    renews_at: int  # seconds since 1970


async def budget_lines(
    store: LedgerStore, budgets: Budgets, held: Mapping[str, Sequence[BudgetStatus]], calendar: Calendar, day: str
) -> list[BudgetLine]:
    """`held`: what this process knows of the budgets, by tenant."""
    spent: dict[tuple[str, str, str], int] = {}
    for period in {budget.label(day) for each in budgets.values() for budget in each}:
        async for tenant, endpoint, micros in _charged(store, period, day, tuple(budgets)):
            for name in ("", endpoint):
                spent[tenant, period, name] = spent.get((tenant, period, name), 0) + micros
    lines: list[BudgetLine] = []
    for tenant, declared in budgets.items():
        known = {(each.budget.endpoint, each.period): each for each in held.get(tenant, ())}
        for budget in declared:
            period = budget.label(day)
            status = known.get((budget.endpoint, period))
            paid, reserved = spent.get((tenant, period, budget.endpoint), 0), 0
            if status is not None:  # may know charges that are not in the store yet
                paid, reserved = max(paid, status.spent), status.held
            left = max(0, budget.limit_micros - paid - reserved)
            line = BudgetLine(tenant, period, budget.endpoint, budget.limit_micros, paid, reserved, left, 0)
            lines.append(msgspec.structs.replace(line, renews_at=int(calendar.end(period))))
    return lines


async def _charged(
    store: LedgerStore, period: str, day: str, tenants: Sequence[str]
) -> AsyncIterator[tuple[str, str, int]]:
    """Yield tenant, endpoint and micros of the period, up to the day."""
    only = tenants[0] if len(tenants) == 1 else None
    query = UsageQuery(("tenant", "endpoint"), period if period == day else f"{period}-01", day, only)
    async for rows in store.sums(query):
        for key, sum in rows:
            if not key.source:  # rows with a source say what was saved
                yield key.tenant, key.endpoint, sum.micros
