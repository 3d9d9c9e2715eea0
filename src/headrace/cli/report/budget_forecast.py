"""When a budget runs out, if it is spent as fast as in its period so far."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_LEAST_S: Final = 3600.0  # of a period, before its pace says anything


class BudgetForecast(msgspec.Struct):
    tenant: str
    endpoint: str
    period: str  # 2026-01-31 or 2026-01
    limit_micros: int
    spent_micros: int
    renews_at: int
    runs_out_at: float | None  # in seconds since 1970; None: not in this period


def forecast(budget: dict[str, Any], now: float) -> BudgetForecast:
    """Read one line of the admin API's list of budgets."""
    limit, spent, renews_at = budget["limit_micros"], budget["spent_micros"], budget["renews_at"]
    elapsed = now - _began(budget["period"], renews_at)
    runs_out: float | None = None
    if spent >= limit:
        runs_out = now
    elif spent and elapsed >= _LEAST_S:
        at = now + (limit - spent) * elapsed / spent
        runs_out = at if at < renews_at else None
    return BudgetForecast(budget["tenant"], budget["endpoint"], budget["period"], limit, spent, renews_at, runs_out)


def _began(period: str, renews_at: int) -> float:
    """Return when a period began. Periods may be of another time zone, which its end tells."""
    if len(period) == len("2026-01-31"):
        return renews_at - 86_400.0
    year, month = (int(part) for part in period.split("-"))
    first = datetime(year, month, 1, tzinfo=UTC)
    following = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return renews_at - (following - first).total_seconds()
