"""The served models: every variant with its engine or upstream, tokenizer and output formats.

Does not start or supervise processes (engine) or hold connections (upstreams).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Protocol, runtime_checkable

import msgspec

from headrace.config import Config, ModelConfig, ServerConfig, names_of, upstreams_of, variants_of
from headrace.engine.executors.cpu_executor import default_context
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process.engine_client import ClientTimeouts, EngineClient
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.submission import ReplicaState
from headrace.engine.process.supervisor import SupervisorTimeouts
from headrace.engine.process.worker_address import WorkerTls
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.output.reasoning import ReasoningFormat, detect_reasoning_format, reasoning_format_by_name
from headrace.gateway.output.tool_formats import ToolFormat, detect_tool_format, tool_format_by_name
from headrace.gateway.serving import fingerprint
from headrace.gateway.upstreams.upstream import Upstream
from headrace.llm import AsyncLLM
from headrace.models.model_folder import ModelFolder, find_model, open_model
from headrace.models.precision import AUTO
from headrace.models.sentence_files import Prompts
from headrace.models.spec import RankingSpec
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.user_text import UserText
from headrace.models.weight_choice import choose_plan, describe_choice
from headrace.variant import Variant

# Called while weights are packed with the variant, the bytes packed so far and the total.
Loading = Callable[[str, int, int], None]

_NO_BOUND: Final = 2**31 - 1  # tokens, if only the upstream knows its context


class EngineConnection(Protocol):
    """Generates: a client of worker processes or, in tests and benchmarks, something simpler."""

    def stream(self, request: GenerationRequest) -> OutputStream: ...

    async def stats(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class _Idles(Protocol):
    """An engine that reports whether a replica is idle."""

    @property
    def idle(self) -> bool: ...


@runtime_checkable
class _Responds(Protocol):
    """An engine that reports whether a replica can take requests now."""

    @property
    def responsive(self) -> bool: ...


class _Runs(Protocol):
    """An engine's processes, or an upstream."""

    async def start(self) -> None: ...

    def abandon(self) -> None: ...

    async def close(self) -> None: ...


class ModelDescription(msgspec.Struct, frozen=True):
    """A model in a listing, beside its name."""

    family: str
    parameters: int
    precision: str  # of its weights
    format: str  # of its files
    weight_bytes: int  # of its files
    choice: str = ""  # why the weights have their precision, if the files are quantised and the variant names none


class ServedVariant(msgspec.Struct, kw_only=True):
    """One variant. If an upstream serves it, `engine` and perhaps `tokenizer` are placeholders that raise an ApiError
    on use, so that features of engines need no check of their own."""

    name: str  # as clients name it: `mini`, `mini@int4`
    engine: EngineConnection
    tokenizer: Tokenizer
    context: int  # tokens, prompt and answer together
    kind: str = "decoder"
    width: int = 0  # of an embedding; 0 for an upstream before its first one
    fingerprint: str = ""  # changes with everything that determines answers: weights, precision, template…
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    max_tokens: int | None = None  # of an answer without a limit of its own
    surface: str = "chat"
    deadlines: Mapping[str, float] = {}  # seconds, by surface
    ranking: RankingSpec | None = None  # of a reranker
    prompts: Prompts = Prompts()  # texts that an embedder puts before its input
    special_tokens: bool = False  # whether a prompt of a completion may hold control tokens
    upstream: Upstream | None = None  # serves it in place of an engine
    description: ModelDescription | None = None  # None: only the upstream knows
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def own_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if this server does not have it."""
        return None if isinstance(self.tokenizer, _NoTokenizer) else self.tokenizer

    @property
    def purpose(self) -> str:
        """What the model does, for messages about what it does not."""
        if self.kind == "reranker":
            return "reranks documents (/v1/rerank)"
        return "makes embeddings (/v1/embeddings)" if self.kind == "encoder" else "generates text"

    @property
    def known_context(self) -> int | None:
        """The context in tokens; None if only the upstream knows it."""
        return self.context if self.context < _NO_BOUND else None

    @property
    def idle(self) -> bool:
        """True if one more request would not delay any other."""
        if self.upstream is not None:
            return self.upstream.idle
        return isinstance(self.engine, _Idles) and self.engine.idle

    @property
    def responsive(self) -> bool:
        """True if an engine process can take requests now. The breaker of an upstream judges upstreams, not this."""
        return self.upstream is not None or not isinstance(self.engine, _Responds) or self.engine.responsive

    async def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of the engine that serves now; it may have been replaced since the start."""
        return await self.engine.stats()

    def prompt_text(self, prompt: str | Sequence[int]) -> str | Sequence[int]:
        """Return a completion's prompt so that its control tokens are read as this variant allows."""
        return UserText(prompt) if isinstance(prompt, str) and not self.special_tokens else prompt

    def described(self) -> dict[str, Any]:
        """Return the entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "max_model_len": self.known_context,
            "kind": self.kind,
            "served_by": "engine" if self.upstream is None else "upstream",
        }


def no_tokens(name: str) -> ApiError:
    return ApiError(
        f"The tokens of '{name}' are unknown: an upstream serves it, and its configuration names no tokenizer.",
        parameter="model",
        code="unsupported_parameter",
    )


class _NoEngine:
    """Placeholder for the engine of a variant that an upstream serves."""

    def __init__(self, name: str) -> None:
        self._name = name

    def stream(self, request: GenerationRequest) -> OutputStream:
        raise ApiError(
            f"'{self._name}' is served by an upstream, which does not support this.",
            parameter="model",
            code="unsupported_parameter",
        )

    async def stats(self) -> list[dict[str, Any]]:
        return []  # there is no replica


class _NoTokenizer(Tokenizer):
    """Placeholder for an unknown tokenizer: every access to an attribute is an ApiError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python looks these up itself and copes without
            raise AttributeError(attribute)
        raise no_tokens(self._name)


