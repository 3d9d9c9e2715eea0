"""What is kept of tenants, keys, fast mode and invalidations when it was made through the admin API.

Owns the kinds of records, their JSON, and how tenants and keys are shown. The storage keeps a record as a text with a
version and knows nothing of what it says. No record has a key's secret, only its digest, and what is shown of a record
has not even that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from headrace.config.tenant_section import Rights, TenantConfig
from headrace.gateway.accounts.account_rules import section_json as shown_section
from headrace.gateway.limits.limit_scopes import LimitSet

log: Final = logging.getLogger(__name__)

RecordKind = Literal["tenant", "key", "fast", "invalidation", "mark"]


class KeyScope(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a key may do. None is everything that its tenant may."""

    models: tuple[str, ...] | None = None
    surfaces: tuple[str, ...] | None = None
    profiles: tuple[str, ...] | None = None
    admin: Rights | None = None


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    settings: TenantConfig = TenantConfig()
    created: int  # seconds since 1970, as all times here
    changed: int
    deleted: int | None = None  # then its name stays taken: what was the old one's must never be a new one's


class SecretRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a key's secrets. There are several while a rotation's overlap lasts."""

    sha256: str  # in hexadecimal
    last_four: str
    created: int
    expires: int | None = None


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    tenant: str
    secrets: tuple[SecretRecord, ...]  # the newest is the last
    scope: KeyScope = KeyScope()
    surface: str | None = None  # of requests that name none
    weight: float = 1.0
    limits: LimitSet = LimitSet()
    created: int
    expires: int | None = None
    revoked: int | None = None


class FastRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fast mode of a tenant, or of all, until it expires."""

    on: bool
    reason: str
    by: str  # the key's id
    since: int
    until: int


class InvalidationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """That entries of the caches are to go, in every gateway."""

    at: int
    tags: tuple[str, ...] = ()
    tenant: str | None = None


class MarkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """That something has happened once. The mark "keys": there has been a key, so not everybody may call."""

    at: int


RecordValue = TenantRecord | KeyRecord | FastRecord | InvalidationRecord | MarkRecord
RECORD_TYPES: Final[Mapping[str, type[Any]]] = {
    "tenant": TenantRecord,
    "key": KeyRecord,
    "fast": FastRecord,
    "invalidation": InvalidationRecord,
    "mark": MarkRecord,
}
KEYS_MARK: Final = "keys"
ALL_TENANTS: Final = "*"  # the id of the fast record that is of all tenants; no tenant has this name


class AccountRecord(msgspec.Struct, frozen=True):
    kind: str
    id: str
    version: int  # the epoch in which it was written
    value: RecordValue | None  # None: it was removed


def encode_value(value: RecordValue) -> str:
    return msgspec.json.encode(value).decode()


def decode_records(rows: Iterable[tuple[str, str, int, str | None]]) -> tuple[AccountRecord, ...]:
    """Of rows (kind, id, version, body). What a newer Headrace wrote and this one cannot read counts as removed: what
    it would have allowed is refused."""
    found: list[AccountRecord] = []
    for kind, id, version, body in rows:
        value: RecordValue | None = None
        if kind not in RECORD_TYPES:
            log.error("a record of the unknown kind %s cannot be read", kind)
        elif body is not None:
            try:
                value = msgspec.json.decode(body, type=RECORD_TYPES[kind])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("the record %s %s cannot be read: %s", kind, id, error)
        found.append(AccountRecord(kind, id, version, value))
    return tuple(found)


def earliest_expiry(*times: int | None) -> float:
    """The first of them; None is never."""
    return min((each for each in times if each is not None), default=math.inf)


def status_of(key: KeyRecord, now: float) -> Literal["live", "revoked", "expired"]:
    if key.revoked is not None:
        return "revoked"
    newest = key.secrets[-1].expires if key.secrets else 0
    return "live" if now < earliest_expiry(key.expires, newest) else "expired"


def tenant_json(name: str, settings: TenantConfig, record: TenantRecord | None) -> dict[str, Any]:
    """`record`: None where the configuration declares it."""
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
    """What may be known of a key: never a secret, nor a secret's digest."""
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
