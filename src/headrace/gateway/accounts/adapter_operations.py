"""AdapterOperations: lists, loads and unloads the LoRA adapters of the admin API.

Adapters are account records, so every gateway that shares them serves the same ones. Each host reads an adapter from
the same path, and only if its files are those that were loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from headrace.config import ModelConfig
from headrace.config.adapter_section import ADAPTER_NAME, MOST_ADAPTERS
from headrace.engine.interface.request import AdapterRef
from headrace.engine.process.engine_client import EngineClient
from headrace.errors import HeadraceError, ModelError, RequestError
from headrace.gateway.accounts.account_records import AdapterRecord
from headrace.gateway.accounts.account_store import AccountChange, AccountChanges, RecordWrite
from headrace.gateway.accounts.account_sync import AccountSync
from headrace.gateway.accounts.admin_operations import Actor, no_tenant_error
from headrace.gateway.accounts.audit_log import AuditEntry
from headrace.gateway.accounts.directory import AccountDirectory
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant

_LOAD_S: Final = 60.0  # that workers may take to read an adapter


class AdapterOperations:
    def __init__(
        self,
        shared: AccountSync,
        directory: AccountDirectory,
        fleet: Fleet,
        models: Mapping[str, ModelConfig],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared
        self._directory = directory
        self._fleet = fleet
        self._models = models
        self._clock = clock
        self._served: dict[str, tuple[str, str]] = {}  # model and name of the records that are served, by id
        shared.listen(self._take)

    async def list(self, model: str) -> dict[str, Any]:
        """Return a model's adapters, and the memory that each replica has for them."""
        self._check_model(model)
        declared = self._models[model].adapters
        names = dict.fromkeys((*declared, *(name for of, name in self._served.values() if of == model)))
        first = self._fleet.own_variants(model)[0]
        data = [
            _shown(model, served, source="config" if name in declared else "admin")
            for name in names
            if (served := self._fleet.adapters.get(f"{first}:{name}")) is not None
        ]
        memory: dict[str, Any] = {}
        for full in self._fleet.own_variants(model):
            try:
                replicas = await self._fleet.served[full].stats()
            except HeadraceError:
                replicas = []
            memory[full] = [each["adapters"] for each in replicas if "adapters" in each]
        return {"object": "list", "data": data, "memory": memory}

    async def load(
        self, who: Actor, model: str, name: str, path: str, *, tenants: Collection[str] = ()
    ) -> dict[str, Any]:
        """Serve an adapter from now on, in place of one of the same name. Every connected worker of the model's
        variants reads it first, so that one which cannot be loaded is an ApiError."""
        self._check_model(model)
        self._check_name(model, name)
        for tenant in tenants:
            if tenant not in self._directory.tenants():
                raise no_tenant_error(tenant)
        try:
            ref = await asyncio.to_thread(self._fleet.open_adapter, model, name, path)
            await self._load(model, ref)
        except (ModelError, RequestError) as error:
            raise invalid_request(str(error), "path") from None
        record = AdapterRecord(
            model=model,
            name=name,
            path=ref.path,
            digest=ref.digest,
            tenants=tuple(tenants),
            created=int(self._clock()),
        )
        id = f"{model}:{name}"

        def plan() -> AccountChange:
            held = self._shared.get("adapter", id)
            if held.value is None and self._count(model) >= MOST_ADAPTERS:
                raise ApiError(
                    f"The limit of {MOST_ADAPTERS} adapters of '{model}' is reached.",
                    code="too_many_adapters",
                    status=409,
                )
            before = _facts(held.value) if isinstance(held.value, AdapterRecord) else None
            entry = self._entry(who, "adapter.load", id, before=before, after=_facts(record))
            return AccountChange(entry=entry, writes=(RecordWrite("adapter", id, record, held.version),))

        await self._shared.commit(plan)
        return _shown(model, self._fleet.adapters[f"{self._fleet.own_variants(model)[0]}:{name}"], source="admin")

    async def unload(self, who: Actor, model: str, name: str) -> dict[str, Any]:
        """Stop serving an adapter. Requests that run with it go on."""
        self._check_model(model)
        id = f"{model}:{name}"

        def plan() -> AccountChange:
            held = self._shared.get("adapter", id)
            if not isinstance(held.value, AdapterRecord):
                if name in self._models[model].adapters:
                    raise _declared(id)
                raise ApiError(
                    f"Unknown adapter '{id[:200]}'.",
                    kind="not_found_error",
                    parameter="adapter",
                    code="adapter_not_found",
                )
            entry = self._entry(who, "adapter.unload", id, before=_facts(held.value))
            return AccountChange(entry=entry, writes=(RecordWrite("adapter", id, None, held.version),))

        await self._shared.commit(plan)
        return {"object": "adapter", "id": id, "deleted": True}

    async def _load(self, model: str, ref: AdapterRef) -> None:
        """Have all engines of a model read an adapter. Workers that do not answer in time read it later."""
        engines = [self._fleet.served[full].engine for full in self._fleet.own_variants(model)]
        try:
            async with asyncio.timeout(_LOAD_S):
                await asyncio.gather(*(each.load_adapter(ref) for each in engines if isinstance(each, EngineClient)))
        except TimeoutError:
            return

    def _count(self, model: str) -> int:
        return len(self._models[model].adapters) + sum(of == model for of, _ in self._served.values())

    def _check_model(self, model: str) -> None:
        if model not in self._models or not self._fleet.own_variants(model):
            known = ", ".join(each for each in self._models if self._fleet.own_variants(each)) or "none"
            raise ApiError(
                f"Unknown model '{model[:200]}'. Models that take adapters: {known}.",
                kind="not_found_error",
                parameter="model",
                code="model_not_found",
            )

    def _check_name(self, model: str, name: str) -> None:
        full = f"{model}:{name}"
        if not ADAPTER_NAME.fullmatch(name):
            raise invalid_request("Invalid 'name'. Expected up to 64 letters, digits and . _ -.", "name")
        if name in self._models[model].adapters:
            raise _declared(full)
        if full in self._models or full in self._fleet.aliases:
            raise invalid_request(f"'{full}' is the name of another model.", "name")

    def _entry(self, who: Actor, what: str, id: str, **fields: Any) -> AuditEntry:
        return AuditEntry(
            at=int(self._clock()), who=who.key, what=what, target=f"adapter:{id}", request=who.request, **fields
        )

    def _take(self, changes: AccountChanges) -> None:
        """Apply changed records."""
        if not changes.whole and all(record.kind != "adapter" for record in changes.records):
            return
        held = {
            id: record.value
            for id, record in self._shared.held("adapter").items()
            if isinstance(record.value, AdapterRecord) and record.value.model in self._models
        }
        for id in [id for id in self._served if id not in held]:
            self._fleet.remove_adapter(*self._served.pop(id))
        for id, record in held.items():
            if record.name in self._models[record.model].adapters:
                continue  # the configuration declares one of this name since
            self._served[id] = record.model, record.name
            ref = AdapterRef(record.name, record.path, record.digest)
            self._fleet.add_adapter(record.model, ref, tenants=record.tenants, created=record.created)


def _facts(record: AdapterRecord) -> dict[str, Any]:
    return {"path": record.path, "digest": record.digest, "tenants": list(record.tenants)}


def _shown(model: str, served: ServedVariant, *, source: str) -> dict[str, Any]:
    assert served.adapter is not None
    return {
        "object": "adapter",
        "id": f"{model}:{served.adapter.name}",
        "model": model,
        "name": served.adapter.name,
        "path": served.adapter.path,
        "digest": served.adapter.digest,
        "tenants": list(served.tenants),
        "source": source,
        "created_at": served.created,
    }


def _declared(id: str) -> ApiError:
    return ApiError(
        f"The configuration file declares the adapter '{id[:200]}'. Change it there.",
        parameter="name",
        code="declared_in_config",
        status=409,
    )
