"""Configuration of tenants, keys, budgets, the admin API and fast mode.

The admin API stores tenants as the same TenantConfig. gateway.accounts.account_rules checks these sections.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.cache_section import CacheMode
from headrace.config.limit_section import LimitSet
from headrace.config.value_types import Count, Seconds, Secret, Section, Text, Weight

Period = Literal["day", "month"]
BudgetFailMode = Literal["lease", "open", "closed"]
DEFAULT_ALERTS: Final = (50, 80, 100)  # percent of a budget
Micros = Annotated[int, Meta(ge=0, le=10**15)]  # millionths of the currency
AlertPercent = Annotated[int, Meta(ge=1, le=1000)]
TokenLimit = Annotated[int, Meta(ge=1, le=2**53)]

Rights = Literal["read", "write"]
PROFILES: Final = ("standard", "fast", "golden")


class BudgetConfig(Section, frozen=True, omit_defaults=True):
    """What a tenant may spend per day or month. A tenant has at most one budget per endpoint and period."""

    limit_micros: Micros
    period: Period
    endpoint: str = ""  # path the budget covers, such as /v1/embeddings; empty: all
    then: str = ""  # variant to fall back to when the budget is spent; empty: reject
    allowance_micros: Micros = 0  # what the fallback variant may spend beyond the budget
    alerts: tuple[AlertPercent, ...] = DEFAULT_ALERTS

    def limit_for(self, variant: str) -> int:
        """The limit that holds for a variant, in micros: the fallback variant may also spend the allowance."""
        return self.limit_micros + (self.allowance_micros if self.then and variant == self.then else 0)

    def label(self, day: str) -> str:
        """The day (2026-01-31) or the month (2026-01) that a day's charges count in."""
        return day if self.period == "day" else day[:7]

    def alerts_reached(self, spent_micros: int) -> list[int]:
        """The alert thresholds that the spending has reached, in percent, lowest first."""
        if spent_micros <= 0:
            return []
        return [percent for percent in sorted(self.alerts) if spent_micros * 100 >= self.limit_micros * percent]


class CachesConfig(Section, frozen=True, omit_defaults=True):
    """Response cache modes of a tenant. None: as in the caches' own sections."""

    exact: CacheMode | None = None
    semantic: CacheMode | None = None
    results: CacheMode | None = None


class TenantConfig(Section, frozen=True, omit_defaults=True):
    """Settings of a tenant. None allows all."""

    weight: Weight = 1.0  # fair share of the engine relative to other tenants, 0.001 to 1000
    models: tuple[Text, ...] | None = None  # models the tenant may use, with their variants; default: all
    surfaces: tuple[Text, ...] | None = None
    profiles: tuple[Text, ...] | None = None
    limits: LimitSet = LimitSet()
    model_limits: dict[str, LimitSet] = msgspec.field(
        default_factory=dict[str, LimitSet]
    )  # on its requests to one model
    surface_limits: dict[str, LimitSet] = msgspec.field(default_factory=dict[str, LimitSet])
    budgets: tuple[BudgetConfig, ...] = ()
    fail: Literal["open", "closed"] = "open"  # when the store of rate limits is down: serve without it, or reject
    # When the ledger's store is down: serve what is leased of the budgets; serve by the last known sums, which gateways
    # can overspend together; or reject.
    budget_fail: BudgetFailMode = "lease"
    caches: CachesConfig = CachesConfig()
    ladder: bool = True  # allow degraded responses under pressure; false: reject instead
    record: bool = False  # record its requests and answers as [recording] says; false: never
    tools: tuple[Text, ...] = ()  # tools that pipelines may call for the tenant; "*": all; default: none
    suspended: bool = False  # reject every request of this tenant
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class KeyConfig(Section, frozen=True):
    """An API key, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. None allows what the tenant allows.

    Exactly one of key, key_env and key_sha256 is set.
    """

    name: Text
    key: Secret | None = None
    key_env: Text | None = None  # environment variable with the key
    key_sha256: Secret | None = None  # SHA-256 of the key in hexadecimal: printf %s "$SECRET" | sha256sum
    tenant: str = ""  # tenant that pays; empty: the key's name
    weight: Weight = 1.0  # factor on the tenant's weight, 0.001 to 1000
    surface: str | None = None  # surface of requests that name none; default: the model's
    models: tuple[Text, ...] | None = None  # models the key may use, within its tenant's; default: all
    surfaces: tuple[Text, ...] | None = None
    profiles: tuple[Text, ...] | None = None
    admin: Rights | None = None  # access to the admin API: read or write; default: none
    limits: LimitSet = LimitSet()


class AdminConfig(Section, frozen=True):
    """The admin API, for keys with admin access and on `socket`."""

    store: Literal["sqlite", "postgres"] = "sqlite"  # sqlite (in storage.folder) or postgres (shared by gateways)
    dsn_env: Text = "HEADRACE_ADMIN_DSN"  # environment variable with the Postgres URL
    schema: Text = "headrace"  # Postgres schema
    socket: str = ""  # Unix socket that needs no key; whoever may open the file is an administrator; empty: none
    poll_s: Seconds = 1.0  # seconds between two checks for changes by other gateways
    answer_s: Seconds = 5.0  # seconds, store timeout
    stale_s: Seconds = 300.0  # without contact to the store, after which tenants with fail = "closed" are rejected
    tenants: Count = 10_000  # tenants made through the API, deleted ones included
    keys: Count = 100_000  # keys made through the API
    audit_rows: Count = 100_000
    audit_days: Count = 400
    body_bytes: Count = 256 * 1024  # 256 KiB, longest request body
    export_bytes: Count = 64 * 1024 * 1024  # 64 MiB, longest usage export
    tenant_labels: Count = 50  # tenants with their own metrics label; the rest are "other"


class FastConfig(Section, frozen=True):
    """What fast mode changes in a request while it is on."""

    variant: str = ""  # answers for all models not in `variants`; "@NAME" means the model's own
    variants: dict[str, Text] = msgspec.field(default_factory=dict[str, Text])  # variant by model; default: none
    prompt_tokens: TokenLimit | None = None  # tokens that prompts are trimmed to; default: unchanged
    max_tokens: TokenLimit | None = None  # output tokens, at most; default: unchanged
    slow_tools: tuple[Text, ...] = ()  # tools that are hidden from the model
    most_s: Seconds = 86_400.0  # seconds fast mode can be switched on for, at most
