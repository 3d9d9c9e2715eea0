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
from headrace.gateway.upstreams.upstream import Upstream
from headrace.llm import AsyncLLM
from headrace.models.model_folder import find_model, open_model
from headrace.models.text.tokenizer import Tokenizer
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


class _Runs(Protocol):
    """An engine's processes, or an upstream."""

    async def start(self) -> None: ...

    def abandon(self) -> None: ...

    async def close(self) -> None: ...


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
    upstream: Upstream | None = None  # serves it in place of an engine
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def own_tokenizer(self) -> Tokenizer | None:
        """None if its tokens are unknown here."""
        return None if isinstance(self.tokenizer, _NoTokenizer) else self.tokenizer

    @property
    def known_context(self) -> int | None:
        """None if only the upstream knows it."""
        return self.context if self.context < _NO_BOUND else None

    @property
    def idle(self) -> bool:
        """Whether one more request would not delay any other."""
        if self.upstream is not None:
            return self.upstream.idle
        return isinstance(self.engine, _Idles) and self.engine.idle

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
        """Open the models' folders. HeadraceError for a model that cannot be served. `environ` has the upstreams' keys,
        by default this process's environment. `early`: start to load the first engine at once, while this process reads
        tokenizers; then call `start` or `abandon`."""
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

    async def close(self) -> None:
        """Close all engines and upstreams, even if closing one fails."""
        async with AsyncExitStack() as ending:
            for each in self._runs.values():
                ending.push_async_callback(each.close)

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
