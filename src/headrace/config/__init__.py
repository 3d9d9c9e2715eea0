"""The one typed configuration of a server: headrace.toml, the environment, flags.

Owns the shape of the configuration, with every default, the error that says what is wrong with one, and what the
engine and the gateway are given of it. Everything has a default, so no file is needed. Sections of a part have a module
of their own beside this one. Reading a configuration is file's, what must hold between keys checks's, and writing one
down text's; nothing else reads a file or the environment for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.cache_section import CacheConfig, CacheMode, ExactConfig, SemanticConfig
from headrace.config.ledger_section import LedgerConfig, PriceConfig
from headrace.config.limit_section import LimitingConfig, LimitSet
from headrace.config.routing_section import RoutingConfig
from headrace.config.shaping_section import LadderConfig, ProfilesConfig, ShapingConfig
from headrace.config.tenant_section import AdminConfig, BudgetConfig, CachesConfig, FastConfig, KeyConfig, TenantConfig
from headrace.config.upstream_section import UpstreamConfig
from headrace.config.value_types import (
    Count,
    Hours,
    Milliseconds,
    Options,
    Port,
    Seconds,
    Secret,
    Section,
    Share,
    Text,
    Weight,
)
from headrace.errors import HeadraceError
from headrace.surfaces import SurfaceOptions
from headrace.variant import DEFAULT_MODEL, Variant

__all__ = [
    "PLAIN_SECTIONS",
    "AdminConfig",
    "BudgetConfig",
    "CacheConfig",
    "CacheMode",
    "CachesConfig",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "Count",
    "ExactConfig",
    "FastConfig",
    "Hours",
    "KeyConfig",
    "LadderConfig",
    "LedgerConfig",
    "LimitSet",
    "LimitingConfig",
    "LogConfig",
    "Milliseconds",
    "ModelConfig",
    "Options",
    "Port",
    "PriceConfig",
    "ProfilesConfig",
    "RequestLimits",
    "RoutingConfig",
    "Seconds",
    "Secret",
    "Section",
    "SemanticConfig",
    "ServerConfig",
    "ShapingConfig",
    "Share",
    "StorageConfig",
    "SurfaceConfig",
    "TenantConfig",
    "Text",
    "UpstreamConfig",
    "Weight",
    "digest_of",
    "names_of",
    "upstreams_of",
    "variants_of",
]


class ServerConfig(Section, frozen=True):
    host: Text = "127.0.0.1"
    port: Port = 8000  # 0: a free one
    connections: Count = 4096  # open at once; the next ones are closed again
    body_bytes: Count = 8 * 1024 * 1024  # 8 MiB; uploads of files have storage.file_bytes
    header_bytes: Count = 32 * 1024  # 32 KiB
    header_s: Seconds = 10.0  # for a connection's first byte to the end of its headers
    body_s: Seconds = 60.0  # for the body
    idle_s: Seconds = 75.0  # between two requests
    reader_s: Seconds = 30.0  # that a client may leave a full buffer unread
    worker_s: Seconds = 60.0  # that a request waits for an engine whose processes are gone
    drain_s: Seconds = 30.0  # that running requests have once the server is to end
    docs: bool = True  # /docs and /openapi.json
    cors_origins: tuple[str, ...] = ()  # that browsers may call from; "*" is any


class ModelConfig(Section, frozen=True):
    """A model that clients may name. Beside these, `options` are an engine.variant.Variant's."""

    path: str = ""  # folder, bundled name or hub id; the model's own name by default
    aliases: tuple[Text, ...] = ()
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    # Of the variant without a name: weights, kv, threads, context, speculation, ...
    options: Options = msgspec.field(default_factory=dict[str, Any])
    # Further ones, each named MODEL@NAME, with what differs
    variants: dict[str, Options] = msgspec.field(default_factory=dict[str, Options])
    tool_format: Text | None = None  # found from the chat template by default
    reasoning_format: Text | None = None
    max_tokens: Count | None = None  # of an answer that asks for no limit; as the context has room by default
    surface: str = "chat"
    limits: LimitSet = LimitSet()  # of all requests to it together
    upstream: UpstreamConfig | None = None  # a server that answers in the place of an engine of ours
    # Such variants, each named MODEL@NAME
    upstreams: dict[str, UpstreamConfig] = msgspec.field(default_factory=dict[str, UpstreamConfig])


class SurfaceConfig(Section, frozen=True):
    """What differs from the engine's own surface of this name."""

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    weight: Weight | None = None
    patience_s: Seconds | None = None
    deadline_ms: Milliseconds | None = None  # of requests that have none
    limits: LimitSet = LimitSet()  # of all requests on it together
    ladder: LadderConfig = LadderConfig()


class RequestLimits(Section, frozen=True):
    """Of one request."""

    messages: Count = 4096
    tools: Count = 128
    choices: Count = 16  # n
    prompts: Count = 1024  # of one completion
    texts: Count = 2048  # to embed, rank or score
    logprobs: Annotated[int, Meta(ge=0, le=1024)] = 20
    stop: Annotated[int, Meta(ge=1, le=64)] = 16
    requests: Count = 4096  # running at once, in this server