class VariantScale(NamedTuple):
    replicas: int  # of this machine, that run or start
    ready: int
    requests: int  # that have not ended


class Fleet:
    """All variants of a configuration. All of it belongs to one event loop."""

    def __init__(self, served: Mapping[str, ServedVariant], aliases: Mapping[str, str], default: str) -> None:
        self.served = dict(served)
        self.aliases = dict(aliases)
        self.default = default
        self._runs: dict[str, _Runs] = {}  # by the variant's name
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
        made: dict[str, tuple[ServedVariant, _Runs]] = {}
        runs: list[_OwnEngine] = []
        aliases: dict[str, str] = {}
        keys = os.environ if environ is None else environ
        try:
            for name, model in config.models.items():
                aliases |= dict.fromkeys(model.aliases, name)
                for full, variant in variants_of(name, model, config.surfaces).items():
                    progress = None if loading is None else partial(loading, full)
                    if attach is not None:
                        engine = _AttachedEngine(variant, model, attach[full], config)
                    else:
                        engine = _engine(full, variant, model, config, progress, early=early and not runs)
                    runs.append(engine)
                    made[full] = _served(full, model, engine, config), engine
                for full, configured in upstreams_of(name, model).items():
                    upstream = Upstream.of(full, configured, keys)
                    made[full] = served_by(upstream, model, config), upstream
        except BaseException:
            for engine in runs:
                engine.abandon()
            raise
        order = names_of(config)
        default = config.default_model or next(iter(config.models))
        fleet = cls({full: made[full][0] for full in order}, aliases, default)
        fleet._runs = {full: made[full][1] for full in order}
        fleet._drain_s = config.server.drain_s
        if attach is None and config.server.processes == 1:
            fleet._makers = {
                full: partial(_remade, full, variant, model, config)
                for name, model in config.models.items()
                for full, variant in variants_of(name, model, config.surfaces).items()
            }
        return fleet

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
                await engine.client.take_pins(old.client)
            except BaseException:
                await engine.close()
                raise
            served = self.served[name]
            for field in ServedVariant.__struct_fields__:
                if field != "created":
                    setattr(served, field, getattr(fresh, field))
            self._runs[name] = engine
            task = asyncio.create_task(self._retire(old))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, engine: AsyncLLM) -> None:
        try:
            await engine.client.finish(self._drain_s)
        finally:
            await engine.close()

    async def close(self) -> None:
        """Close all engines and upstreams, even if closing one fails."""
        async with AsyncExitStack() as ending:
            for task in self._retiring:
                task.cancel()
            for task in list(self._retiring):
                ending.push_async_callback(asyncio.gather, task, return_exceptions=True)
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
        found = self.served.get(self.aliases.get(base, base) + at + variant)
        if found is None:
            there = ", ".join(sorted(self.served))
            raise ApiError(
                f"Unknown model '{wanted[:200]}'. Available models: {there}.",
                kind="not_found_error",
                parameter="model",
                code="model_not_found",
            )
        return found

    def _no_profile(self, name: str, profile: str) -> NoReturn:
        raise ApiError(
            f"'{name}' has no variant for the profile '{profile}'.",
            parameter="profile",
            code="unsupported_parameter",
        )


def _engine(
    name: str,
    variant: Variant,
    model: ModelConfig,
    config: Config,
    progress: Callable[[int, int], None] | None,
    *,
    early: bool,
) -> AsyncLLM:
    options = msgspec.structs.asdict(variant)
    path, server = options.pop("model"), config.server
    plain = "@" not in name
    workers = model.workers if plain else ()
    return AsyncLLM(
        path,
        replicas=model.local_replicas(plain=plain),
        standby=model.standby,
        most_replicas=None if model.autoscale is None else model.autoscale.most,
        workers=workers,
        tls=_tls(config),
        fingerprint=fingerprint.of_model(open_model(find_model(path)), variant) if workers else "",
        watch=SupervisorTimeouts(ping=_ping_s(server), silence=server.heartbeat_s, longest_step=server.step_s),
        waits=_waits(server),
        drain_seconds=server.drain_s,
        progress=progress,
        early=early,
        **options,
    )


