"""Decides whether a tenant's budgets have room for a request.

A pure decision from what is spent and what is held for running requests; holds.py keeps those sums.

Reservations never exceed a budget: a request is admitted when spent + held + its estimate are within the limit, and a
running request holds more only where there is room. What a request takes beyond its hold, because the engine made more
tokens before it stopped, is charged all the same: see docs/explanation/ledger.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.config.tenant_section import BudgetConfig, BudgetFailMode
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import NO_RETRY_HEADERS, ApiError
from headrace.gateway.ledger.periods import Calendar, is_month
from headrace.gateway.ledger.prices import format_micros

RefusalReason = Literal["budget", "held", "store", "full"]
_RETRY_S: Final = 1.0  # seconds until a retry may succeed when the budget itself is not spent


class BudgetError(HeadraceError):
    """Contradicting budgets of a tenant."""


class TenantBudgets(msgspec.Struct, frozen=True):
    """A tenant's budgets, and how it is served while the ledger's store does not answer."""

    budgets: tuple[BudgetConfig, ...] = ()
    # lease: serve what this process has leased; open: serve by the last known sum; closed: reject
    when_down: BudgetFailMode = "lease"

    def __post_init__(self) -> None:
        places = [(budget.endpoint, budget.period) for budget in self.budgets]
        if len(set(places)) != len(places):
            raise BudgetError("A tenant can have only one budget per endpoint and period.")

    def for_endpoint(self, endpoint: str) -> tuple[BudgetConfig, ...]:
        return tuple(budget for budget in self.budgets if budget.endpoint in ("", endpoint))


class BudgetBook:
    """Budgets by tenant. Tenants without an entry have the default."""

    def __init__(
        self, accounts: Mapping[str, TenantBudgets] | None = None, *, default: TenantBudgets | None = None
    ) -> None:
        self._accounts = dict(accounts or {})
        self._default = TenantBudgets() if default is None else default

    def of(self, tenant: str) -> TenantBudgets:
        return self._accounts.get(tenant, self._default)

    def declare(self, tenant: str, account: TenantBudgets | None) -> bool:
        """Set a tenant's budgets; None resets them to the default. Return whether anything changed."""
        before = self.of(tenant)
        if account is None:
            self._accounts.pop(tenant, None)
        else:
            self._accounts[tenant] = account
        return self.of(tenant) != before

    def budget(self, tenant: str, endpoint: str, period: str) -> BudgetConfig | None:
        """Find the budget of exactly this endpoint and period. Thread-safe: stores call it from their threads."""
        kind = "month" if is_month(period) else "day"
        for budget in self.of(tenant).budgets:
            if budget.endpoint == endpoint and budget.period == kind:
                return budget
        return None


class Admitted(msgspec.Struct, frozen=True):
    micros: int  # reserved
    checked: bool = True  # False: served without a check, because the ledger is down


class FallbackVariant(msgspec.Struct, frozen=True):
    """The budget has room only for this fallback variant. Nothing is reserved yet."""

    variant: str


class BudgetRefusal(msgspec.Struct, frozen=True):
    why: RefusalReason
    retry_after: float  # seconds
    message: str

    def error(self) -> ApiError:
        """Build the API error. OpenAI clients know a spent budget as 429 with insufficient_quota."""
        headers = NO_RETRY_HEADERS if self.why == "budget" else None  # clients should not retry before the period ends
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
    """The spent and held parts of a budget, without the request being decided."""

    budget: BudgetConfig
    period: str
    spent: int
    held: int

    def has_room(self, micros: int, variant: str) -> bool:
        return self.spent + self.held + micros <= self.budget.limit_for(variant)

    def is_spent(self, micros: int, variant: str) -> bool:
        """Return whether there would be no room even if everything held were given back."""
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
    """Decide on a request. Every budget must have room for it.

    `estimate`: its cost in micros with a variant. `falls`: a fallback variant may answer.
    """
    micros = estimate(variant)
    blocking = [each for each in standings if not each.has_room(micros, variant)]
    if not blocking:
        return Admitted(micros)
    fallbacks = dict.fromkeys(each.budget.then for each in blocking)
    if falls and all(fallbacks):  # a budget without a fallback rejects, whatever the others allow
        for then in fallbacks:
            if then != variant and all(each.has_room(estimate(then), then) for each in standings):
                return FallbackVariant(then)
    spent = [each for each in blocking if each.is_spent(micros, variant)]
    if not spent:
        return HELD
    # Name the budget that renews last: a retry before that would only be rejected again.
    last = max(spent, key=lambda each: (calendar.end(each.period), each.period))
    end, limit = calendar.end(last.period), last.budget.limit_for(variant)
    left = max(0, limit - last.spent - last.held)
    return BudgetRefusal(
        "budget",
        max(_RETRY_S, end - now),
        f"The {'monthly' if is_month(last.period) else 'daily'} budget has no room for this request: "
        f"{format_micros(left)} of {format_micros(limit)} left. It renews at {calendar.format_time(end)}.",
    )


HELD: Final = BudgetRefusal(
    "held", _RETRY_S, "Running requests and other gateways hold the rest of the budget. Try again in a moment."
)
UNAVAILABLE: Final = BudgetRefusal(
    "store", _RETRY_S, "The usage ledger cannot be written right now. Try again in a moment."
)
FULL: Final = BudgetRefusal(
    "full", _RETRY_S, "The usage ledger has no room for more open requests. Try again in a moment."
)
