"""The operations of the admin API on tenants, keys, fast mode and caches, each with its audit entry.

A change is planned from the current records and planned again if another gateway was faster, so administrators never
overwrite each other's changes unseen. What the configuration declares cannot be changed here, because the file would
restore it at the next start. Knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from headrace.config.tenant_section import AdminConfig, TenantConfig
from headrace.gateway.accounts.account_records import (
    ALL_TENANTS,
    KEYS_MARK,
    AccountRecord,
    FastRecord,
    InvalidationRecord,
    KeyRecord,
    KeyScope,
    MarkRecord,
    SecretRecord,
    TenantRecord,
    key_json,
    status_of,
    tenant_json,
)
from headrace.gateway.accounts.account_rules import NAME, RESERVED, check_scope, check_tenant
from headrace.gateway.accounts.account_store import AccountChange, RecordWrite
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.audit_log import AuditEntry
from headrace.gateway.accounts.cache_invalidations import KEPT, CacheInvalidations
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.accounts.fast_mode import FastModeSwitches
from headrace.gateway.accounts.key_secrets import digest_of_secret, last_four, make_secret
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.database import ListPage
from headrace.gateway.limits.limit_scopes import LimitSet

LIVE_SECRETS: Final = 4  # per key at once
_ENDED_KEYS: Final = 100  # keys removed at a time to make room

Result = TypeVar("Result")
ChangePlan = Callable[[], tuple[AccountChange, Result]]


# What a cache needs in its section before a tenant can use it.
_NEEDED: Final = {"exact": "a store", "semantic": "an embedder", "results": 'a mode such as "record"'}


class Actor(msgspec.Struct, frozen=True):
    """Who makes a change, for the audit log."""

    key: str
    request: str


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tenant: str
    scope: KeyScope
    surface: str | None = None
    weight: float = 1.0
    limits: LimitSet = LimitSet()
    expires: int | None = None


class AdminOperations:
    def __init__(
        self,
        shared: AccountSync,
        directory: AccountDirectory,
        switches: FastModeSwitches,
        invalidations: CacheInvalidations,
        config: AdminConfig,
        *,
        served: Collection[str],  # models and variants
        most_fast_s: float = 86_400.0,
        events: Mapping[str, Sequence[str]] | None = None,  # tags by configured cache event
        lossless: bool = False,  # safety.lossless_only
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.shared = shared
        self.directory = directory
        self.switches = switches
        self._invalidations = invalidations
        self._config = config
        self._served = served
        self._most_fast_s = most_fast_s
        self._events = events or {}
        self._lossless = lossless
        self._clock = clock

    async def _make(self, plan: ChangePlan[Result]) -> Result:
        made: list[Result] = []

        def planned() -> AccountChange:
            change, result = plan()
            made[:] = [result]
            return change

        await self.shared.commit(planned)
        return made[0]

    def _entry(self, who: Actor, what: str, target: str, **fields: Any) -> AuditEntry:
        return AuditEntry(at=int(self._clock()), who=who.key, what=what, target=target, request=who.request, **fields)

    def seconds_from_now(self, seconds: float) -> int:
        return int(self._clock() + seconds)

    # Tenants

    def tenant(self, name: str) -> dict[str, Any]:
        declared = self.directory.declared_tenants.get(name)
        if declared is not None:
            return tenant_json(name, declared, None)
        record = self.directory.made_tenant(name)
        if record is not None:
            return tenant_json(name, record.settings, record)
        if name in self.directory.declared_names():
            return tenant_json(name, self.directory.settings_of(name), None)
        raise no_tenant_error(name)

    def tenants(self, *, after: str | None, limit: int) -> ListPage[dict[str, Any]]:
        page = page_of(sorted(self.directory.tenants()), after, limit)
        return ListPage([self.tenant(name) for name in page.data], page.has_more)

    async def create_tenant(self, who: Actor, name: str, settings: TenantConfig) -> dict[str, Any]:
        if not NAME.fullmatch(name) or name in RESERVED:
            raise invalid_request(
                "Invalid 'name'. Use 1 to 64 letters, digits and . _ -, but not '-' or 'other'.", "name"
            )
        self._check(settings)

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            if name in self.directory.declared_tenants:
                raise _conflict(
                    f"The configuration file already declares the tenant '{name}'.", "name", "declared_in_config"
                )
            record = self.shared.get("tenant", name)
            if isinstance(record.value, TenantRecord):
                raise _conflict(
                    f"The name '{name}' is taken"
                    + (" by a deleted tenant." if record.value.deleted is not None else "."),
                    "name",
                    "name_taken",
                )
            if len(self.shared.held("tenant")) >= self._config.tenants:
                raise _full("tenants", self._config.tenants)
            now = int(self._clock())
            made = TenantRecord(settings=settings, created=now, changed=now)
            shown = tenant_json(name, settings, made)
            entry = self._entry(who, "tenant.create", f"tenant:{name}", tenant=name, after=shown)
            return AccountChange(entry=entry, writes=(RecordWrite("tenant", name, made, record.version),)), shown

        return await self._make(plan)

    async def change_tenant(
        self, who: Actor, name: str, change: Callable[[TenantConfig], TenantConfig], what: str = "tenant.change"
    ) -> dict[str, Any]:
        """Change a tenant. `change` maps the current settings to the new ones."""

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            record, value = self._made_tenant(name)
            settings = change(value.settings)
            self._check(settings)
            made = msgspec.structs.replace(value, settings=settings, changed=int(self._clock()))
            before, after = tenant_json(name, value.settings, value), tenant_json(name, settings, made)
            changed_before, changed_after = _differing(before, after)
            entry = self._entry(who, what, f"tenant:{name}", tenant=name, before=changed_before, after=changed_after)
            return AccountChange(entry=entry, writes=(RecordWrite("tenant", name, made, record.version),)), after

        return await self._make(plan)

    async def delete_tenant(self, who: Actor, name: str) -> dict[str, Any]:
        """Delete a tenant and revoke its keys. The name stays taken, so that nobody inherits its data."""

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            record, value = self._made_tenant(name)
            if name in self.directory.declared_names():
                raise _conflict(
                    f"Keys in the configuration file belong to the tenant '{name}'. Remove them first.",
                    "tenant",
                    "declared_in_config",
                )
            now = int(self._clock())
            made = TenantRecord(created=value.created, changed=now, deleted=now)
            writes = [RecordWrite("tenant", name, made, record.version)]
            revoked: list[str] = []
            for key, kept in self._keys():
                if kept.tenant == name and kept.revoked is None:
                    ended = msgspec.structs.replace(kept, revoked=now)
                    writes.append(RecordWrite("key", key.id, ended, key.version))
                    revoked.append(key.id)
            fast = self.shared.get("fast", name)
            if fast.value is not None:
                writes.append(RecordWrite("fast", name, None, fast.version))
            before = tenant_json(name, value.settings, value)
            after = {"deleted_at": now, "revoked_keys": revoked}
            entry = self._entry(who, "tenant.delete", f"tenant:{name}", tenant=name, before=before, after=after)
            return AccountChange(entry=entry, writes=tuple(writes)), {"object": "tenant", "name": name, "deleted": True}

        return await self._make(plan)

    def _made_tenant(self, name: str) -> tuple[AccountRecord, TenantRecord]:
        """Return a tenant of the admin API; raise ApiError for any other."""
        value = self.directory.made_tenant(name)
        if name in self.directory.declared_tenants or (value is None and name in self.directory.declared_names()):
            raise _conflict(
                f"The tenant '{name}' is declared in the configuration file. Change it there.",
                "tenant",
                "declared_in_config",
            )
        if value is None:
            raise no_tenant_error(name)
        return self.shared.get("tenant", name), value

    def _check(self, settings: TenantConfig) -> None:
        for path, why in check_tenant(settings, self._served):
            raise invalid_request(f"Invalid '{path}': {why}.", path)
        caches = settings.caches
        if self._lossless:
            _check_lossless(settings)
        for cache, mode in (("exact", caches.exact), ("semantic", caches.semantic), ("results", caches.results)):
            if mode not in (None, "off") and cache not in self._invalidations.caches:
                raise invalid_request(
                    f"Invalid 'caches.{cache}': this server has no {cache} cache. Configure "
                    f"{_NEEDED[cache]} in [cache.{cache}] first.",
                    f"caches.{cache}",
                )

    # Keys

    def _keys(self) -> list[tuple[AccountRecord, KeyRecord]]:
        held = self.shared.held("key").values()
        return [(record, record.value) for record in held if isinstance(record.value, KeyRecord)]

    async def keys(self, *, tenant: str | None, after: str | None, limit: int) -> ListPage[dict[str, Any]]:
        """List keys: those of the configuration first, then the others by age."""
        now = self._clock()
        found: dict[str, KeyRecord | dict[str, Any]] = {each["id"]: each for each in self.directory.shown_declared(now)}
        found |= {
            record.id: key for record, key in sorted(self._keys(), key=lambda each: (each[1].created, each[0].id))
        }
        if tenant is not None:
            found = {id: each for id, each in found.items() if _tenant_of(each) == tenant}
        page = page_of(list(found), after, limit)
        uses = await self.shared.store.uses()
        shown = [_shown(id, found[id], now, uses.get(id)) for id in page.data]
        return ListPage(shown, page.has_more)

    async def key(self, id: str) -> dict[str, Any]:
        for each in self.directory.shown_declared(self._clock()):
            if each["id"] == id:
                return each
        _, value = self._made_key(id)
        return key_json(id, value, self._clock(), used=(await self.shared.store.uses()).get(id))

    async def create_key(self, who: Actor, new: NewKey) -> dict[str, Any]:
        """Create a key and return it with its secret, which is not shown again."""
        self._check_key(new)
        id, secret = f"key_{secrets.token_hex(8)}", make_secret()

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            if new.tenant not in self.directory.tenants():
                raise no_tenant_error(new.tenant, "tenant")
            now = int(self._clock())
            key = KeyRecord(
                name=new.name,
                tenant=new.tenant,
                secrets=(_secret_record(secret, now),),
                scope=new.scope,
                surface=new.surface,
                weight=new.weight,
                limits=new.limits,
                created=now,
                expires=new.expires,
            )
            writes = [RecordWrite("key", id, key, 0), *self._room_for_key(now)]
            mark = self.shared.get("mark", KEYS_MARK)
            if mark.value is None:
                writes.append(RecordWrite("mark", KEYS_MARK, MarkRecord(at=now), mark.version))
            tenant = self.shared.get("tenant", new.tenant)
            expects = (("tenant", new.tenant, tenant.version),) if tenant.value is not None else ()
            shown = key_json(id, key, now)
            entry = self._entry(who, "key.create", f"key:{id}", tenant=new.tenant, after=shown)
            return AccountChange(entry=entry, writes=tuple(writes), expects=expects), {**shown, "secret": secret}

        return await self._make(plan)

    def _check_key(self, new: NewKey) -> None:
        for path, why in check_scope(new.scope, self._served):
            raise invalid_request(f"Invalid '{path}': {why}.", path)
        if new.surface is not None and new.scope.surfaces is not None and new.surface not in new.scope.surfaces:
            raise invalid_request(f"Invalid 'surface': '{new.surface}' is not one of the key's surfaces.", "surface")
        if new.expires is not None and new.expires <= self._clock():
            raise invalid_request("'expires_at' is in the past.", "expires_at")

    def _room_for_key(self, now: int) -> list[RecordWrite]:
        """Remove the keys that ended longest ago if the limit is reached. Raise ApiError if all keys are live."""
        keys = self._keys()
        if len(keys) < self._config.keys:
            return []
        ended = [(record, key) for record, key in keys if status_of(key, now) != "live"]
        if not ended:
            raise _full("keys", self._config.keys)
        ended.sort(key=lambda each: (each[1].revoked or each[1].expires or each[1].created, each[0].id))
        return [RecordWrite("key", record.id, None, record.version) for record, _ in ended[:_ENDED_KEYS]]

    async def rotate_key(self, who: Actor, id: str, overlap_s: float) -> dict[str, Any]:
        """Add a new secret; the old ones end after the overlap or at their own expiry."""
        secret = make_secret()

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            record, value = self._made_key(id)
            now = self._clock()
            if status_of(value, now) != "live":
                raise _conflict(f"The key is {status_of(value, now)}. Create a new one.", "key", "key_ended")
            until = int(now + overlap_s)
            kept = [_ending(each, until) for each in value.secrets if each.expires is None or each.expires > now]
            kept = [each for each in kept if each.expires is None or each.expires > now]
            if len(kept) >= LIVE_SECRETS:
                raise _conflict(
                    f"The key already has {len(kept)} valid secrets. Wait for one to expire or use overlap_s 0.",
                    "overlap_s",
                    "too_many_secrets",
                )
            key = msgspec.structs.replace(value, secrets=(*kept, _secret_record(secret, int(now))))
            shown = key_json(id, key, now)
            before, after = _differing(key_json(id, value, now), shown)
            entry = self._entry(who, "key.rotate", f"key:{id}", tenant=key.tenant, before=before, after=after)
            return AccountChange(entry=entry, writes=(RecordWrite("key", id, key, record.version),)), {
                **shown,
                "secret": secret,
            }

        return await self._make(plan)

    async def revoke_key(self, who: Actor, id: str) -> dict[str, Any]:
        """Revoke a key: here at once, in other gateways with their next poll. Idempotent."""

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            record, value = self._made_key(id)
            now = int(self._clock())
            revoked = value.revoked or now
            key = msgspec.structs.replace(value, revoked=revoked)
            before, after = _differing(key_json(id, value, now), key_json(id, key, now))
            entry = self._entry(who, "key.revoke", f"key:{id}", tenant=key.tenant, before=before, after=after)
            return AccountChange(entry=entry, writes=(RecordWrite("key", id, key, record.version),)), key_json(
                id, key, now
            )

        return await self._make(plan)

    def _made_key(self, id: str) -> tuple[AccountRecord, KeyRecord]:
        record = self.shared.get("key", id)
        if isinstance(record.value, KeyRecord):
            return record, record.value
        if id in self.directory.declared_keys:
            raise _conflict(
                f"The key '{id}' is declared in the configuration file. Change it there.", "key", "declared_in_config"
            )
        raise ApiError("Unknown key id.", kind="not_found_error", parameter="key", code="key_not_found")

    # Fast mode

    def fast(self) -> list[dict[str, Any]]:
        return [_shown_fast(record.id, value, left) for record, value, left in self.switches.live()]

    async def set_fast(self, who: Actor, tenant: str | None, *, on: bool, ttl_s: float, reason: str) -> dict[str, Any]:
        """Switch fast mode for one tenant or all. `on` False exempts a tenant while fast mode is on for all."""
        if not 0 < ttl_s <= self._most_fast_s:
            raise invalid_request(
                f"Invalid 'ttl_s'. Expected more than 0 and at most {self._most_fast_s:g} seconds.", "ttl_s"
            )
        if on and not self.switches.declared:  # an operator must not believe that it helps
            raise _conflict(
                "Fast mode has no effect: the section [fast] of the configuration is empty.", "on", "fast_not_declared"
            )
        id = ALL_TENANTS if tenant is None else tenant

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            self._check_tenant(tenant)
            now = int(self.shared.now())
            record = self.shared.get("fast", id)
            value = FastRecord(on=on, reason=reason, by=who.key, since=now, until=now + max(1, round(ttl_s)))
            writes = [RecordWrite("fast", id, value, record.version)]
            writes += [
                RecordWrite("fast", each.id, None, each.version) for each in self.switches.expired() if each.id != id
            ]
            before = msgspec.to_builtins(record.value) if isinstance(record.value, FastRecord) else None
            entry = self._entry(
                who, "fast.on" if on else "fast.off", f"fast:{id}", tenant=tenant or "", reason=reason,
                before=before, after=msgspec.to_builtins(value),
            )  # fmt: skip
            return AccountChange(entry=entry, writes=tuple(writes)), _shown_fast(id, value, value.until - now)

        return await self._make(plan)

    async def clear_fast(self, who: Actor, tenant: str | None) -> dict[str, Any]:
        """Remove a switch."""
        id = ALL_TENANTS if tenant is None else tenant

        def plan() -> tuple[AccountChange, dict[str, Any]]:
            record = self.shared.get("fast", id)
            if not isinstance(record.value, FastRecord):
                raise ApiError(
                    "Fast mode is not set here.", kind="not_found_error", parameter="tenant", code="fast_not_set"
                )
            before = msgspec.to_builtins(record.value)
            entry = self._entry(who, "fast.clear", f"fast:{id}", tenant=tenant or "", before=before)
            shown = {"object": "fast", "tenant": tenant, "deleted": True}
            return AccountChange(entry=entry, writes=(RecordWrite("fast", id, None, record.version),)), shown

        return await self._make(plan)

    def _check_tenant(self, tenant: str | None) -> None:
        if tenant is not None and tenant not in self.directory.tenants():
            raise no_tenant_error(tenant)

    # Caches

    async def invalidate(
        self, who: Actor, *, tags: Sequence[str], events: Sequence[str], tenant: str | None, all: bool
    ) -> dict[str, Any]:
        """Entries with one of the tags, or of one of those that the events end; of one tenant, where one is named.
        Everything, of the tenant or at all, only where `all` says so."""
        if all == bool(tags or events):
            raise invalid_request("Missing parameter. Set 'tags', 'events' or 'all': true.", "all")
        found = dict.fromkeys(tags)
        for event in events:
            if event not in self._events:
                there = ", ".join(sorted(self._events)) or "none"
                raise ApiError(
                    f"Unknown event '{event[:64]}'. Configured events: {there}.",
                    kind="not_found_error",
                    parameter="events",
                    code="event_not_found",
                )
            found |= dict.fromkeys(self._events[event])
        if not (found or all):  # without a tag it would be everything
            raise invalid_request(
                "The configuration names no tags for these events. Pass tags, or 'all': true.", "events"
            )
        id = f"inv_{secrets.token_hex(8)}"

        def plan() -> tuple[AccountChange, InvalidationRecord]:
            self._check_tenant(tenant)
            record = InvalidationRecord(at=int(self.shared.now()), tags=tuple(found), tenant=tenant)
            held = sorted(self.shared.held("invalidation").values(), key=lambda each: each.version)
            old = held[: max(0, len(held) - KEPT + 1)]
            writes = (
                RecordWrite("invalidation", id, record, 0),
                *(RecordWrite("invalidation", each.id, None, each.version) for each in old),
            )
            after = {"tags": list(found), "events": list(events), "tenant": tenant, "all": all}
            entry = self._entry(who, "cache.invalidate", "cache", tenant=tenant or "", after=after)
            return AccountChange(entry=entry, writes=writes), record

        with self._invalidations.own(id):
            record = await self._make(plan)
        removed = await self._invalidations.make_own(id, record)
        return {"object": "invalidation", "id": id, "tags": list(found), "tenant": tenant, "removed": removed}


def _check_lossless(settings: TenantConfig) -> None:
    if settings.caches.semantic not in (None, "off"):
        raise invalid_request(
            "Invalid 'caches.semantic': safety.lossless_only turns the semantic cache off on this server.",
            "caches.semantic",
        )
    for place, budget in enumerate(settings.budgets):
        if budget.then:
            raise invalid_request(
                f"Invalid 'budgets[{place}].then': with safety.lossless_only no other variant answers once the budget "
                "is spent. Leave 'then' out.",
                f"budgets[{place}].then",
            )


def page_of(names: Sequence[str], after: str | None, limit: int) -> ListPage[str]:
    """Return the page of a list that follows `after`."""
    start = 0
    if after is not None:
        if after not in names:
            raise invalid_request("Unknown id in 'after'.", "after")
        start = names.index(after) + 1
    return ListPage(list(names[start : start + limit]), len(names) > start + limit)


def _tenant_of(key: KeyRecord | dict[str, Any]) -> str:
    return key.tenant if isinstance(key, KeyRecord) else key["tenant"]


def _shown(id: str, key: KeyRecord | dict[str, Any], now: float, used: int | None) -> dict[str, Any]:
    return key_json(id, key, now, used=used) if isinstance(key, KeyRecord) else key


def no_tenant_error(name: str, parameter: str = "tenant") -> ApiError:
    return ApiError(
        f"Unknown tenant '{name[:64]}'.", kind="not_found_error", parameter=parameter, code="tenant_not_found"
    )


def _secret_record(secret: str, now: int) -> SecretRecord:
    return SecretRecord(sha256=digest_of_secret(secret).hex(), last_four=last_four(secret), created=now)


def _ending(secret: SecretRecord, until: int) -> SecretRecord:
    expires = until if secret.expires is None else min(secret.expires, until)
    return msgspec.structs.replace(secret, expires=expires)


def _shown_fast(id: str, value: FastRecord, left: float) -> dict[str, Any]:
    return {
        "object": "fast",
        "tenant": None if id == ALL_TENANTS else id,
        "on": value.on,
        "reason": value.reason,
        "by": value.by,
        "since": value.since,
        "until": value.until,
        "seconds_left": round(left, 3),
    }


def _differing(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries that differ, before and after."""
    names = [name for name in after if before.get(name) != after[name]]
    return {name: before.get(name) for name in names}, {name: after[name] for name in names}


def _conflict(message: str, parameter: str, code: str) -> ApiError:
    return ApiError(message, parameter=parameter, code=code, status=409)


def _full(what: str, most: int) -> ApiError:
    return ApiError(f"The limit of {most} {what} is reached.", code=f"too_many_{what}", status=409)
