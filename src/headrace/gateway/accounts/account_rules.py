"""Checks tenants and keys against the models, variants and surfaces that are served.

The configuration and the admin API use the same rules. Each rule yields its findings, so that all mistakes are reported
at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from headrace.config import Config
from headrace.config.tenant_section import PROFILES, TenantConfig
from headrace.config.toml_text import key_path, quoted
from headrace.config.value_types import Finding
from headrace.gateway.accounts.key_secrets import holds_secret
from headrace.surfaces import SURFACES

# Metrics labels for requests without a tenant and for tenants without a label of their own.
RESERVED: Final = ("-", "other")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")  # a Postgres identifier that needs no quotes
KEY_ID: Final = re.compile(r"key_[0-9a-f]{16}")


def check_accounts(config: Config, served: Collection[str]) -> Iterator[Finding]:
    """Check the configuration. `served`: names of models and variants."""
    fast = config.fast
    for name, tenant in config.tenants.items():
        where = key_path("tenants", name)
        if not NAME.fullmatch(name) or name in RESERVED:
            yield (
                where,
                f"expected up to 64 letters, digits and . _ -, but not {' or '.join(map(quoted, RESERVED))}",
            )
        elif holds_secret(name):
            yield where, "expected a tenant name, found an API key"
        yield from ((f"{where}.{path}", why) for path, why in check_tenant(tenant, served))
    for place, key in enumerate(config.keys):
        where = f"keys[{place}]"
        if KEY_ID.fullmatch(key.name):
            yield f"{where}.name", f"{quoted(key.name)} looks like a generated key id; choose another name"
        yield from ((f"{where}.{path}", why) for path, why in check_scope(key, served))
        if key.surface is not None and key.surfaces is not None and key.surface not in key.surfaces:
            yield f"{where}.surface", f"expected one of the key's surfaces, found {quoted(key.surface)}"
    if not SCHEMA.fullmatch(config.admin.schema):
        yield (
            "admin.schema",
            f"expected lower-case letters, digits and underscores, found {quoted(config.admin.schema)}",
        )
    for model, variant in fast.variants.items():
        yield from _known(key_path("fast", "variants", model), "model", (model,), config.models)
        yield from _known(key_path("fast", "variants", model), "variant", (variant,), served)
    if fast.variant.startswith("@"):
        own = {name[name.index("@") :] for name in served if "@" in name}
        yield from _known("fast.variant", "variant", (fast.variant,), own)
    elif fast.variant:
        yield from _known("fast.variant", "variant", (fast.variant,), served)


def check_tenant(tenant: TenantConfig, served: Collection[str]) -> Iterator[Finding]:
    """Check a tenant's settings. `served`: names of models and variants."""
    yield from check_scope(tenant, served)
    for model in tenant.model_limits:
        yield from _known(key_path("model_limits", model), "model", (model,), served)
    for surface in tenant.surface_limits:
        yield from _known(key_path("surface_limits", surface), "surface", (surface,), SURFACES)
    places: set[tuple[str, str]] = set()
    for place, budget in enumerate(tenant.budgets):
        where = f"budgets[{place}]"
        if (budget.endpoint, budget.period) in places:
            yield where, f"duplicate budget: the endpoint already has one per {budget.period}"
        places.add((budget.endpoint, budget.period))
        if budget.then:
            yield from _known(f"{where}.then", "variant", (budget.then,), served)


class AccessScope(Protocol):
    """The models, surfaces and profiles that a tenant or key may use."""

    @property
    def models(self) -> tuple[str, ...] | None: ...

    @property
    def surfaces(self) -> tuple[str, ...] | None: ...

    @property
    def profiles(self) -> tuple[str, ...] | None: ...


def check_scope(section: AccessScope, served: Collection[str]) -> Iterator[Finding]:
    yield from _known("models", "model", section.models or (), served)
    yield from _known("surfaces", "surface", section.surfaces or (), SURFACES)
    yield from _known("profiles", "profile", section.profiles or (), PROFILES)


def _known(where: str, what: str, names: Sequence[str], known: Collection[str]) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            expected = ", ".join(map(quoted, sorted(known))) or "none"
            yield where, f"unknown {what} {quoted(name)}; known {what}s: {expected}"


def section_json(section: msgspec.Struct) -> dict[str, object]:
    """Return a section with its defaults as plain JSON values."""
    return {name: _plain(getattr(section, name)) for name in section.__struct_fields__}


def _plain(value: object) -> object:
    match value:
        case msgspec.Struct():
            return section_json(value)
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case tuple() | list():
            return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value
