"""The served models: every variant with its engine or upstream, tokenizer and output formats.

Does not start or supervise processes (engine) or hold connections (upstreams).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, NoReturn, Protocol, runtime_checkable

import msgspec

from headrace.config import Config, ModelConfig, ServerConfig, names_of, upstreams_of, variants_of
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process.engine_client import ClientTimeouts
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.api_errors import ApiError
from headrace.gateway.output.reasoning import ReasoningFormat, detect_reasoning_format, reasoning_format_by_name
from headrace.gateway.output.tool_formats import ToolFormat, detect_tool_format, tool_format_by_name
from headrace.gateway.serving import fingerprint
from headrace.gateway.serving.upstreams.upstream import Upstream
from headrace.llm import AsyncLLM
from headrace.models.model_folder import find_model, open_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.variant import Variant

# Hears, while weights are packed, of which variant how many bytes are, and of how many.
Loading = Callable[[str, int, int], None]

_NO_BOUND: Final = 2**31 - 1  # tokens, where the upstream alone knows its context


class EngineConnection(Protocol):
    """What makes outputs of requests: a client of worker processes, or, in tests and benchmarks, something simpler."""

    def stream(self, request: GenerationRequest) -> OutputStream: ...

    async def stats(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class _Idles(Protocol):
    """An engine that knows whether a replica of it has nothing to do."""

    @property
    def idle(self) -> bool: ...


class _Runs(Protocol):
    """An engine's processes, or an upstream."""

    async def start(self) -> None: ...

    def abandon(self) -> None: ...

    async def close(self) -> None: ...


class ServedVariant(msgspec.Struct, kw_only=True):
    """One variant. Where an upstream answers, `engine` and perhaps `tokenizer` are there in name only: each use of them
    is an ApiError that says so, so that what only engines can do needs no question of its own."""

    name: str  # as clients may name it: `mini`, `mini@int4`
    engine: EngineConnection
    tokenizer: Tokenizer
    context: int  # tokens, prompt and answer together
    kind: str = "decoder"
    width: int = 0  # of an embedding; an upstream's is not known before its first one
    fingerprint: str = ""  # changes with the weights, their precision and all else that answers follow from
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    max_tokens: int | None = None  # of an answer that asks for no limit
    surface: str = "chat"
    deadlines: Mapping[str, float] = {}  # seconds, by surface
    upstream: Upstream | None = None  # who answers, in the place of an engine
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def own_tokenizer(self) -> Tokenizer | None:
        """None where nobody here knows what its tokens are."""
        return None if isinstance(self.tokenizer, _NoTokenizer) else self.tokenizer

    @property
    def known_context(self) -> int | None:
        """None where the upstream alone knows."""
        return self.context if self.context < _NO_BOUND else None

    @property
    def idle(self) -> bool:
        """Whether a request more would take nobody's place."""
        if self.upstream is not None:
            return self.upstream.idle
        return isinstance(self.engine, _Idles) and self.engine.idle

    def described(self) -> dict[str, Any]:
        """For /v1/models."""
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
        f"the tokens of '{name}' are not known here: an upstream serves it, and its configuration names no tokenizer",
        parameter="model",
        code="unsupported_parameter",
    )


class _NoEngine:
    """In an engine's place, where an upstream answers."""

    def __init__(self, name: str) -> None:
        self._name = name

    def stream(self, request: GenerationRequest) -> OutputStream:
        raise ApiError(
            f"'{self._name}' is served by an upstream, which cannot do this",
            parameter="model",
            code="unsupported_parameter",
        )

    async def stats(self) -> list[dict[str, Any]]:
        return []  # there is no replica


class _NoTokenizer(Tokenizer):
    """In a tokenizer's place, where there is none: it has nothing that a tokenizer works with, and says so when it is
    looked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python asks for these by itself, and goes on without
            raise AttributeError(attribute)
        raise no_tokens(self._name)


class Fleet:
    """All variants of a configuration. All of it belongs to one event loop."""

    def __init__(self, served: Mapping[str, ServedVariant], aliases: Mapping[str, str], default: str) -> None:
        self.served = dict(served)
        self.aliases = dict(aliases)
        self.default = default
        self._runs: dict[str, _Runs] = {}  # by the variant's name

    @classmethod
    def of(
        cls,
        config: Config,
        loading: Loading | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        early: bool = False,
    ) -> Fleet:
        """Opens the models' folders. HeadraceError for what cannot be served. `environ`: where the upstreams' keys are,
        this process's by default. `early`: the first engine begins to load at once, so that its processes do while this
        one reads tokenizers and whatever else it needs; then the fleet is to be started or abandoned."""
        made: dict[str, tuple[ServedVariant, _Runs]] = {}
        runs: list[AsyncLLM] = []
        aliases: dict[str, str] = {}
        keys = os.environ if environ is None else environ
        try:
            for name, model in config.models.items():
                aliases |= dict.fromkeys(model.aliases, name)
                for full, variant in variants_of(name, model, config.surfaces).items():
                    progress = None if loading is None else partial(loading, full)
                    engine = _engine(variant, model, config.server, progress, early=early and not runs)
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
        return fleet

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Returns when every variant can take requests; `progress` hears the name of each that is begun. For upstreams
        nobody waits: whether they can be reached is asked while the server runs."""
        for name, each in self._runs.items():
            if progress is not None:
                progress(name)
            await each.start()

    def abandon(self) -> None:
        """In the place of `close`, where it was never started."""
        for each in self._runs.values():
            each.abandon()

    async def close(self) -> None:
        """Ends all of them, also where one cannot be ended."""
        async with AsyncExitStack() as ending:
            for each in self._runs.values():
                ending.push_async_callback(each.close)

    def find(self, name: str, profile: str = "standard") -> ServedVariant:
        """By a model's name, an alias, or MODEL@VARIANT; the default for no name. A profile other than the standard one
        is the variant of that name; where there is none, the fast one is the model itself."""
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
            f"'{name}' has no variant '{profile}', which is what this profile means",
            parameter="profile",
            code="unsupported_parameter",
        )


def _engine(
    variant: Variant,
    model: ModelConfig,
    server: ServerConfig,
    progress: Callable[[int, int], None] | None,
    *,
    early: bool,
) -> AsyncLLM:
    options = msgspec.structs.asdict(variant)
    path = options.pop("model")
    waits = ClientTimeouts(patience=server.worker_s)
    return AsyncLLM(
        path,
        replicas=model.replicas,
        waits=waits,
        drain_seconds=server.drain_s,
        progress=progress,
        early=early,
        **options,
    )


def _served(name: str, model: ModelConfig, engine: AsyncLLM, config: Config) -> ServedVariant:
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
        width=folder.spec.hidden_size,
        fingerprint=fingerprint.of_model(folder, engine.variant),
        tools=tools,
        reasoning=reasoning,
        max_tokens=model.max_tokens,
        surface=model.surface,
        deadlines=_deadlines(config),
    )


def served_by(upstream: Upstream, model: ModelConfig, config: Config) -> ServedVariant:
    """A variant that an upstream answers for."""
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
