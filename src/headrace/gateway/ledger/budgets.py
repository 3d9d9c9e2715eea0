"""Budgets: how much a tenant may spend in a day or a month, and what happens at the end of it.

Owns the declaration (Budget, Account), and the one decision: given what is spent and what is held for exchanges that
run, may a further one be served? Pure: who keeps the sums, in this process or in a shared database, is holds.py's.

A budget is never passed by what is reserved: an exchange is admitted when spent + held + its estimate are within the
limit, and while it runs it holds more only where there is room. What an exchange takes beyond all it holds, because an
engine made more tokens than it was asked for before it stopped, is still charged: see docs/explanation/ledger.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.config.tenant_section import ALERTS, Period
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import NO_RETRY, ApiError
from headrace.gateway.ledger.periods import Calendar, is_month, month_of

Why = Literal["budget", "held", "store", "full"]
_SOON: Final = 1.0  # seconds; until a refusal that is no budget's end may be tried again


class BudgetError(HeadraceError):
    """Budgets that contradict each other."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    limit: int  # micros
    period: Period
    endpoint: str = ""  # a route's path; empty: all that the tenant spends
    then: str = ""  # the variant to fall to at the end; empty: refuse
    allowance: int = 0  # micros that this variant alone may spend beyond the limit
    alerts: tuple[int, ...] = ALERTS

    def limit_for(self, variant: str) -> int:
        return self.limit + (self.allowance if self.then and variant == self.then else 0)

    def label(self, day: str) -> str:
        return day if self.period == "day" else month_of(day)

    def passed(self, spent: int) -> list[int]:
        """The thresholds that are reached, from the lowest on."""
        if spent <= 0:
            return []
        return [percent for percent in sorted(self.alerts) if spent * 100 >= self.limit * percent]


class Account(msgspec.Struct, frozen=True):
    """A tenant's budgets, and what it gets when the ledger cannot be written."""

    budgets: tuple[Budget, ...] = ()
    when_down: Literal["open", "closed"] = "open"  # served, and charged later; or refused

    def __post_init__(self) -> None:
        places = [(budget.endpoint, budget.period) for budget in self.budgets]
        if len(set(places)) != len(places):
            raise BudgetError("a tenant has at most one budget for each endpoint and period")

    def applying(self, endpoint: str) -> tuple[Budget, ...]:
        return tuple(budget for budget in self.budgets if budget.endpoint in ("", endpoint))


class Accounts:
    """By tenant; the others have the default."""

    def __init__(self, accounts: Mapping[str, Account] | None = None, *, default: Account | None = None) -> None:
        self._accounts = dict(accounts or {})
        self._default = Account() if default is None else default

    def of(self, tenant: str) -> Account:
        return self._accounts.get(tenant, self._default)

    def declare(self, tenant: str, account: Account | None) -> bool:
        """None: the default again. False where nothing changes."""
        before = self.of(tenant)
        if account is None:
            self._accounts.pop(tenant, None)
        else:
            self._accounts[tenant] = account
        return self.of(tenant) != before

    def budget(self, tenant: str, endpoint: str, period: str) -> Budget | None:
        """The one that counts exactly this. Called from the threads of stores, too."""
        kind = "month" if is_month(period) else "day"
        for budget in self.of(tenant).budgets:
            if budget.endpoint == endpoint and budget.period == kind:
                return budget
        return None


class Admit(msgspec.Struct, frozen=True):
    micros: int  # reserved
    checked: bool = True  # False: the ledger is down, and this tenant is served all the same


class Fallback(msgspec.Struct, frozen=True):
    """The budget has no room for this variant; it has for this one. Nothing is reserved yet."""

    variant: str


class Refuse(msgspec.Struct, frozen=True):
    why: Why
    retry_after: float  # seconds
    message: str

    def error(self) -> ApiError:
        """As OpenAI says it: 429 with insufficient_quota, which its clients and frameworks know by that name."""
        headers = NO_RETRY if self.why == "budget" else None  # until the end of a day nobody should ask again
        match self.why:
            case "budget":
                kind, code = "insufficient_quota", "insufficient_quota"
            case "held":
                kind, code = "rate_limit_error", "budget_held"
            case "store" | "full":
                kind, code = "overloaded_error", "ledger_unavailable"
        return ApiError(self.message, kind=kind, code=code, retry_after=self.retry_after, headers=headers)


Verdict: TypeAlias = Admit | Fallback | Refuse


class Standing(msgspec.Struct, frozen=True):
    """A budget and where it stands, without the exchange that asks."""

    budget: Budget
    period: str
    spent: int
    held: int

    def fits(self, micros: int, variant: str) -> bool:
        return self.spent + self.held + micros <= self.budget.limit_for(variant)

    def over(self, micros: int, variant: str) -> bool:
        """Also where everything that is held came back."""
        return self.spent + micros > self.budget.limit_for(variant)


def decide(
    standings: Sequence[Standing],
    variant: str,
    estimate: Callable[[str], int],
    calendar: Calendar,
    now: float,
    *,
    falls: bool = True,
) -> Verdict:
    """`estimate`: what the exchange would cost with a variant. Every budget must have room for it.

    `falls`: another variant may answer in its place.
    """
    micros = estimate(variant)
    blocking = [each for each in standings if not each.fits(micros, variant)]
    if not blocking:
        return Admit(micros)
    thens = dict.fromkeys(each.budget.then for each in blocking)
    if falls and all(thens):  # a budget that refuses at its end does so whatever another one would do
        for then in thens:
            if then != variant and all(each.fits(estimate(then), then) for each in standings):
                return Fallback(then)
    spent = [each for each in blocking if each.over(micros, variant)]
    if not spent:
        return HELD
    # The one that is over last; a refusal that could be tried again before that would only be refused again.
    end, period = max((calendar.end(each.period), each.period) for each in spent)
    what = "month" if is_month(period) else "day"
    return Refuse(
        "budget",
        max(_SOON, end - now),
        f"the budget of this {what} has no room for this request; the next one begins at {calendar.shown(end)}",
    )


HELD: Final = Refuse("held", _SOON, "what is left of the budget is held by requests that are running; try again")
UNAVAILABLE: Final = Refuse("store", _SOON, "the ledger cannot be written at the moment; try again")
FULL: Final = Refuse("full", _SOON, "the ledger has as many open requests as it can keep; try again")
