"""PinOperations: creates, lists and deletes the pins of the admin API, and hands them to the engines.

Pins are account records, so every gateway that shares them keeps the same prompts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from headrace.config.pin_section import MOST_PINS, PinConfig, check_pin
from headrace.gateway.accounts.account_records import PinRecord
from headrace.gateway.accounts.account_store import AccountChange, AccountChanges, RecordWrite
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import Actor, no_tenant_error
from headrace.gateway.accounts.audit_log import AuditEntry
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.serving.pinned_prompts import PinnedPrompt, PinnedPrompts

_TEXT_BYTES: Final = 256 * 1024  # of a pin's text, which is a record that every gateway reads


class PinOperations:
    def __init__(
        self,
        shared: AccountSync,
        directory: AccountDirectory,
        prompts: PinnedPrompts,
        *,
        served: Collection[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`served`: names of models and variants."""
        self._shared = shared
        self._directory = directory
        self.prompts = prompts
        self._served = served
        self._clock = clock
        shared.listen(self._take)

    def list(self) -> dict[str, Any]:
        return {"object": "list", "data": self.prompts.listed()}

    async def create(self, who: Actor, model: str, pin: PinConfig) -> dict[str, Any]:
        self._check(model, pin)
        id = f"pin_{secrets.token_hex(8)}"
        record = PinRecord(model=model, pin=pin, created=int(self._clock()))

        def plan() -> AccountChange:
            if len(self._shared.held("pin")) >= MOST_PINS:
                raise ApiError(f"The limit of {MOST_PINS} pins is reached.", code="too_many_pins", status=409)
            after = {"model": model, "name": pin.name, "public": pin.public}
            entry = self._entry(who, "pin.create", id, pin, after=after)
            return AccountChange(entry=entry, writes=(RecordWrite("pin", id, record, 0),))

        await self._shared.commit(plan)
        return self.prompts.shown(_pin(id, record))

    async def delete(self, who: Actor, id: str) -> dict[str, Any]:
        def plan() -> AccountChange:
            held = self._shared.get("pin", id)
            if not isinstance(held.value, PinRecord):
                if self.prompts.find(id) is not None:
                    raise ApiError(
                        f"The configuration file declares the pin '{id[:200]}'. Remove it there.",
                        parameter="pin",
                        code="declared_in_config",
                        status=409,
                    )
                raise ApiError(
                    f"Unknown pin '{id[:200]}'.", kind="not_found_error", parameter="pin", code="pin_not_found"
                )
            before = {"model": held.value.model, "name": held.value.pin.name, "public": held.value.pin.public}
            entry = self._entry(who, "pin.delete", id, held.value.pin, before=before)
            return AccountChange(entry=entry, writes=(RecordWrite("pin", id, None, held.version),))

        await self._shared.commit(plan)
        return {"object": "pin", "id": id, "deleted": True}

    def _check(self, model: str, pin: PinConfig) -> None:
        if model not in self._served:
            known = ", ".join(sorted(self._served))
            raise invalid_request(f"Unknown model '{model[:200]}'. Available models: {known}.", "model")
        if pin.file is not None:
            raise invalid_request("Files are read by the configuration only. Send the text itself.", "system")
        for key, reason in check_pin(pin):
            raise invalid_request(f"Invalid pin: {reason}.", key or "system")
        if len((pin.system or pin.text or "").encode()) > _TEXT_BYTES:
            raise invalid_request(f"The text is longer than {_TEXT_BYTES} bytes.", "system")
        if pin.tenant is not None and pin.tenant not in self._directory.tenants():
            raise no_tenant_error(pin.tenant)

    def _entry(self, who: Actor, what: str, id: str, pin: PinConfig, **fields: Any) -> AuditEntry:
        return AuditEntry(
            at=int(self._clock()),
            who=who.key,
            what=what,
            target=f"pin:{id}",
            request=who.request,
            tenant=pin.tenant or "",
            **fields,
        )

    def _take(self, changes: AccountChanges) -> None:
        """Apply changed records. The pins of a tenant that was deleted end with it."""
        if changes.whole or any(record.kind in ("pin", "tenant") for record in changes.records):
            self.prompts.want(
                _pin(record.id, record.value)
                for record in self._shared.held("pin").values()
                if isinstance(record.value, PinRecord) and self._lives(record.value.pin.tenant)
            )

    def _lives(self, tenant: str | None) -> bool:
        return tenant is None or tenant in self._directory.tenants()


def _pin(id: str, record: PinRecord) -> PinnedPrompt:
    return PinnedPrompt(id, record.model, record.pin, "admin", record.created)
