"""Decides whether a tenant's budgets have room for a request.

A pure decision from what is spent and what is held for running requests; holds.py keeps those sums, in this process or
in a shared database.

Reservations never exceed a budget: a request is admitted when spent + held + its estimate are within the limit, and a
running request holds more only where there is room. What a request takes beyond its hold, because the engine made more
tokens before it stopped, is charged all the same: see docs/explanation/ledger.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.config.tenant_section import BudgetConfig
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import NO_RETRY_HEADERS, ApiError
from headrace.gateway.ledger.periods import Calendar, is_month

RefusalReason = Literal["budget", "held", "store", "full"]
_SOON: Final = 1.0  # seconds; until a refusal that is no budget's end may be tried again


class BudgetError(HeadraceError):
    """Budgets that contradict each other."""


class TenantBudgets(msgspec.Struct, frozen=True):
    """A tenant's budgets, and what it gets when the ledger cannot be written."""

    budgets: tuple[BudgetConfig, ...] = ()
    when_down: Literal["open", "closed"] = "open"  # served, and charged later; or refused

    def __post_init__(self) -> None:
        places = [(budget.endpoint, budget.period) for budget in self.budgets]
        if len(set(places)) != len(places):
            raise BudgetError("a tenant has at most one budget for each endpoint and period")

    def applying(self, endpoint: str) -> tuple[BudgetConfig, ...]:
        return tuple(budget for budget in self.budgets if budget.endpoint in ("", endpoint))


class BudgetBook:
    """By tenant; the others have the default."""

    def __init__(
        self, accounts: Mapping[str, TenantBudgets] | None = None, *, default: TenantBudgets | None = None
    ) -> None:
        self._accounts = dict(accounts or {})
        self._default = TenantBudgets() if default is None else default

    def of(self, tenant: str) -> TenantBudgets:
        return self._accounts.get(tenant, self._default)

    def declare(self, tenant: str, account: TenantBudgets | None) -> bool:
        """None: the default again. False where nothing changes."""
        before = self.of(tenant)
        if account is None:
            self._accounts.pop(tenant, None)
        else:
            self._accounts[tenant] = account
        return self.of(tenant) != before

    def budget(self, tenant: str, endpoint: str, period: str) -> BudgetConfig | None:
        """The one that counts exactly this. Called from the threads of stores, too."""
        kind = "month" if is_month(period) else "day"
        for budget in self.of(tenant).budgets:
            if budget.endpoint == endpoint and budget.period == kind:
                return budget
        return None


class Admitted(msgspec.Struct, frozen=True):
    micros: int  # reserved
    checked: bool = True  # False: the ledger is down, and this tenant is served all the same


class FallbackVariant(msgspec.Struct, frozen=True):
    """The budget has no room for this variant; it has for this one. Nothing is reserved yet."""

    variant: str


class BudgetRefusal(msgspec.Struct, frozen=True):
    why: RefusalReason
    retry_after: float  # seconds
    message: str

    def error(self) -> ApiError:
        """As OpenAI says it: 429 with insufficient_quota, which its clients and frameworks know by that name."""
        headers = NO_RETRY_HEADERS if self.why == "budget" else None  # until the end of a day nobody should ask again
        match self.why:
            case "budget":
                kind, code = "insufficient_quota", "insufficient_quota"
            case "held":
                kind, code = "rate_limit_error", "budget_held"
            case "store" | "full":
                kind, code = "overloaded_error", "ledger_unavailable"
        return ApiError(self.message, kind=kind, code=code, retry_after=self.retry_after, headers=headers)


BudgetDecision: TypeAlias = Admitted | FallbackVariant | BudgetRefusal


class BudgetStatus(msgspec.Struct, frozen=True):
    """A budget and where it stands, without the exchange that asks."""

    budget: BudgetConfig
    period: str
    spent: int
    held: int

    def fits(self, micros: int, variant: str) -> bool:
        return self.spent + self.held + micros <= self.budget.limit_for(variant)

    def over(self, micros: int, variant: str) -> bool:
        """Also where everything that is held came back."""
        return self.spent + micros > self.budget.limit_for(variant)


def decide(
    standings: Sequence[BudgetStatus],
    variant: str,
    estimate: Callable[[str], int],
    calendar: Calendar,
    now: float,
    *,
    falls: bool = True,
) -> BudgetDecision:
    """`estimate`: what the exchange would cost with a variant. Every budget must have room for it.

    `falls`: another variant may answer in its place.
    """
    micros = estimate(variant)
    blocking = [each for each in standings if not each.fits(micros, variant)]
    if not blocking:
        return Admitted(micros)
    thens = dict.fromkeys(each.budget.then for each in blocking)
    if falls and all(thens):  # a budget that refuses at its end does so whatever another one would do
        for then in thens:
            if then != variant and all(each.fits(estimate(then), then) for each in standings):
                return FallbackVariant(then)
    spent = [each for each in blocking if each.over(micros, variant)]
    if not spent:
        return HELD
    # The one that is over last; a refusal that could be tried again before that would only be refused again.
    end, period = max((calendar.end(each.period), each.period) for each in spent)
    what = "month" if is_month(period) else "day"
    return BudgetRefusal(
        "budget",
        max(_SOON, end - now),
        f"the budget of this {what} has no room for this request; the next one begins at {calendar.shown(end)}",
    )


HELD: Final = BudgetRefusal("held", _SOON, "what is left of the budget is held by requests that are running; try again")
UNAVAILABLE: Final = BudgetRefusal("store", _SOON, "the ledger cannot be written at the moment; try again")
FULL: Final = BudgetRefusal("full", _SOON, "the ledger has as many open requests as it can keep; try again")
