"""The models that a server serves: each variant with its engine's processes, its tokenizer, and how it speaks.

Owns Served (one variant, ready for requests) and Fleet (all of them, by the names that clients may use). Starting and
watching processes is the engine's; this only says which there are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

import msgspec

from millrace.config import Config, ModelConfig, Server, variants_of
from millrace.engine.client import Waits
from millrace.engine.request import Request
from millrace.engine.stream import Stream
from millrace.engine.variant import Variant
from millrace.gateway.errors import ApiError
from millrace.gateway.reasoning import ReasoningFormat, reasoning_format_named, reasoning_format_of
from millrace.gateway.tool_formats import ToolFormat, tool_format_named, tool_format_of
from millrace.llm import AsyncLLM
from millrace.models.loading import find_model, open_model
from millrace.models.tokenizer import Tokenizer

# Hears, while weights are packed, of which variant how many bytes are, and of how many.
Loading = Callable[[str, int, int], None]


class Engine(Protocol):
    """What makes outputs of requests: a client of worker processes, or, in tests and benchmarks, something simpler."""

    def stream(self, request: Request) -> Stream: ...

    async def stats(self) -> list[dict[str, Any]]: ...


@dataclass(slots=True, kw_only=True)
class Served:
    """One variant."""

    name: str  # as clients may name it: `mini`, `mini@int4`
    engine: Engine
    tokenizer: Tokenizer
    context: int  # tokens, prompt and answer together
    kind: str = "decoder"
    width: int = 0  # of an embedding
    fingerprint: str = ""  # changes with the weights' precision and with the files
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    max_tokens: int | None = None  # of an answer that asks for no limit
    surface: str = "chat"
    deadlines: Mapping[str, float] = field(default_factory=dict[str, float])  # seconds, by surface
    created: int = field(default_factory=lambda: int(time.time()))


class Fleet:
    """All variants of a configuration. All of it belongs to one event loop."""

    def __init__(self, served: Mapping[str, Served], aliases: Mapping[str, str], default: str) -> None:
        self.served = dict(served)
        self.aliases = dict(aliases)
        self.default = default
        self._engines: list[AsyncLLM] = []

    @classmethod
    def of(cls, config: Config, loading: Loading | None = None) -> Fleet:
        """Opens the models' folders; nothing runs yet. ModelError or RequestError for what cannot be served."""
        served: dict[str, Served] = {}
        aliases: dict[str, str] = {}
        engines: list[AsyncLLM] = []
        for name, model in config.models.items():
            for alias in model.aliases:
                aliases[alias] = name
            for full, variant in variants_of(name, model, config.surfaces).items():
                progress = None if loading is None else partial(loading, full)
                engine = _engine(variant, model, config.server, progress)
                engines.append(engine)
                served[full] = _served(full, model, engine, config)
        fleet = cls(served, aliases, config.default_model or next(iter(config.models)))
        fleet._engines = engines
        return fleet

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Returns when every variant can take requests; `progress` hears the name of each that is begun."""
        for name, engine in zip(self.served, self._engines, strict=True):
            if progress is not None:
                progress(name)
            await engine.start()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()

    def find(self, name: str, profile: str = "standard") -> Served:
        """By a model's name, an alias, or MODEL@VARIANT; the default for no name. A profile other than the standard one
        is the variant of that name."""
        wanted = name or self.default
        base, at, variant = wanted.partition("@")
        if profile != "standard" and not at:
            found = self.served.get(f"{self.aliases.get(base, base)}@{profile}")
            if found is not None or self.aliases.get(base, base) in self.served:
                return found or self._no_profile(wanted, profile)
        found = self.served.get(self.aliases.get(base, base) + at + variant)
        if found is None:
            there = ", ".join(sorted(self.served))
            raise ApiError(
                f"there is no model '{wanted[:200]}'; there are: {there}",
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
    variant: Variant, model: ModelConfig, server: Server, progress: Callable[[int, int], None] | None
) -> AsyncLLM:
    options = msgspec.structs.asdict(variant)
    path = options.pop("model")
    waits = Waits(patience=server.worker_s)
    return AsyncLLM(
        path, replicas=model.replicas, waits=waits, drain_seconds=server.drain_s, progress=progress, **options
    )


def _served(name: str, model: ModelConfig, engine: AsyncLLM, config: Config) -> Served:
    folder = open_model(find_model(engine.variant.model))
    tokenizer = engine.tokenizer
    template = None if tokenizer.tool_template is None else tokenizer.tool_template.source
    tools = (
        tool_format_named(model.tool_format, tokenizer) if model.tool_format else tool_format_of(template, tokenizer)
    )
    reasoning = (
        reasoning_format_named(model.reasoning_format, tokenizer)
        if model.reasoning_format
        else reasoning_format_of(template, tokenizer)
    )
    digest = hashlib.sha256(f"{folder.path.name}/{engine.variant.name}".encode()).hexdigest()[:10]
    return Served(
        name=name,
        engine=engine.client,
        tokenizer=tokenizer,
        context=engine.context,
        kind=folder.spec.kind,
        width=folder.spec.hidden_size,
        fingerprint=f"fp_{digest}",
        tools=tools,
        reasoning=reasoning,
        max_tokens=model.max_tokens,
        surface=model.surface,
        deadlines={
            surface: each.deadline_ms / 1000.0
            for surface, each in config.surfaces.items()
            if each.deadline_ms is not None
        },
    )
