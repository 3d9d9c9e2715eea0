"""Identifies callers: from the API key in a request's headers to the tenant and what the key may use.

Holds the tenants and keys of the configuration, which do not change, and those of the admin API, which follow the
account records. Everything is computed when a key or tenant changes, so a request costs one SHA-256 and one dict
lookup. Secrets are neither stored nor included in errors.

A dict lookup instead of constant-time comparisons is safe: the lookup uses the SHA-256 of what the client sent. Timing
reveals at best how that digest relates to stored ones, a client cannot choose a secret's digest, and Python's hash of
bytes is keyed. The digest found is then compared in constant time.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.config import ConfigError, digest_of
from headrace.config.tenant_section import KeyConfig, TenantConfig
from headrace.gateway.accounts.account_records import (
    KEYS_MARK,
    KeyRecord,
    KeyScope,
    SecretRecord,
    TenantRecord,
    earliest_expiry,
    key_json,
    status_of,
)
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.key_secrets import HIDDEN, digest_of_secret, hidden, holds_secret
from headrace.gateway.api_errors import ApiError
from headrace.gateway.limits.limit_scopes import LimitSet
from headrace.gateway.serving.exchange import Caller

STANDARD: Final = TenantConfig()
UNLIMITED: Final = LimitSet()
_PARTS: Final = 64  # parts of a path that are checked for secrets


class IdentifiedCaller(Caller, frozen=True):
    """A caller and what it may use. On a server without keys: everyone, with full access except to the admin API."""

    models: tuple[frozenset[str], ...] = ()  # a model must be in every set
    surfaces: tuple[str, ...] | None = None  # None: all
    profiles: frozenset[str] | None = None
    admin: str | None = None  # "read" or "write"
    settings: TenantConfig = STANDARD  # the tenant's settings
    limits: LimitSet = UNLIMITED  # of the key


ANONYMOUS: Final = IdentifiedCaller()


class _Known(msgspec.Struct, frozen=True):
    digest: bytes
    caller: IdentifiedCaller
    expires: float = math.inf
    from_api: bool = False  # made through the admin API


class AccountDirectory:
    """The tenants and keys in force. Without any key, everyone may call."""

    def __init__(
        self,
        keys: Sequence[KeyConfig],
        tenants: Mapping[str, TenantConfig],
        environ: Mapping[str, str],
        *,
        shared: AccountSync | None = None,
        guarded: bool = False,  # reject calls without a key until the account records were read
        stale_s: float = 300.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.declared_tenants = dict(tenants)
        self.declared_keys = {key.name: key for key in keys}
        self._shared = shared
        self._guarded = guarded
        self._stale_s = stale_s
        self._clock = clock
        self._closed = bool(keys)  # a key exists or has existed
        self._made: dict[bytes, _Known] = {}
        self._digests: dict[str, tuple[bytes, ...]] = {}  # digests by key id
        self._keys_of: dict[str, set[str]] = {}  # key ids by tenant
        self._tenant_of: dict[str, str] = {}  # tenant by key id
        self._administrators: set[str] = set()
        self._uses: dict[str, int] = {}
        self._declared = {known.digest: known for known in self._known_of_config(environ)}
        if shared is not None:
            shared.listen(self._take)

    # Requests

    @property
    def needed(self) -> bool:
        """True if calls need a key. Stays true after the last key is revoked."""
        return self._closed

    @property
    def administered(self) -> bool:
        """True if any key has access to the admin API."""
        return bool(self._administrators) or any(key.admin for key in self.declared_keys.values())

    def identify(self, headers: Mapping[str, str]) -> IdentifiedCaller:
        """Identify a caller by `Authorization: Bearer` or x-api-key. Raise ApiError for an unknown key."""
        if not self._closed:
            if self._guarded and not self._loaded():
                raise _keys_unread()
            return ANONYMOUS
        secret = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            secret = token.strip()
        if not secret:
            raise _unauthenticated("Missing API key. Send the header 'Authorization: Bearer KEY'.", "missing_api_key")
        digest = digest_of_secret(secret)
        known = self._declared.get(digest) or self._made.get(digest)
        if known is None or not hmac.compare_digest(known.digest, digest):
            if self._shared is not None and not self._loaded():
                raise _keys_unread()  # the key may be one this gateway has not read yet
            raise _unauthenticated("Unknown API key.", "invalid_api_key")
        if known.from_api:
            self._check_made(known)
        if known.caller.settings.suspended:
            raise _suspended(known.caller.tenant)
        return known.caller

    def _check_made(self, known: _Known) -> None:
        now = self._clock()
        if now >= known.expires:
            raise _unauthenticated("This API key has expired.", "expired_api_key")
        if known.caller.settings.fail == "closed" and self._shared is not None and self._shared.age > self._stale_s:
            raise ApiError(
                "The server cannot verify this API key right now. Try again later.",
                kind="overloaded_error",
                code="keys_stale",
                retry_after=5.0,
            )
        self._uses[known.caller.key] = int(now)

    def _loaded(self) -> bool:
        return self._shared is None or self._shared.loaded

    def on_behalf(self, tenant: str, *, key: str | None = None, surface: str | None = None) -> IdentifiedCaller:
        """Return the caller of background work such as a batch. Raise ApiError if its key or tenant is gone.

        `key`: name or id of the key that requested it; None: act for the tenant.
        """
        if key:
            config, record = self.declared_keys.get(key), self._key(key)
            if config is not None:
                caller = self._caller(key, config.tenant or key, _scope_of(config), config.surface, config.weight)
            elif record is not None and status_of(record, self._clock()) == "live":
                caller = self._caller_of(key, record)
            else:
                caller = None
        else:
            caller = (
                self._caller("", tenant, KeyScope(), None, self._weight_of(tenant)) if self.exists(tenant) else None
            )
        if caller is None or caller.tenant != tenant:
            raise ApiError(
                "The API key that requested this is no longer valid."
                if key
                else f"The tenant '{tenant}' no longer exists.",
                kind="permission_error",
                code="key_ended" if key else "tenant_ended",
            )
        if caller.settings.suspended:
            raise _suspended(tenant)
        return caller if surface is None else replace(caller, surface=surface)

    def is_secret(self, text: str) -> bool:
        """Return whether a text is a key or contains a generated one, and so must not be logged."""
        return holds_secret(text) or self._is_known(text)

    def _is_known(self, text: str) -> bool:
        digest = digest_of_secret(text)
        return digest in self._declared or digest in self._made

    def hidden(self, text: str) -> str:
        """Hide keys in a text: generated ones anywhere, others only as the whole text or between slashes."""
        parts = text.split("/", _PARTS)
        return hidden("/".join(HIDDEN if part and self._is_known(part) else part for part in parts))

    def taken_uses(self) -> Mapping[str, int]:
        """Return and clear when keys of the admin API were last used."""
        uses, self._uses = self._uses, {}
        return uses

    # Tenants

    def settings_of(self, tenant: str) -> TenantConfig:
        """Return a tenant's settings; the defaults for one that only a key names."""
        declared = self.declared_tenants.get(tenant)
        if declared is not None:
            return declared
        record = self.made_tenant(tenant)
        return STANDARD if record is None else record.settings

    def exists(self, tenant: str) -> bool:
        return tenant in self.declared_names() or self.made_tenant(tenant) is not None or not self._closed

    def declared_names(self) -> set[str]:
        """Return the tenants that the configuration declares or names in a key."""
        return {*self.declared_tenants, *(key.tenant or name for name, key in self.declared_keys.items())}

    def tenants(self) -> set[str]:
        """Return the names of all tenants."""
        held = () if self._shared is None else self._shared.held("tenant")
        return self.declared_names() | {name for name in held if self.made_tenant(name) is not None}

    def made_tenant(self, name: str) -> TenantRecord | None:
        value = None if self._shared is None else self._shared.get("tenant", name).value
        return value if isinstance(value, TenantRecord) and value.deleted is None else None

    def _key(self, id: str) -> KeyRecord | None:
        value = None if self._shared is None else self._shared.get("key", id).value
        return value if isinstance(value, KeyRecord) else None

    def _weight_of(self, tenant: str) -> float:
        """Return the weight factor for work without a key: that of the tenant's first configured key."""
        return next((k.weight for name, k in self.declared_keys.items() if (k.tenant or name) == tenant), 1.0)

    # From keys to callers

    def _caller(self, key: str, tenant: str, scope: KeyScope, surface: str | None, weight: float) -> IdentifiedCaller:
        settings = self.settings_of(tenant)
        config = self.declared_keys.get(key)
        record = None if config is not None else self._key(key)
        limits = config.limits if config is not None else UNLIMITED if record is None else record.limits
        surfaces = _intersect(scope.surfaces, settings.surfaces)
        profiles = _intersect(scope.profiles, settings.profiles)
        return IdentifiedCaller(
            key=key,
            tenant=tenant,
            weight=min(max(settings.weight * weight, 0.001), 1000.0),
            surface=surface if surfaces is None or surface in surfaces else None,
            models=tuple(frozenset(names) for names in (settings.models, scope.models) if names is not None),
            surfaces=surfaces,
            profiles=None if profiles is None else frozenset(profiles),
            admin=scope.admin,
            settings=settings,
            limits=limits,
        )

    def _caller_of(self, id: str, record: KeyRecord) -> IdentifiedCaller | None:
        if self.made_tenant(record.tenant) is None and record.tenant not in self.declared_names():
            return None
        return self._caller(id, record.tenant, record.scope, record.surface, record.weight)

    def _known_of_config(self, environ: Mapping[str, str]) -> Iterator[_Known]:
        for name, key in self.declared_keys.items():
            try:
                digest = bytes.fromhex(digest_of(key, environ))
            except KeyError:
                raise ConfigError(
                    f"keys: the environment variable {key.key_env} of the key '{name}' is not set"
                ) from None
            tenant = key.tenant or name
            yield _Known(digest, self._caller(name, tenant, _scope_of(key), key.surface, key.weight))

    def _take(self, changes: AccountChanges) -> None:
        """Apply changed account records."""
        if changes.whole:
            self._made.clear()
            self._digests.clear()
            self._keys_of.clear()
            self._tenant_of.clear()
            self._administrators.clear()
        again: set[str] = set()
        described: set[str] = self.declared_names() if changes.whole else set()
        for record in changes.records:
            if record.kind == "key":
                again.add(record.id)
            elif record.kind == "tenant":
                again |= self._keys_of.get(record.id, set())
                described.add(record.id)
            elif record.kind == "mark" and record.id == KEYS_MARK:
                self._closed = True
        for id in again:
            self._put(id)
        self._declare_again(described)

    def _put(self, id: str) -> None:
        for digest in self._digests.pop(id, ()):
            self._made.pop(digest, None)
        self._administrators.discard(id)
        record = self._key(id)
        if record is None:
            self._keys_of.get(self._tenant_of.pop(id, ""), set[str]()).discard(id)
            return
        self._tenant_of[id] = record.tenant
        self._keys_of.setdefault(record.tenant, set()).add(id)
        caller = None if record.revoked is not None else self._caller_of(id, record)
        if caller is None:
            return
        self._closed = True
        if caller.admin is not None:
            self._administrators.add(id)
        found = [
            _Known(bytes.fromhex(s.sha256), caller, earliest_expiry(record.expires, s.expires), True)
            for s in record.secrets
        ]
        self._made |= {known.digest: known for known in found}
        self._digests[id] = tuple(known.digest for known in found)

    def _declare_again(self, tenants: set[str]) -> None:
        """Recompute the configured keys of tenants that changed."""
        for digest, known in list(self._declared.items()):
            tenant = known.caller.tenant
            if tenant in tenants:
                key = self.declared_keys[known.caller.key]
                caller = self._caller(key.name, tenant, _scope_of(key), key.surface, key.weight)
                self._declared[digest] = _Known(digest, caller)

    # For the admin API

    def shown_declared(self, now: float) -> Iterator[dict[str, Any]]:
        """Yield the configured keys as JSON."""
        for name, key in self.declared_keys.items():
            record = KeyRecord(
                name=name,
                tenant=key.tenant or name,
                secrets=(SecretRecord(sha256="", last_four="", created=0),),
                scope=_scope_of(key),
                surface=key.surface,
                weight=key.weight,
                limits=key.limits,
                created=0,
            )
            yield {**key_json(name, record, now, source="config"), "secrets": [], "created_at": None}


def _scope_of(key: KeyConfig) -> KeyScope:
    return KeyScope(key.models, key.surfaces, key.profiles, key.admin)


def _intersect(one: Sequence[str] | None, other: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return what both allow. None allows everything."""
    if one is None:
        return None if other is None else tuple(other)
    return tuple(each for each in one if other is None or each in other)


def _suspended(tenant: str) -> ApiError:
    return ApiError(f"The tenant '{tenant}' is suspended.", kind="permission_error", code="tenant_suspended")


def _unauthenticated(message: str, code: str) -> ApiError:
    return ApiError(message, kind="authentication_error", code=code)


def _keys_unread() -> ApiError:
    return ApiError(
        "The server has not read its API keys yet. Try again in a moment.",
        kind="overloaded_error",
        code="keys_unread",
        retry_after=1.0,
    )
