"""Records that the admin API creates: tenants, keys, fast mode, cache invalidations and pins, and their JSON.

The store keeps each record as an opaque string with a version. A key record contains the digest of its secret, never
the secret; API responses contain neither.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from headrace.config.pin_section import PinConfig
from headrace.config.tenant_section import Rights, TenantConfig
from headrace.gateway.accounts.account_rules import section_json as shown_section
from headrace.gateway.limits.limit_scopes import LimitSet

log: Final = logging.getLogger(__name__)

CanaryPhase = Literal["running", "promoted", "rolled_back"]


class KeyScope(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a key may use. None: everything its tenant may use."""

    models: tuple[str, ...] | None = None
    surfaces: tuple[str, ...] | None = None
    profiles: tuple[str, ...] | None = None
    admin: Rights | None = None


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    settings: TenantConfig = TenantConfig()
    created: int  # seconds since 1970, like all times here
    changed: int
    deleted: int | None = None  # a deleted name stays taken, so that a new tenant never inherits data


class SecretRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A secret of a key. During a rotation's overlap there are several."""

    sha256: str  # in hexadecimal
    last_four: str
    created: int
    expires: int | None = None


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    tenant: str
    secrets: tuple[SecretRecord, ...]  # oldest first
    scope: KeyScope = KeyScope()
    surface: str | None = None  # of requests that name none
    weight: float = 1.0
    limits: LimitSet = LimitSet()
    created: int
    expires: int | None = None
    revoked: int | None = None


class FastRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fast mode of one tenant or of all, until it expires."""

    on: bool
    reason: str
    by: str  # id of the key that set it
    since: int
    until: int


class InvalidationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An invalidation of cache entries, to be applied by every gateway."""

    at: int
    tags: tuple[str, ...] = ()
    tenant: str | None = None


class MarkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Marks that something has happened. The mark "keys": a key has existed, so calls need a key from then on."""

    at: int


class PinRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that the engines of every gateway keep computed."""

    model: str  # or a variant
    pin: PinConfig
    created: int


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter that every gateway serves. The record's id is its full name, such as mini:orders."""

    model: str
    name: str
    path: str  # the same on every host
    digest: str  # of its files
    tenants: tuple[str, ...] = ()
    created: int


class CanaryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A candidate that takes a share of a variant's requests. The record's id is that variant, the control."""

    run: str  # unique; measurements belong to it
    candidate: str
    stages: tuple[float, ...]  # percent of the requests, ascending
    stage: int = 0
    phase: CanaryPhase = "running"
    unit: Literal["conversation", "tenant"] = "conversation"
    auto: bool = False  # advances and is promoted without an administrator
    since: int  # start of the canary
    changed: int  # start of the stage or the phase
    by: str  # key that changed it last
    reason: str = ""

    @property
    def percent(self) -> float:
        """Return the candidate's share of the control's requests."""
        return {"running": self.stages[self.stage], "promoted": 100.0, "rolled_back": 0.0}[self.phase]


RecordValue = (
    TenantRecord | KeyRecord | FastRecord | InvalidationRecord | MarkRecord | PinRecord | CanaryRecord | AdapterRecord
)
RECORD_TYPES: Final[Mapping[str, type[Any]]] = {
    "tenant": TenantRecord,
    "key": KeyRecord,
    "fast": FastRecord,
    "invalidation": InvalidationRecord,
    "mark": MarkRecord,
    "pin": PinRecord,
    "canary": CanaryRecord,
    "adapter": AdapterRecord,
}
KEYS_MARK: Final = "keys"
ALL_TENANTS: Final = "*"  # id of the fast record for all tenants; not a valid tenant name


class AccountRecord(msgspec.Struct, frozen=True):
    kind: str
    id: str
    version: int  # epoch of the write
    value: RecordValue | None  # None: removed


def encode_value(value: RecordValue) -> str:
    return msgspec.json.encode(value).decode()


def decode_records(rows: Iterable[tuple[str, str, int, str | None]]) -> tuple[AccountRecord, ...]:
    """Decode rows (kind, id, version, body). A record of a newer version that cannot be read counts as removed, so that
    it grants nothing."""
    records: list[AccountRecord] = []
    for kind, id, version, body in rows:
        value: RecordValue | None = None
        if kind not in RECORD_TYPES:
            log.error("cannot read a record of the unknown kind %s", kind)
        elif body is not None:
            try:
                value = msgspec.json.decode(body, type=RECORD_TYPES[kind])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("cannot read the record %s %s: %s", kind, id, error)
        records.append(AccountRecord(kind, id, version, value))
    return tuple(records)


def earliest_expiry(*times: int | None) -> float:
    """Return the earliest of the times; None means never."""
    return min((each for each in times if each is not None), default=math.inf)


def status_of(key: KeyRecord, now: float) -> Literal["live", "revoked", "expired"]:
    if key.revoked is not None:
        return "revoked"
    newest = key.secrets[-1].expires if key.secrets else 0
    return "live" if now < earliest_expiry(key.expires, newest) else "expired"


def tenant_json(name: str, settings: TenantConfig, record: TenantRecord | None) -> dict[str, Any]:
    """Return a tenant as JSON. `record`: None if the configuration declares it."""
    return {
        "object": "tenant",
        "name": name,
        "source": "config" if record is None else "admin",
        "created_at": None if record is None else record.created,
        "changed_at": None if record is None else record.changed,
        "deleted_at": None if record is None else record.deleted,
        **shown_section(settings),
    }


def key_json(id: str, key: KeyRecord, now: float, *, source: str = "admin", used: int | None = None) -> dict[str, Any]:
    """Return a key as JSON, without secrets and digests."""
    return {
        "object": "key",
        "id": id,
        "name": key.name,
        "tenant": key.tenant,
        "source": source,
        "status": status_of(key, now),
        "secrets": [
            {"last_four": each.last_four, "created_at": each.created, "expires_at": each.expires}
            for each in key.secrets
        ],
        **shown_section(key.scope),
        "surface": key.surface,
        "weight": key.weight,
        "limits": shown_section(key.limits),
        "created_at": key.created,
        "expires_at": key.expires,
        "revoked_at": key.revoked,
        "last_used_at": used,
    }
