"""What an operator declares of tenants, keys, the admin API and fast mode: sections of the configuration.

Owns their shape, with every default, and what must hold between them. The same TenantConfig is what the admin API
keeps of the tenants that are made through it. Knows neither files nor requests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from millrace.config import Config, Count, KeyConfig, Seconds, Section, Text, Weight
from millrace.config_text import key_path, quoted
from millrace.engine.policy import SURFACES
from millrace.gateway.caches.modes import Mode
from millrace.gateway.ledger.budgets import ALERTS, Period
from millrace.gateway.limits.limit_set import LimitSet
from millrace.gateway.tenants.key_secrets import holds_secret

Micros = Annotated[int, Meta(ge=0, le=10**15)]  # 1e-6 of the currency
Percent = Annotated[int, Meta(ge=1, le=1000)]
Tokens = Annotated[int, Meta(ge=1, le=2**53)]

Rights = Literal["read", "write"]
PROFILES: Final = ("standard", "fast", "golden")
# What metrics say in place of a tenant: of a request without one, and of those that have no label of their own.
RESERVED: Final = ("-", "other")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY_ID: Final = re.compile(r"key_[0-9a-f]{16}")


class BudgetConfig(Section, frozen=True, omit_defaults=True):
    """What may be spent in a day or a month. A tenant has at most one for each endpoint and period."""

    limit_micros: Micros
    period: Period
    endpoint: str = ""  # a route's path; empty: all that the tenant spends
    then: str = ""  # the variant that answers at the end; empty: what goes beyond is refused
    allowance_micros: Micros = 0  # that this variant alone may spend beyond the limit
    alerts: tuple[Percent, ...] = ALERTS


class CachesConfig(Section, frozen=True, omit_defaults=True):
    """How far a tenant's requests may use the caches of answers; None is as the caches' own sections say."""

    exact: Mode | None = None
    semantic: Mode | None = None


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


class KeySettings(KeyConfig, frozen=True):
    """What a key may do beyond naming its tenant. None is everything that the tenant may."""

    models: tuple[Text, ...] | None = None
    surfaces: tuple[Text, ...] | None = None
    profiles: tuple[Text, ...] | None = None
    admin: Rights | None = None  # rights on the admin API
    limits: LimitSet = LimitSet()


class AdminConfig(Section, frozen=True):
    """The admin API. It is there for keys with admin rights, and behind `socket`."""

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
    prompt_tokens: Tokens | None = None  # that a prompt is trimmed to
    max_tokens: Tokens | None = None  # of an answer
    slow_tools: tuple[Text, ...] = ()  # tools that the model is not offered
    most_s: Seconds = 86_400.0  # that the mode can be asked for


def key_settings(config: KeyConfig) -> KeySettings:
    """A key with its scope, also where it was declared without any."""
    if isinstance(config, KeySettings):
        return config
    return KeySettings(**{name: getattr(config, name) for name in config.__struct_fields__})


Finding = tuple[str, str]  # a key by its path, and what is wrong with it


def findings(
    config: Config, tenants: Mapping[str, TenantConfig], keys: Sequence[KeyConfig], fast: FastConfig
) -> Iterator[Finding]:
    """What breaks the rules between tenants, keys, models and surfaces."""
    served = {name for name in config.models}
    served |= {f"{name}@{variant}" for name, model in config.models.items() for variant in model.variants}
    for name, tenant in tenants.items():
        where = key_path("tenants", name)
        if not NAME.fullmatch(name) or name in RESERVED:
            yield where, f"expected a name of letters, digits and . _ -, none of {', '.join(RESERVED)}"
        elif holds_secret(name):
            yield where, "this is a key's secret, and no name"
        yield from ((f"{where}.{path}", why) for path, why in tenant_findings(tenant, served))
    for place, key in enumerate(map(key_settings, keys)):
        where = f"keys[{place}]"
        if KEY_ID.fullmatch(key.name):
            yield f"{where}.name", f"{quoted(key.name)} has the form of the ids that the server gives"
        yield from ((f"{where}.{path}", why) for path, why in scope_findings(key, served))
        if key.surface is not None and key.surfaces is not None and key.surface not in key.surfaces:
            yield f"{where}.surface", f"{quoted(key.surface)} is none of the key's surfaces"
    for model, variant in fast.variants.items():
        yield from _known(key_path("fast", "variants", model), "model", (model,), config.models)
        yield from _known(key_path("fast", "variants", model), "variant", (variant,), served)
    if fast.variant.startswith("@"):
        own = {name[name.index("@") :] for name in served if "@" in name}
        yield from _known("fast.variant", "variant", (fast.variant,), own)
    elif fast.variant:
        yield from _known("fast.variant", "variant", (fast.variant,), served)


def tenant_findings(tenant: TenantConfig, served: Collection[str]) -> Iterator[Finding]:
    """`served`: models and variants."""
    yield from scope_findings(tenant, served)
    for model in tenant.model_limits:
        yield from _known(key_path("model_limits", model), "model", (model,), served)
    for surface in tenant.surface_limits:
        yield from _known(key_path("surface_limits", surface), "surface", (surface,), SURFACES)
    places: set[tuple[str, str]] = set()
    for place, budget in enumerate(tenant.budgets):
        where = f"budgets[{place}]"
        if (budget.endpoint, budget.period) in places:
            yield where, f"there is a budget of this endpoint and {budget.period} already"
        places.add((budget.endpoint, budget.period))
        if budget.then:
            yield from _known(f"{where}.then", "variant", (budget.then,), served)


class Scoped(Protocol):
    """What says what may be used."""

    @property
    def models(self) -> tuple[str, ...] | None: ...

    @property
    def surfaces(self) -> tuple[str, ...] | None: ...

    @property
    def profiles(self) -> tuple[str, ...] | None: ...


def scope_findings(section: Scoped, served: Collection[str]) -> Iterator[Finding]:
    yield from _known("models", "model", section.models or (), served)
    yield from _known("surfaces", "surface", section.surfaces or (), SURFACES)
    yield from _known("profiles", "profile", section.profiles or (), PROFILES)


def _known(where: str, what: str, names: Sequence[str], known: Collection[str]) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            there = ", ".join(map(quoted, sorted(known))) or "none"
            yield where, f"there is no {what} {quoted(name)}; there are {there}"


def shown(section: msgspec.Struct) -> dict[str, object]:
    """All of a section, defaults too, as JSON has it."""
    return {name: _plain(getattr(section, name)) for name in section.__struct_fields__}


def _plain(value: object) -> object:
    match value:
        case msgspec.Struct():
            return shown(value)
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case tuple() | list():
            return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value
