"""Budgets: what fits, what does not, and until when."""

from __future__ import annotations

import calendar
import time

import pytest

from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.ledger.budgets import (
    HELD,
    Admitted,
    BudgetBook,
    BudgetDecision,
    BudgetError,
    BudgetRefusal,
    BudgetStatus,
    FallbackVariant,
    TenantBudgets,
    decide,
)
from headrace.gateway.ledger.periods import Calendar
from tests.support.stores.ledgers import NOON

COSTS = {"mini": 100, "mini@int4": 10, "free": 0}
MIDNIGHT = NOON + 12 * 3600
DAY = BudgetConfig(limit_micros=1000, period="day")
MONTH = BudgetConfig(limit_micros=1000, period="month")


def decided(*standings: BudgetStatus, variant: str = "mini") -> BudgetDecision:
    return decide(standings, variant, COSTS.__getitem__, Calendar(), NOON)


def day(spent: int, held: int = 0, budget: BudgetConfig = DAY) -> BudgetStatus:
    return BudgetStatus(budget, "2025-11-22", spent, held)


def month(spent: int, held: int = 0, budget: BudgetConfig = MONTH) -> BudgetStatus:
    return BudgetStatus(budget, "2025-11", spent, held)


def test_the_last_micro_may_be_spent_and_no_further_one() -> None:
    assert decided(day(900)) == Admitted(100)
    assert decided(day(500, 400)) == Admitted(100)
    assert isinstance(decided(day(901)), BudgetRefusal)
    assert isinstance(decided(day(500, 401)), BudgetRefusal)
    assert decided() == Admitted(100)


def test_a_spent_budget_is_refused_until_its_period_is_over() -> None:
    refused = decided(day(901))
    assert isinstance(refused, BudgetRefusal)
    assert (refused.why, refused.retry_after) == ("budget", MIDNIGHT - NOON)
    error = refused.error()
    assert (error.status, error.retry_after) == (429, MIDNIGHT - NOON)
    assert error.openai()["error"] == {
        "message": "The daily budget has no room for this request: 0.000099 of 0.001000 left. "
        "It renews at 2025-11-23T00:00:00Z.",
        "type": "insufficient_quota",
        "param": None,
        "code": "insufficient_quota",
    }


def test_where_two_are_spent_the_one_that_is_over_last_counts() -> None:
    refused = decided(day(1000), month(1000))
    assert isinstance(refused, BudgetRefusal)
    assert refused.retry_after == calendar.timegm(time.strptime("2025-12-01", "%Y-%m-%d")) - NOON
    assert "2025-12-01" in refused.message


def test_what_running_requests_hold_comes_back_soon() -> None:
    assert decided(day(500, 450)) == HELD
    error = HELD.error()
    assert (error.status, error.code, error.retry_after) == (429, "budget_held", 1.0)


def test_at_its_end_a_budget_falls_to_its_variant_while_that_fits() -> None:
    falling = BudgetConfig(limit_micros=1000, period="day", then="mini@int4")
    assert decided(day(950, budget=falling)) == FallbackVariant("mini@int4")
    assert decided(day(950, budget=falling), variant="mini@int4") == Admitted(10)
    assert isinstance(decided(day(991, budget=falling)), BudgetRefusal)
    assert isinstance(decided(day(991, budget=falling), variant="mini@int4"), BudgetRefusal)
    to_free = BudgetConfig(limit_micros=1000, period="day", then="free")
    assert decided(day(1000, budget=to_free)) == FallbackVariant("free")


def test_the_variant_at_the_end_may_have_an_allowance_that_no_other_has() -> None:
    falling = BudgetConfig(limit_micros=1000, period="day", then="mini@int4", allowance_micros=50)
    assert decided(day(1040, budget=falling)) == FallbackVariant("mini@int4")
    assert decided(day(1040, budget=falling), variant="mini@int4") == Admitted(10)
    assert isinstance(decided(day(1041, budget=falling)), BudgetRefusal)


def test_a_budget_that_refuses_does_so_whatever_another_one_would_do() -> None:
    falling = BudgetConfig(limit_micros=1000, period="day", then="mini@int4")
    assert isinstance(decided(day(1000 - 50, budget=falling), month(950)), BudgetRefusal)
    assert decided(day(950, budget=falling), month(800)) == FallbackVariant("mini@int4")


def test_thresholds_that_are_reached() -> None:
    budget = BudgetConfig(limit_micros=1000, period="day", alerts=(80, 50, 100))
    assert [budget.alerts_reached(spent) for spent in (0, 499, 500, 999, 1000)] == [
        [],
        [],
        [50],
        [50, 80],
        [50, 80, 100],
    ]
    assert BudgetConfig(limit_micros=0, period="day").alerts_reached(0) == []


def test_accounts_by_tenant_endpoint_and_period() -> None:
    chat = BudgetConfig(limit_micros=1, period="day", endpoint="/v1/chat/completions")
    accounts = BudgetBook({"a": TenantBudgets((DAY, chat))}, default=TenantBudgets((MONTH,)))
    assert accounts.of("a").for_endpoint("/v1/chat/completions") == (DAY, chat)
    assert accounts.of("a").for_endpoint("/v1/embeddings") == (DAY,)
    assert accounts.budget("a", "/v1/chat/completions", "2025-11-22") == chat
    assert accounts.budget("a", "", "2025-11") is None
    assert accounts.budget("b", "", "2025-11") == MONTH
    accounts.declare("a", None)
    assert accounts.of("a").budgets == (MONTH,)
    with pytest.raises(BudgetError):
        TenantBudgets((DAY, BudgetConfig(limit_micros=2, period="day")))


def test_days_and_months_have_their_ends() -> None:
    utc, kathmandu = Calendar(), Calendar(offset_minutes=345)
    assert (utc.day(NOON), kathmandu.day(NOON)) == ("2025-11-22", "2025-11-22")
    assert (utc.day(MIDNIGHT - 1), kathmandu.day(MIDNIGHT - 1)) == ("2025-11-22", "2025-11-23")
    assert utc.end("2025-11-22") == MIDNIGHT
    assert kathmandu.end("2025-11-22") == MIDNIGHT - 345 * 60
    assert utc.end("2025-12") == utc.end("2025-12-31") == calendar.timegm((2026, 1, 1, 0, 0, 0))
    assert utc.end("2024-02") == utc.end("2024-02-29")
    assert [utc.day(each) for each in (-1e18, -1.0, 0.0, 1e18)] == ["1970-01-01"] * 3 + ["9999-12-31"]
    assert utc.end("9999-12-31") > NOON
