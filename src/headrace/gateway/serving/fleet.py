"""Fleet: the served models. Finds, starts, reloads and scales their variants.

Does not supervise processes (engine) or hold connections (upstreams).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple, NoReturn

from headrace.config import Config, names_of, upstreams_of, variants_of
from headrace.engine.interface.request import AdapterRef
from headrace.engine.process.engine_client import EngineClient
from headrace.engine.process.submission import ReplicaState
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.images.image_reader import ImageReader
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.variant_engines import (
    AttachedEngine,
    Runs,
    VariantEngine,
    own_engine,
    remake,
    served_by_engine,
    served_by_upstream,
)
from headrace.gateway.upstreams.upstream import Upstream
from headrace.llm.adapters import open_adapter
from headrace.llm.in_workers import AsyncLLM
from headrace.models.model_folder import find_model, open_model

# Called while weights are packed with the variant, the bytes packed so far and the total.
Loading = Callable[[str, int, int], None]


class VariantScale(NamedTuple):
    replicas: int  # of this machine, that run or start
    ready: int
    requests: int  # that have not ended


class Fleet:
    """All variants of a configuration. All of it belongs to one event loop."""

    def __init__(self, served: Mapping[str, ServedVariant], aliases: Mapping[str, str], default: str) -> None:
        self.served = dict(served)
        self.adapters: dict[str, ServedVariant] = {}  # by full name, such as mini:orders
        self.aliases = dict(aliases)
        self.default = default
        self._runs: dict[str, Runs] = {}  # by the variant's name
        self._folders: dict[str, str] = {}  # of the models that engines serve, by the variant's name
        self._makers: dict[str, Callable[[], tuple[ServedVariant, AsyncLLM]]] = {}  # of variants that can be reloaded
        self._reloading = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()  # engines that were replaced and end their requests
        self._drain_s = 30.0

    @classmethod
    def of(
        cls,
        config: Config,
        loading: Loading | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        early: bool = False,
        attach: Mapping[str, Sequence[str]] | None = None,
    ) -> Fleet:
        """Open the models' folders. HeadraceError for a model that cannot be served. `environ` has the upstreams' keys,
        by default this process's environment. `early`: start to load the first engine at once, while this process reads
        tokenizers; then call `start` or `abandon`. `attach` has the workers' sockets of each variant, where another
        process runs the engines."""
        made: dict[str, tuple[ServedVariant, Runs]] = {}
        runs: list[VariantEngine] = []
        aliases: dict[str, str] = {}
        keys = os.environ if environ is None else environ
        try:
            for name, model in config.models.items():
                aliases |= dict.fromkeys(model.aliases, name)
                for full, variant in variants_of(name, model, config.surfaces).items():
                    progress = None if loading is None else partial(loading, full)
                    if attach is not None:
                        engine = AttachedEngine(variant, model, attach[full], config, plain=full == name)
                    else:
                        engine = own_engine(full, variant, model, config, progress, early=early and not runs)
                    runs.append(engine)
                    made[full] = served_by_engine(full, model, engine, config), engine
                for full, configured in upstreams_of(name, model).items():
                    upstream = Upstream.of(full, configured, keys)
                    made[full] = served_by_upstream(upstream, model, config), upstream
        except BaseException:
            for engine in runs:
                engine.abandon()
            raise
        order = names_of(config)
        default = config.default_model or next(iter(config.models))
        fleet = cls({full: made[full][0] for full in order}, aliases, default)
        fleet._runs = {full: made[full][1] for full in order}
        fleet._folders = {
            full: each.variant.model for full, (_, each) in made.items() if isinstance(each, VariantEngine)
        }
        try:
            for name, model in config.models.items():
                for adapter, declared in model.adapters.items():
                    fleet.add_adapter(name, fleet.open_adapter(name, adapter, declared.path), tenants=declared.tenants)
        except BaseException:
            for engine in runs:
                engine.abandon()
            raise
        fleet._drain_s = config.server.drain_s
        if attach is None and config.server.processes == 1:
            fleet._makers = {
                full: partial(remake, full, variant, model, config)
                for name, model in config.models.items()
                for full, variant in variants_of(name, model, config.surfaces).items()
            }
        return fleet

    def own_variants(self, model: str) -> list[str]:
        """Return the full names of a model's variants that engines serve."""
        return [full for full in self._folders if full.partition("@")[0] == model]

    def open_adapter(self, model: str, name: str, path: str) -> AdapterRef:
        """Check an adapter's files against a model. HeadraceError if the model cannot be served with it."""
        variants = self.own_variants(model)
        if not variants:
            raise RequestError(f"No engine of Headrace serves '{model[:200]}', so it takes no adapters.")
        return open_adapter(name, path, open_model(find_model(self._folders[variants[0]])))

    def add_adapter(
        self, model: str, ref: AdapterRef, *, tenants: Sequence[str] = (), created: int | None = None
    ) -> None:
        """Serve an adapter with every variant of a model that engines serve, in place of one of the same name."""
        for full in self.own_variants(model):
            served = self.served[full].with_adapter(ref, tenants=tenants, created=created)
            self.adapters[served.name] = served

    def remove_adapter(self, model: str, name: str) -> None:
        """Stop serving an adapter. Requests that run with it go on."""
        for full in self.own_variants(model):
            served = self.adapters.pop(f"{full}:{name}", None)
            if served is not None and served.adapter is not None and isinstance(served.engine, EngineClient):
                served.engine.drop_adapter(served.adapter.digest)

    def variant(self, full: str) -> ServedVariant:
        """Return a variant, or one with an adapter, by its full name. KeyError if there is none."""
        return self.adapters[full] if full in self.adapters else self.served[full]

    def workers(self) -> dict[str, list[str]]:
        """Return the addresses of the workers of each variant, for `attach`."""
        runs = self._runs.items()
        return {name: each.client.addresses for name, each in runs if isinstance(each, AsyncLLM)}

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Return when every engine can take requests. `progress` is called with each variant's name. Upstreams are not
        waited for; their health is probed while the server runs."""
        for name, each in self._runs.items():
            if progress is not None:
                progress(name)
            await each.start()

    def abandon(self) -> None:
        """Call this in place of `close` on a fleet that was never started."""
        for each in self._runs.values():
            each.abandon()

    async def reload(self, name: str) -> None:
        """Replace a variant's engine by one that reads the model's files again, with no request failing.

        The new engine starts beside the old one, and takes over its pins and all new requests when it is ready. The
        old one ends the requests that it has. HeadraceError if the new one does not start; then nothing changes.
        """
        maker = self._makers.get(name)
        if maker is None:
            raise RequestError(f"'{name}' cannot be reloaded: no engine of this process serves it.", parameter="model")
        async with self._reloading:
            old = self._runs[name]
            assert isinstance(old, AsyncLLM)
            fresh, engine = maker()
            try:
                await engine.start()
                for address in old.client.discovered:
                    engine.client.add_replica(address, discovered=True)
                await engine.client.take_pins(old.client)
                # Before it has requests, which would wait when a text needs what its tokenizer has not loaded yet.
                await asyncio.to_thread(fresh.tokenizer.load_encoder)
            except BaseException:
                await self._end(engine, fresh.images)
                raise
            served = self.served[name]
            old_images = served.images
            for field in ServedVariant.__struct_fields__:
                if field != "created":
                    setattr(served, field, getattr(fresh, field))
            for each in self.adapters.values():
                if each.base == name and each.adapter is not None:
                    renewed = served.with_adapter(each.adapter, tenants=each.tenants)
                    for field in ServedVariant.__struct_fields__:
                        if field != "created":
                            setattr(each, field, getattr(renewed, field))
            self._runs[name] = engine
            task = asyncio.create_task(self._retire(old, old_images))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, engine: AsyncLLM, images: ImageReader | None) -> None:
        try:
            await engine.client.finish(self._drain_s)
            if images is not None:
                await images.finish(self._drain_s)
        finally:
            await self._end(engine, images)

    async def _end(self, engine: AsyncLLM, images: ImageReader | None) -> None:
        try:
            await engine.close()
        finally:
            if images is not None:
                await images.close()

    async def close(self) -> None:
        """Close all engines and upstreams, even if closing one fails."""
        async with AsyncExitStack() as ending:
            for task in self._retiring:
                task.cancel()
            for task in list(self._retiring):
                ending.push_async_callback(asyncio.gather, task, return_exceptions=True)
            for served in self.served.values():
                if served.images is not None:
                    ending.push_async_callback(served.images.close)
            for each in self._runs.values():
                ending.push_async_callback(each.close)

    def restarts(self, name: str) -> list[int]:
        """Return how often the processes of each replica were restarted; empty for an upstream that others run."""
        runs = self._runs.get(name)
        if isinstance(runs, Upstream) and runs.engine is not None:
            return [runs.engine.restarts]
        return runs.supervisor.restarts if isinstance(runs, AsyncLLM) else []

    def replicas(self, name: str) -> list[ReplicaState]:
        """Return the workers of a variant; none for an upstream."""
        client = self.served[name].engine
        return client.replicas() if isinstance(client, EngineClient) else []

    def drain_replica(self, name: str, address: str) -> bool:
        """Ask a worker of a variant to finish its requests and exit. Return False if it has no such worker."""
        client = self.served[name].engine
        return isinstance(client, EngineClient) and client.drain_replica(address)

    def add_worker(self, name: str, address: str) -> None:
        """Send a variant's requests to a worker that a registry named, too."""
        client = self.served[name].engine
        assert isinstance(client, EngineClient), name
        client.add_replica(address, discovered=True)

    async def remove_worker(self, name: str, address: str) -> None:
        """Forget a worker of a variant. What still runs there continues on another."""
        client = self.served[name].engine
        assert isinstance(client, EngineClient), name
        await client.remove_replica(address)

    def note_sequences(self, name: str, address: str, sequences: int) -> None:
        """Learn how many sequences a worker has, of all servers together."""
        client = self.served[name].engine
        assert isinstance(client, EngineClient), name
        client.note_sequences(address, sequences)

    def scalable(self, name: str) -> list[str]:
        """Return the full names of a model's variants whose engines this process runs."""
        own = [full for full, each in self._runs.items() if isinstance(each, AsyncLLM)]
        return [full for full in own if full.partition("@")[0] == name]

    def scale_of(self, name: str) -> VariantScale:
        engine = self._own(name)
        ready = sum(replica.state in ("ready", "silent") for replica in engine.client.replicas())
        return VariantScale(engine.active_replicas, ready, engine.client.running)

    async def scale(self, name: str, replicas: int) -> None:
        """Start or stop replicas of a variant. Returns when new ones take requests; those that stop finish theirs
        meanwhile. HeadraceError if one does not start."""
        async with self._reloading:
            engine = self._own(name)
            if replicas >= engine.active_replicas:
                await engine.scale(replicas)
                return
            task = asyncio.create_task(engine.scale(replicas))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def until_starved(self, name: str, timeout: float) -> None:
        """Return when a request waits because the variant has no replica, or after `timeout` seconds."""
        client = self._own(name).client
        client.starved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await client.starved.wait()

    def _own(self, name: str) -> AsyncLLM:
        engine = self._runs[name]
        assert isinstance(engine, AsyncLLM), name
        return engine

    def find(self, name: str, profile: str = "standard") -> ServedVariant:
        """Find a variant by a model's name, an alias or MODEL@VARIANT; an empty name is the default model. A profile
        other than `standard` selects the variant of that name; a model without a fast variant serves `fast` itself."""
        wanted = name or self.default
        base, at, variant = wanted.partition("@")
        if profile != "standard" and not at:
            found = self.served.get(f"{self.aliases.get(base, base)}@{profile}")
            if found is not None:
                return found
            if profile != "fast" and self.aliases.get(base, base) in self.served:
                self._no_profile(wanted, profile)
        found = self.served.get(self.aliases.get(base, base) + at + variant) or self._find_adapter(wanted, profile)
        if found is None:
            there = ", ".join(sorted(self.served))
            raise ApiError(
                f"Unknown model '{wanted[:200]}'. Available models: {there}.",
                kind="not_found_error",
                parameter="model",
                code="model_not_found",
            )
        return found

    def _find_adapter(self, wanted: str, profile: str) -> ServedVariant | None:
        """Find MODEL:ADAPTER, ALIAS:ADAPTER or MODEL@VARIANT:ADAPTER."""
        model, colon, adapter = wanted.rpartition(":")
        if not colon or not self.adapters:
            return None
        base, at, variant = model.partition("@")
        base = self.aliases.get(base, base)
        found = self.adapters.get(f"{base}{at}{variant}:{adapter}")
        if profile == "standard" or at or found is None:
            return found
        named = self.adapters.get(f"{base}@{profile}:{adapter}")
        if named is None and profile != "fast":
            self._no_profile(wanted, profile)
        return named or found

    def _no_profile(self, name: str, profile: str) -> NoReturn:
        raise ApiError(
            f"'{name}' has no variant for the profile '{profile}'.",
            parameter="profile",
            code="unsupported_parameter",
        )