class StorageConfig(Section, frozen=True):
    """Where files, batches and stored responses live."""

    folder: Text = "~/.local/share/headrace"  # `path` is where that is
    file_bytes: Count = 512 * 1024 * 1024  # 512 MiB of one upload
    files_bytes: Count = 8 * 1024**3  # 8 GiB of all
    response_hours: Hours = 720.0  # that a stored response is kept
    batch_requests: Count = 50_000  # of one batch
    batch_running: Count = 32  # requests of batches that run at once

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()


class LogConfig(Section, frozen=True):
    format: Literal["json", "text"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = True  # a line for each


class Config(Section, frozen=True):
    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = msgspec.field(default_factory=lambda: {DEFAULT_MODEL: ModelConfig()})
    default_model: str | None = None  # of requests that name none; the first of `models` by default
    surfaces: dict[str, SurfaceConfig] = msgspec.field(default_factory=dict[str, SurfaceConfig])
    profiles: ProfilesConfig = msgspec.field(default_factory=ProfilesConfig)
    keys: tuple[KeyConfig, ...] = ()  # none: everybody may call
    tenants: dict[str, TenantConfig] = msgspec.field(default_factory=dict[str, TenantConfig])
    limits: RequestLimits = RequestLimits()
    limiting: LimitingConfig = LimitingConfig()
    prices: dict[str, PriceConfig] = msgspec.field(default_factory=dict[str, PriceConfig])  # by variant or model
    ledger: LedgerConfig = LedgerConfig()
    cache: CacheConfig = CacheConfig()
    routing: RoutingConfig = RoutingConfig()
    shaping: ShapingConfig = ShapingConfig()
    fast: FastConfig = FastConfig()
    admin: AdminConfig = AdminConfig()
    storage: StorageConfig = StorageConfig()
    log: LogConfig = LogConfig()


# The sections whose keys the environment can set.
PLAIN_SECTIONS: Final[Mapping[str, type[Section]]] = {
    "server": ServerConfig,
    "limits": RequestLimits,
    "limiting": LimitingConfig,
    "ledger": LedgerConfig,
    "storage": StorageConfig,
    "log": LogConfig,
}


class ConfigProblem(msgspec.Struct, frozen=True):
    """One thing that is wrong: in which file or variable, at which key, and what."""

    source: str
    where: str  # a key by its path, such as models.mini.replicas; empty: the source as a whole
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.where, self.reason) if part)


class ConfigError(HeadraceError):
    """A configuration that cannot be used; `where` is the first mistake's. A mistake without a place may be a text."""

    def __init__(self, *mistakes: ConfigProblem | str, path: Path | None = None) -> None:
        self.mistakes = [ConfigProblem("", "", each) if isinstance(each, str) else each for each in mistakes]
        self.path = path
        self.where = self.mistakes[0].where if mistakes else ""
        super().__init__("; ".join(map(str, self.mistakes)))


def variants_of(name: str, model: ModelConfig, surfaces: Mapping[str, SurfaceConfig]) -> dict[str, Variant]:
    """What engines are to serve of a model, by the names that clients may give: "mini", "mini@int4".

    RequestError for options that are none.
    """
    changes = {surface: _in_seconds(config) for surface, config in surfaces.items()}
    named = {name: model.options} if model.upstream is None else {}
    named |= {f"{name}@{variant}": {**model.options, **options} for variant, options in model.variants.items()}
    return {full: Variant.of(model.path or name, **options, surfaces=changes) for full, options in named.items()}


def upstreams_of(name: str, model: ModelConfig) -> dict[str, UpstreamConfig]:
    """The variants of a model that other servers answer for, by the names that clients may give."""
    plain = {} if model.upstream is None else {name: model.upstream}
    return plain | {f"{name}@{variant}": upstream for variant, upstream in model.upstreams.items()}


def names_of(config: Config) -> list[str]:
    """All variants by their full names, in the order in which they are declared."""
    found: list[str] = []
    for name, model in config.models.items():
        found += [name, *(f"{name}@{each}" for each in (*model.variants, *model.upstreams))]
    return found


def _in_seconds(surface: SurfaceConfig) -> SurfaceOptions:
    return SurfaceOptions(
        ttft=None if surface.ttft_ms is None else surface.ttft_ms / 1e3,
        itl=None if surface.itl_ms is None else surface.itl_ms / 1e3,
        weight=surface.weight,
        patience=surface.patience_s,
    )


def digest_of(key: KeyConfig, environ: Mapping[str, str]) -> str:
    """The SHA-256 of a key's secret, in small hexadecimal digits: nothing needs to keep the secret itself.

    KeyError where the variable that has it is not set.
    """
    if key.key_sha256 is not None:
        return key.key_sha256.lower()
    secret = key.key if key.key_env is None else environ[key.key_env]
    return hashlib.sha256((secret or "").encode()).hexdigest()
