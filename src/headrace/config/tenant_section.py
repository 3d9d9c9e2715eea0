"""What an operator declares of tenants, keys, the admin API and fast mode.

Owns these sections with their defaults. The same TenantConfig is what the admin API keeps of the tenants that are made
through it. What must hold between them is gateway.tenants.checks's.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.cache_section import CacheMode
from headrace.config.limit_section import LimitSet
from headrace.config.value_types import Count, Seconds, Secret, Section, Text, Weight

Period = Literal["day", "month"]
DEFAULT_ALERTS: Final = (50, 80, 100)  # percent of a budget
Micros = Annotated[int, Meta(ge=0, le=10**15)]  # 1e-6 of the currency
AlertPercent = Annotated[int, Meta(ge=1, le=1000)]
TokenLimit = Annotated[int, Meta(ge=1, le=2**53)]

Rights = Literal["read", "write"]
PROFILES: Final = ("standard", "fast", "golden")


class BudgetConfig(Section, frozen=True, omit_defaults=True):
    """What may be spent in a day or a month. A tenant has at most one for each endpoint and period."""

    limit_micros: Micros
    period: Period
    endpoint: str = ""  # a route's path; empty: all that the tenant spends
    then: str = ""  # the variant that answers at the end; empty: what goes beyond is refused
    allowance_micros: Micros = 0  # that this variant alone may spend beyond the limit
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
    """How far a tenant's requests may use the caches of answers; None is as the caches' own sections say."""

    exact: CacheMode | None = None
    semantic: CacheMode | None = None


class TenantConfig(Section, frozen=True, omit_defaults=True):
    """Who pays. None is every one that there is."""

    weight: Weight = 1.0  # of its fair share in the engine; a key's weight is a factor of it
    models: tuple[Text, ...] | None = None  # a model allows its variants, MODEL@VARIANT that one alone
    surfaces: tuple[Text, ...] | None = None
    profiles: tuple[Text, ...] | None = None
    limits: LimitSet = LimitSet()
    model_limits: dict[str, LimitSet] = msgspec.field(
        default_factory=dict[str, LimitSet]
    )  # of its requests to one model
    surface_limits: dict[str, LimitSet] = msgspec.field(default_factory=dict[str, LimitSet])
    budgets: tuple[BudgetConfig, ...] = ()
    fail: Literal["open", "closed"] = "open"  # where a shared dependency is gone: served without it, or refused
    caches: CachesConfig = CachesConfig()
    ladder: bool = True  # its answers may become less under pressure; false: they are refused instead
    suspended: bool = False  # every request is refused
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class KeyConfig(Section, frozen=True):
    """A secret that clients send as `Authorization: Bearer ...` or `x-api-key`; of the three, one is given. Of what it
    may do, None is everything that its tenant may."""

    name: Text
    key: Secret | None = None
    key_env: Text | None = None  # the environment variable that has it
    key_sha256: Secret | None = None  # in hexadecimal
    tenant: str = ""  # the key's name by default
    weight: Weight = 1.0  # a factor of the tenant's fair share
    surface: str | None = None  # of requests that name none
    models: tuple[Text, ...] | None = None  # a model allows its variants, MODEL@VARIANT that one alone
    surfaces: tuple[Text, ...] | None = None
    profiles: tuple[Text, ...] | None = None
    admin: Rights | None = None  # rights on the admin API
    limits: LimitSet = LimitSet()


class AdminConfig(Section, frozen=True):
    """The admin API. It is there for keys with admin rights, and behind `socket`."""

    store: Literal["sqlite", "postgres"] = "sqlite"  # of tenants and keys that are made; sqlite: in the storage folder
    dsn_env: Text = "HEADRACE_ADMIN_DSN"  # the environment variable that has Postgres's address
    schema: Text = "headrace"  # in Postgres
    socket: str = ""  # a Unix socket on which no key is needed: who may open the file is an administrator
    poll_s: Seconds = 1.0  # between two looks at what other gateways have changed
    answer_s: Seconds = 5.0  # that the storage has for an answer
    stale_s: Seconds = 300.0  # without a look, after which tenants with fail = "closed" are refused
    tenants: Count = 10_000  # made through the API, deleted ones too: no name is used twice
    keys: Count = 100_000  # made through the API
    audit_rows: Count = 100_000
    audit_days: Count = 400
    body_bytes: Count = 256 * 1024  # 256 KiB
    export_bytes: Count = 64 * 1024 * 1024  # 64 MiB of one export of usage
    tenant_labels: Count = 50  # tenants that metrics name; the others are "other"


class FastConfig(Section, frozen=True):
    """What fast mode makes of a request while it is on."""

    variant: str = ""  # answers in the place of every model that `variants` does not name; @NAME is the model's own
    variants: dict[str, Text] = msgspec.field(default_factory=dict[str, Text])  # by model
    prompt_tokens: TokenLimit | None = None  # that a prompt is trimmed to
    max_tokens: TokenLimit | None = None  # of an answer
    slow_tools: tuple[Text, ...] = ()  # tools that the model is not offered
    most_s: Seconds = 86_400.0  # that the mode can be asked for
