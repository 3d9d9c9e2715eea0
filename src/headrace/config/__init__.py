"""The typed configuration of a server, with every default.

Larger sections are defined in the modules of this package. loader reads headrace.toml, the environment and flags,
toml_text writes TOML, and headrace.server.config_checks checks the rules between keys. Every key has a default, so no
file is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config.adapter_section import AdapterConfig
from headrace.config.cache_section import CacheConfig, CacheMode, ExactConfig, ResultsConfig, SemanticConfig
from headrace.config.catalogue_section import CatalogueConfig
from headrace.config.collection_section import CollectionsConfig
from headrace.config.images_section import ImagesConfig
from headrace.config.lab.canary_section import CanaryConfig
from headrace.config.lab.drift_section import DriftConfig
from headrace.config.lab.recording_section import RecordingConfig
from headrace.config.lab.safety_section import SafetyConfig
from headrace.config.ledger_section import LedgerConfig, PriceConfig
from headrace.config.limit_section import LimitingConfig, LimitSet
from headrace.config.observe_section import AlertsConfig, ObserveConfig, TracesConfig
from headrace.config.pin_section import PinConfig
from headrace.config.pipeline_section import PipelineConfig
from headrace.config.routing_section import RoutingConfig
from headrace.config.shaping_section import LadderConfig, ProfilesConfig, ShapingConfig
from headrace.config.slo_section import SloConfig
from headrace.config.tenant_section import AdminConfig, BudgetConfig, CachesConfig, FastConfig, KeyConfig, TenantConfig
from headrace.config.tool_section import ToolConfig
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
from headrace.config.worker_section import AutoscaleConfig, WorkersConfig
from headrace.errors import HeadraceError
from headrace.surfaces import MOST_GATHER, SurfaceOptions
from headrace.variant import DEFAULT_MODEL, Variant

__all__ = [
    "PLAIN_SECTIONS",
    "AdapterConfig",
    "AdminConfig",
    "AlertsConfig",
    "AutoscaleConfig",
    "BudgetConfig",
    "CacheConfig",
    "CacheMode",
    "CachesConfig",
    "CanaryConfig",
    "CollectionsConfig",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "Count",
    "DriftConfig",
    "ExactConfig",
    "FastConfig",
    "Hours",
    "ImagesConfig",
    "KeyConfig",
    "LadderConfig",
    "LedgerConfig",
    "LimitSet",
    "LimitingConfig",
    "LogConfig",
    "Milliseconds",
    "ModelConfig",
    "ObserveConfig",
    "Options",
    "PinConfig",
    "PipelineConfig",
    "Port",
    "PriceConfig",
    "ProfilesConfig",
    "RecordingConfig",
    "RequestLimits",
    "ResultsConfig",
    "RoutingConfig",
    "SafetyConfig",
    "Seconds",
    "Secret",
    "Section",
    "SemanticConfig",
    "ServerConfig",
    "ShapingConfig",
    "Share",
    "SloConfig",
    "StorageConfig",
    "SurfaceConfig",
    "TenantConfig",
    "Text",
    "ToolConfig",
    "TracesConfig",
    "UpstreamConfig",
    "Weight",
    "WorkersConfig",
    "digest_of",
    "names_of",
    "upstreams_of",
    "variants_of",
]


class ServerConfig(Section, frozen=True):
    host: Text = "127.0.0.1"
    port: Port = 8000  # port to listen on; 0 picks a free one
    processes: Annotated[int, Meta(ge=1, le=64)] = 1  # processes that serve the port; see how-to/configure.md
    connections: Count = 4096  # open connections of each process at once; further ones are closed
    address_connections: Count = 2048  # of one address; raise it to `connections` behind a proxy
    address_requests_per_s: Count | None = None  # of one address, without a valid API key; default: no limit
    hosts: tuple[Text, ...] = ()  # names that requests may address; "*" allows all. See how-to/secure-a-server.md
    insecure: bool = False  # allow a public address without API keys
    body_bytes: Count = 8 * 1024 * 1024  # 8 MiB, longest request body; file uploads use storage.file_bytes
    bodies_bytes: Count = 256 * 1024 * 1024  # 256 MiB of request bodies in memory, beyond the first 64 KiB of each
    key_bodies_bytes: Count = 64 * 1024 * 1024  # 64 MiB, the same for one key, or without keys for one address
    key_body_bytes_per_s: Count = 32 * 1024 * 1024  # 32 MiB, read of one key's large bodies; the rest waits
    header_bytes: Count = 32 * 1024  # 32 KiB, longest request headers
    header_s: Seconds = 10.0  # seconds to receive the headers
    body_s: Seconds = 60.0  # seconds to receive the body
    idle_s: Seconds = 75.0  # seconds a connection may stay idle between requests
    reader_s: Seconds = 30.0  # seconds a client may leave a full send buffer unread
    worker_s: Seconds = 60.0  # seconds a request waits for an engine that is restarting
    heartbeat_s: Seconds = 3.0  # seconds an engine's process may be frozen before it is replaced
    step_s: Seconds = 60.0  # seconds one step of an engine may take before its process is replaced
    # Keep a process with its imports done for the next engine that starts: 27 MiB. "auto": if a model has `autoscale`
    spare_worker: Literal["auto", "on", "off"] = "auto"
    # Predicted seconds to the first token, of the model that answers soonest, beyond which /health/ready reports 503
    shed_ttft_s: Seconds | None = None
    drain_s: Seconds = 30.0  # seconds that running requests may take at shutdown
    strict_parameters: bool = False  # reject unknown fields of requests, which are ignored otherwise
    pull: bool = False  # download models that are not on this machine when the server starts
    docs: bool = True  # serve /docs and /openapi.json
    docs_need_key: bool = False  # for /docs and /openapi.json
    metrics_need_key: bool = False  # for /metrics; the key needs admin access
    # The dashboard at / and the playground: "local" serves them to this machine, "on" to every client. They hold no
    # data themselves
    pages: Literal["local", "on", "off"] = "local"
    internal_port: Port | None = None  # serves /metrics, /docs and /openapi.json instead of `port`
    internal_host: Text = "127.0.0.1"  # address of internal_port
    grpc_port: Port | None = None  # serves gRPC on `host`: see how-to/use-grpc.md
    cors_origins: tuple[str, ...] = ()  # that browsers may call from; "*" allows any


class ModelConfig(Section, frozen=True):
    """A model that clients may name. `options` are fields of headrace.variant.Variant."""

    path: str = ""  # folder, GGUF file, bundled or downloaded model; empty: the model's own name
    aliases: tuple[Text, ...] = ()
    # Engine processes on this machine. Default: 1, and none if there are workers
    replicas: Annotated[int, Meta(ge=1, le=64)] | None = None
    standby: Annotated[int, Meta(ge=0, le=8)] = 0  # further processes that are ready, for when a replica fails
    autoscale: AutoscaleConfig | None = None  # start and stop replicas by the load
    # Take further workers from the registry of [workers], which they announce themselves in
    discover_workers: bool = False
    workers: tuple[Text, ...] = ()  # addresses of `headrace worker` on other hosts, such as tls://10.0.0.5:9000
    # Options of the unnamed variant: weights, kv, threads, context, speculation, ...
    options: Options = msgspec.field(default_factory=dict[str, Any])
    # More variants, named MODEL@NAME, each with the options that differ
    variants: dict[str, Options] = msgspec.field(default_factory=dict[str, Options])
    tool_format: Text | None = None  # format of tool calls; default: detected from the chat template
    reasoning_format: Text | None = None
    max_tokens: Count | None = None  # output tokens when a request sets no limit
    surface: str = "chat"
    # Whether the text of a completion may hold control tokens. The text of messages, tools and sources never may.
    special_tokens: Literal["none", "completions"] = "none"
    limits: LimitSet = LimitSet()  # on all requests to this model together
    pins: tuple[PinConfig, ...] = ()  # prompts that its engines compute at the start and keep
    # LoRA adapters of its engines, named MODEL:ADAPTER
    adapters: dict[str, AdapterConfig] = msgspec.field(default_factory=dict[str, AdapterConfig])
    upstream: UpstreamConfig | None = None  # a server that answers instead of an engine
    # More upstreams, named MODEL@NAME
    upstreams: dict[str, UpstreamConfig] = msgspec.field(default_factory=dict[str, UpstreamConfig])

    def local_replicas(self, *, plain: bool = True) -> int:
        """Return how many engine processes of a variant run on this machine. `plain`: it is the one without a name,
        which the workers on other hosts serve too."""
        if self.autoscale is not None:
            return self.replicas or max(1, self.autoscale.least)
        return self.replicas or int(not ((self.workers or self.discover_workers) and plain))


class SurfaceConfig(Section, frozen=True):
    """Overrides for a surface of the engine."""

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    weight: Weight | None = None
    patience_s: Seconds | None = None
    gather_ms: Annotated[float, Meta(ge=0, le=1000 * MOST_GATHER)] | None = None  # a step may wait for more prompts
    deadline_ms: Milliseconds | None = None  # of requests that set none
    max_tokens: Count | None = None  # of answers to requests that set none, without tools and grammar
    limits: LimitSet = LimitSet()  # on all requests on this surface together
    ladder: LadderConfig = LadderConfig()


class RequestLimits(Section, frozen=True):
    """Limits on a single request."""

    values: Annotated[int, Meta(ge=4096)] = 262_144  # list items and object fields in a request body, at all levels
    fields: Count = 256  # parameters in a request body
    messages: Count = 4096
    tools: Count = 128
    choices: Count = 16  # choices per prompt, `n`
    prompts: Count = 1024  # prompts per completion request
    texts: Count = 2048  # texts to embed, rank or score
    logprobs: Annotated[int, Meta(ge=0, le=1024)] = 20
    stop: Annotated[int, Meta(ge=1, le=64)] = 16
    requests: Count = 4096  # requests running at once in this server


class StorageConfig(Section, frozen=True):
    """Storage of files, batches and stored responses."""

    folder: Text = "~/.local/share/headrace"  # folder for all durable state
    file_bytes: Count = 512 * 1024 * 1024  # 512 MiB, one uploaded file
    files_bytes: Count = 8 * 1024**3  # 8 GiB, all files; at least file_bytes
    response_hours: Hours = 720.0  # hours a stored response is kept
    conversation_hours: Hours = 720.0  # hours a conversation is kept after its last change
    background_running: Count = 64  # background responses running at once
    batch_requests: Count = 50_000  # requests per batch
    # batch requests running at once; None: 32, or what fills the variants with batch_mode = "throughput"
    batch_running: Count | None = None

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()


class LogConfig(Section, frozen=True):
    format: Literal["json", "text"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = True  # log one line per request
    file: Text | None = None  # file to log to instead of standard error
    file_bytes: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024  # 64 MiB; a full file is rotated
    keep: Annotated[int, Meta(ge=0, le=1000)] = 5  # rotated files to keep


class Config(Section, frozen=True):
    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = msgspec.field(default_factory=lambda: {DEFAULT_MODEL: ModelConfig()})
    default_model: str | None = None  # for requests that name none; default: the first model
    surfaces: dict[str, SurfaceConfig] = msgspec.field(default_factory=dict[str, SurfaceConfig])
    profiles: ProfilesConfig = msgspec.field(default_factory=ProfilesConfig)
    keys: tuple[KeyConfig, ...] = ()  # empty: no key is needed
    tenants: dict[str, TenantConfig] = msgspec.field(default_factory=dict[str, TenantConfig])
    limits: RequestLimits = RequestLimits()
    images: ImagesConfig = ImagesConfig()
    limiting: LimitingConfig = LimitingConfig()
    prices: dict[str, PriceConfig] = msgspec.field(default_factory=dict[str, PriceConfig])  # by variant or model
    ledger: LedgerConfig = LedgerConfig()
    cache: CacheConfig = CacheConfig()
    # Approved texts that answer known questions
    catalogues: dict[str, CatalogueConfig] = msgspec.field(default_factory=dict[str, CatalogueConfig])
    routing: RoutingConfig = RoutingConfig()
    shaping: ShapingConfig = ShapingConfig()
    fast: FastConfig = FastConfig()
    pipelines: dict[str, PipelineConfig] = msgspec.field(default_factory=dict[str, PipelineConfig])
    tools: dict[str, ToolConfig] = msgspec.field(default_factory=dict[str, ToolConfig])  # that pipelines may call
    admin: AdminConfig = AdminConfig()
    storage: StorageConfig = StorageConfig()
    recording: RecordingConfig = RecordingConfig()
    safety: SafetyConfig = SafetyConfig()
    collections: CollectionsConfig = CollectionsConfig()
    workers: WorkersConfig = WorkersConfig()
    log: LogConfig = LogConfig()
    observe: ObserveConfig = ObserveConfig()
    canary: CanaryConfig = CanaryConfig()
    drift: DriftConfig = DriftConfig()
    slo: dict[str, SloConfig] = msgspec.field(default_factory=dict[str, SloConfig])  # objectives, by surface


# Sections whose keys can be set by environment variables.
PLAIN_SECTIONS: Final[Mapping[str, type[Section]]] = {
    "server": ServerConfig,
    "limits": RequestLimits,
    "images": ImagesConfig,
    "limiting": LimitingConfig,
    "ledger": LedgerConfig,
    "storage": StorageConfig,
    "safety": SafetyConfig,
    "log": LogConfig,
}


class ConfigProblem(msgspec.Struct, frozen=True):
    """One mistake in a configuration."""

    source: str  # file, environment variable or "flag"
    where: str  # key path, such as models.mini.replicas; empty: the source as a whole
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.where, self.reason) if part)


class ConfigError(HeadraceError):
    """An invalid configuration, with all its mistakes. `where` is the key path of the first one."""

    def __init__(self, *mistakes: ConfigProblem | str, path: Path | None = None) -> None:
        self.mistakes = [ConfigProblem("", "", each) if isinstance(each, str) else each for each in mistakes]
        self.path = path
        self.where = self.mistakes[0].where if mistakes else ""
        super().__init__("; ".join(map(str, self.mistakes)))


def variants_of(name: str, model: ModelConfig, surfaces: Mapping[str, SurfaceConfig]) -> dict[str, Variant]:
    """Return a model's variants that run on engines, by full name: "mini", "mini@int4".

    Raise RequestError for invalid options.
    """
    changes = {surface: _in_seconds(config) for surface, config in surfaces.items()}
    named = {name: model.options} if model.upstream is None else {}
    named |= {f"{name}@{variant}": {**model.options, **options} for variant, options in model.variants.items()}
    return {full: Variant.of(model.path or name, **options, surfaces=changes) for full, options in named.items()}


def upstreams_of(name: str, model: ModelConfig) -> dict[str, UpstreamConfig]:
    """Return a model's variants that run on upstreams, by full name."""
    plain = {} if model.upstream is None else {name: model.upstream}
    return plain | {f"{name}@{variant}": upstream for variant, upstream in model.upstreams.items()}


def names_of(config: Config) -> list[str]:
    """Return the full names of all variants, in the order of the configuration."""
    names: list[str] = []
    for name, model in config.models.items():
        names += [name, *(f"{name}@{each}" for each in (*model.variants, *model.upstreams))]
    return names


def _in_seconds(surface: SurfaceConfig) -> SurfaceOptions:
    return SurfaceOptions(
        ttft=None if surface.ttft_ms is None else surface.ttft_ms / 1e3,
        itl=None if surface.itl_ms is None else surface.itl_ms / 1e3,
        weight=surface.weight,
        patience=surface.patience_s,
        gather=None if surface.gather_ms is None else surface.gather_ms / 1e3,
    )


def digest_of(key: KeyConfig, environ: Mapping[str, str]) -> str:
    """Return the SHA-256 of a key in lower-case hexadecimal, so that the key itself need not be kept.

    Raise KeyError if its environment variable is not set.
    """
    if key.key_sha256 is not None:
        return key.key_sha256.lower()
    secret = key.key if key.key_env is None else environ[key.key_env]
    return hashlib.sha256((secret or "").encode()).hexdigest()
