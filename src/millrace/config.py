"""The one typed configuration of a server: millrace.toml, the environment, flags.

Owns the shape of the configuration, with every default, and nothing else reads a file or the environment for it.
Everything has a default, so no file is needed. Reading one is `load`'s; a mistake is a ConfigError that says where in
which file, what was expected and what was found.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from millrace.models.loading import DEFAULT_MODEL

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Server(Section):
    host: str = "127.0.0.1"
    port: Port = 8000  # 0: a free one
    connections: Count = 4096  # open at once; the next ones are closed again
    body_bytes: Count = 8 * 1024 * 1024  # 8 MiB; uploads of files have storage.file_bytes
    header_bytes: Count = 32 * 1024  # 32 KiB
    header_s: Seconds = 10.0  # for a connection's first byte to the end of its headers
    body_s: Seconds = 60.0  # for the body
    idle_s: Seconds = 75.0  # between two requests
    reader_s: Seconds = 30.0  # that a client may leave a full buffer unread
    drain_s: Seconds = 30.0  # that running requests have once the server is to end
    docs: bool = True  # /docs and /openapi.json
    cors_origins: tuple[str, ...] = ()  # that browsers may call from; "*" is any


class ModelConfig(Section):
    """A model that clients may name. Beside these, `options` are an engine.variant.Variant's."""

    path: str = ""  # folder, bundled name or hub id; the model's own name by default
    aliases: tuple[str, ...] = ()
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    options: dict[str, Any] = {}  # of the variant without a name: weights, kv, threads, context, speculation, ...
    variants: dict[str, dict[str, Any]] = {}  # further ones, each named MODEL@NAME, with what differs
    tool_format: str | None = None  # found from the chat template by default
    reasoning_format: str | None = None
    max_tokens: Count | None = None  # of an answer that asks for no limit; as the context has room by default
    surface: str = "chat"


class SurfaceConfig(Section):
    """What differs from the engine's own surface of this name."""

    ttft_ms: Seconds | None = None
    itl_ms: Seconds | None = None
    weight: Seconds | None = None
    patience_s: Seconds | None = None
    deadline_ms: Seconds | None = None  # of requests that have none


class KeyConfig(Section):
    """A secret that clients send as `Authorization: Bearer ...` or `x-api-key`. Of the three one is given."""

    name: str
    key: str | None = None
    key_env: str | None = None  # the environment variable that has it
    key_sha256: str | None = None  # in hexadecimal
    tenant: str = ""  # the key's name by default
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0  # of the tenant's fair share
    surface: str | None = None  # of requests that name none


class Limits(Section):
    """Of one request."""

    messages: Count = 4096
    tools: Count = 128
    choices: Count = 16  # n
    prompts: Count = 1024  # of one completion
    texts: Count = 2048  # to embed, rank or score
    logprobs: Annotated[int, Meta(ge=0, le=1024)] = 20
    stop: Annotated[int, Meta(ge=1, le=64)] = 16
    requests: Count = 4096  # running at once, in this server


class Storage(Section):
    """Where files, batches and stored responses live."""

    folder: str = "~/.local/share/millrace"
    file_bytes: Count = 512 * 1024 * 1024  # 512 MiB of one upload
    files_bytes: Count = 8 * 1024**3  # 8 GiB of all
    response_hours: Seconds = 720.0  # that a stored response is kept
    batch_requests: Count = 50_000  # of one batch
    batch_running: Count = 32  # requests of batches that run at once


class Log(Section):
    format: Literal["json", "text"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = True  # a line for each


class Config(Section):
    server: Server = Server()
    models: dict[str, ModelConfig] = {DEFAULT_MODEL: ModelConfig()}
    default_model: str | None = None  # of requests that name none; the first of `models` by default
    surfaces: dict[str, SurfaceConfig] = {}
    keys: tuple[KeyConfig, ...] = ()  # none: everybody may call
    limits: Limits = Limits()
    storage: Storage = Storage()
    log: Log = Log()