def _tls(config: Config) -> WorkerTls | None:
    workers = config.workers
    if not workers.cert_file:
        return None
    return WorkerTls(cert=workers.cert_file, key=workers.key_file, ca=workers.ca_file, name=workers.name)


def _remade(name: str, variant: Variant, model: ModelConfig, config: Config) -> tuple[ServedVariant, AsyncLLM]:
    engine = _engine(name, variant, model, config, None, early=False)
    try:
        return _served(name, model, engine, config), engine
    except BaseException:
        engine.abandon()
        raise


def _ping_s(server: ServerConfig) -> float:
    return min(SupervisorTimeouts().ping, server.heartbeat_s / 4)


def _waits(server: ServerConfig) -> ClientTimeouts:
    return ClientTimeouts(
        patience=server.worker_s,
        ping=_ping_s(server),
        suspicion=server.heartbeat_s / 2,
        longest_step=server.step_s,
    )


class _AttachedEngine:
    """An engine whose workers another process supervises."""

    def __init__(self, variant: Variant, model: ModelConfig, addresses: Sequence[str], config: Config) -> None:
        folder = open_model(find_model(variant.model))
        self.variant = msgspec.structs.replace(variant, model=str(folder.path))
        self.context = default_context(folder.spec) if variant.context is None else variant.context
        self.tokenizer = folder.tokenizer
        remote = any(address in model.workers for address in addresses)
        self._is_local = not remote or len(addresses) > len(model.workers)
        self.client = EngineClient(
            addresses,
            tls=_tls(config),
            fingerprint=fingerprint.of_model(folder, variant) if remote else "",
            standby=model.standby,
            waits=_waits(config.server),
        )

    async def start(self) -> None:
        self.client.start()
        if self._is_local:
            await self.client.ready()

    def abandon(self) -> None:
        """There is nothing to stop."""

    async def close(self) -> None:
        await self.client.close()


_OwnEngine = AsyncLLM | _AttachedEngine


def _served(name: str, model: ModelConfig, engine: _OwnEngine, config: Config) -> ServedVariant:
    folder = open_model(find_model(engine.variant.model))
    tokenizer = engine.tokenizer
    template = None if tokenizer.tool_template is None else tokenizer.tool_template.source
    tools = (
        tool_format_by_name(model.tool_format, tokenizer)
        if model.tool_format
        else detect_tool_format(template, tokenizer)
    )
    reasoning = (
        reasoning_format_by_name(model.reasoning_format, tokenizer)
        if model.reasoning_format
        else detect_reasoning_format(template, tokenizer)
    )
    return ServedVariant(
        name=name,
        engine=engine.client,
        tokenizer=tokenizer,
        context=engine.context,
        kind=folder.spec.kind,
        width=folder.spec.vector_size,
        ranking=folder.spec.ranking,
        fingerprint=fingerprint.of_model(folder, engine.variant, special_tokens=model.special_tokens),
        tools=tools,
        reasoning=reasoning,
        max_tokens=model.max_tokens,
        surface=model.surface,
        deadlines=_deadlines(config),
        prompts=folder.prompts,
        special_tokens=model.special_tokens == "completions",
        description=_description(folder, engine.variant),
    )


def _description(folder: ModelFolder, variant: Variant) -> ModelDescription:
    plan = choose_plan(folder, variant.weights, group=variant.group, keep=variant.keep)
    return ModelDescription(
        family=folder.spec.family,
        parameters=sum(math.prod(shape) for shape in folder.shapes.values()),
        precision=plan.name if variant.weights == AUTO else variant.weights,
        format=folder.weights.files[0].suffix.removeprefix("."),
        weight_bytes=folder.weights.total_bytes,
        choice=describe_choice(folder, plan),
    )


def served_by(upstream: Upstream, model: ModelConfig, config: Config) -> ServedVariant:
    """Return the variant that an upstream serves."""
    takes, context = upstream.takes, upstream.config.context
    return ServedVariant(
        name=upstream.name,
        engine=_NoEngine(upstream.name),
        tokenizer=upstream.tokenizer or _NoTokenizer(upstream.name),
        context=_NO_BOUND if context is None else context,
        kind="decoder" if takes.chat or takes.completions else "encoder",
        fingerprint=fingerprint.of_upstream(upstream.config),
        max_tokens=model.max_tokens,
        surface=model.surface,
        deadlines=_deadlines(config),
        upstream=upstream,
    )


def _deadlines(config: Config) -> dict[str, float]:
    """Seconds, by surface."""
    return {
        surface: each.deadline_ms / 1000.0 for surface, each in config.surfaces.items() if each.deadline_ms is not None
    }
