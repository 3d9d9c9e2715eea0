"""Budgets: what fits, what does not, and until when."""

from __future__ import annotations

import calendar
import time

import pytest

from headrace.gateway.ledger.budgets import (
    HELD,
    Account,
    Accounts,
    Admit,
    Budget,
    BudgetError,
    Fallback,
    Refuse,
    Standing,
    Verdict,
    decide,
)
from headrace.gateway.ledger.periods import Calendar
from tests.support.ledgers import NOON

COSTS = {"mini": 100, "mini@int4": 10, "free": 0}
MIDNIGHT = NOON + 12 * 3600
DAY = Budget(limit=1000, period="day")
MONTH = Budget(limit=1000, period="month")


def decided(*standings: Standing, variant: str = "mini") -> Verdict:
    return decide(standings, variant, COSTS.__getitem__, Calendar(), NOON)


def day(spent: int, held: int = 0, budget: Budget = DAY) -> Standing:
    return Standing(budget, "2025-11-22", spent, held)


def month(spent: int, held: int = 0, budget: Budget = MONTH) -> Standing:
    return Standing(budget, "2025-11", spent, held)


def test_the_last_micro_may_be_spent_and_no_further_one() -> None:
    assert decided(day(900)) == Admit(100)
    assert decided(day(500, 400)) == Admit(100)
    assert isinstance(decided(day(901)), Refuse)
    assert isinstance(decided(day(500, 401)), Refuse)
    assert decided() == Admit(100)


def test_a_spent_budget_is_refused_until_its_period_is_over() -> None:
    refused = decided(day(901))
    assert isinstance(refused, Refuse)
    assert (refused.why, refused.retry_after) == ("budget", MIDNIGHT - NOON)
    error = refused.error()
    assert (error.status, error.retry_after) == (429, MIDNIGHT - NOON)
    assert error.openai()["error"] == {
        "message": "the budget of this day has no room for this request; the next one begins at 2025-11-23T00:00:00Z",
        "type": "insufficient_quota",
        "param": None,
        "code": "insufficient_quota",
    }


def test_where_two_are_spent_the_one_that_is_over_last_counts() -> None:
    refused = decided(day(1000), month(1000))
    assert isinstance(refused, Refuse)
    assert refused.retry_after == calendar.timegm(time.strptime("2025-12-01", "%Y-%m-%d")) - NOON
    assert "2025-12-01" in refused.message


def test_what_running_requests_hold_comes_back_soon() -> None:
    assert decided(day(500, 450)) == HELD
    error = HELD.error()
    assert (error.status, error.code, error.retry_after) == (429, "budget_held", 1.0)


def test_at_its_end_a_budget_falls_to_its_variant_while_that_fits() -> None:
    falling = Budget(limit=1000, period="day", then="mini@int4")
    assert decided(day(950, budget=falling)) == Fallback("mini@int4")
    assert decided(day(950, budget=falling), variant="mini@int4") == Admit(10)
    assert isinstance(decided(day(991, budget=falling)), Refuse)
    assert isinstance(decided(day(991, budget=falling), variant="mini@int4"), Refuse)
    to_free = Budget(limit=1000, period="day", then="free")
    assert decided(day(1000, budget=to_free)) == Fallback("free")


def test_the_variant_at_the_end_may_have_an_allowance_that_no_other_has() -> None:
    falling = Budget(limit=1000, period="day", then="mini@int4", allowance=50)
    assert decided(day(1040, budget=falling)) == Fallback("mini@int4")
    assert decided(day(1040, budget=falling), variant="mini@int4") == Admit(10)
    assert isinstance(decided(day(1041, budget=falling)), Refuse)


def test_a_budget_that_refuses_does_so_whatever_another_one_would_do() -> None:
    falling = Budget(limit=1000, period="day", then="mini@int4")
    assert isinstance(decided(day(1000 - 50, budget=falling), month(950)), Refuse)
    assert decided(day(950, budget=falling), month(800)) == Fallback("mini@int4")


def test_thresholds_that_are_reached() -> None:
    budget = Budget(limit=1000, period="day", alerts=(80, 50, 100))
    assert [budget.passed(spent) for spent in (0, 499, 500, 999, 1000)] == [[], [], [50], [50, 80], [50, 80, 100]]
    assert Budget(limit=0, period="day").passed(0) == []


def test_accounts_by_tenant_endpoint_and_period() -> None:
    chat = Budget(limit=1, period="day", endpoint="/v1/chat/completions")
    accounts = Accounts({"a": Account((DAY, chat))}, default=Account((MONTH,)))
    assert accounts.of("a").applying("/v1/chat/completions") == (DAY, chat)
    assert accounts.of("a").applying("/v1/embeddings") == (DAY,)
    assert accounts.budget("a", "/v1/chat/completions", "2025-11-22") == chat
    assert accounts.budget("a", "", "2025-11") is None
    assert accounts.budget("b", "", "2025-11") == MONTH
    accounts.declare("a", None)
    assert accounts.of("a").budgets == (MONTH,)
    with pytest.raises(BudgetError):
        Account((DAY, Budget(limit=2, period="day")))


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
