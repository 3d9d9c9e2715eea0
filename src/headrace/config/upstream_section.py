"""Configuration of upstreams: address, supported features, timeouts, retries, circuit breaker and health checks.

Also defines which features each kind of server supports. Opens no connections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headrace.config.breaker_section import UpstreamBreakerConfig
from headrace.config.managed_section import ManagedConfig, check_managed
from headrace.config.value_types import Count, Finding, Seconds, Secret, Section, Share, Text

# Header values may be secrets too.
Headers = Annotated[dict[str, str], Meta(extra={"secret": True})]

UpstreamKind = Literal["compatible", "openai", "vllm", "sglang", "llama.cpp", "openvino", "tgi", "headrace"]
GrammarName = Literal["json_object", "json_schema", "regex", "choice", "lark"]
ThinkingParameter = Literal["none", "template", "effort"]


class UpstreamFeatures(Section, frozen=True):
    """Features the server supports. A feature that is not set is as the server's kind has it."""

    chat: bool | None = None  # /chat/completions
    images: bool | None = None  # image_url parts of messages, which are sent as they came
    completions: bool | None = None  # /completions
    embeddings: bool | None = None  # /embeddings
    stream: bool | None = None  # streaming with server-sent events
    stream_options: bool | None = None  # include_usage
    n: bool | None = None  # several choices, and several prompts, in one request
    logprobs: bool | None = None
    echo: bool | None = None  # with the log-probabilities of the prompt
    tools: bool | None = None
    parallel_tool_calls: bool | None = None  # the parameter
    grammars: tuple[GrammarName, ...] | None = None  # supported kinds of constrained decoding
    seed: bool | None = None
    top_k: bool | None = None
    min_p: bool | None = None
    repetition_penalty: bool | None = None
    penalties: bool | None = None  # frequency_penalty and presence_penalty
    logit_bias: bool | None = None
    min_tokens: bool | None = None
    stops: Annotated[int, Meta(ge=0, le=64)] | None = None  # most strings in `stop`
    stop_token_ids: bool | None = None
    ignore_eos: bool | None = None
    token_prompts: bool | None = None  # prompts as token ids
    template: bool | None = None  # chat_template_kwargs
    thinking: ThinkingParameter | None = None  # the parameter that turns reasoning on or off
    reasoning: bool | None = None  # reasoning of earlier turns in the messages
    user: bool | None = None  # forward the parameter `user`
    salt: bool | None = None  # cache_salt, which keeps prefix caches of tenants apart
    bypass: bool | None = None  # a request can skip the prefix cache
    priority: bool | None = None
    max_completion_tokens: bool | None = None  # use this name in chats instead of max_tokens
    defaults: bool | None = None  # the server has its own sampling defaults, so every setting must be sent


_COMPATIBLE: Final = UpstreamFeatures(
    chat=True,
    images=True,
    completions=False,
    embeddings=False,
    stream=True,
    stream_options=True,
    n=True,
    logprobs=True,
    echo=False,
    tools=True,
    parallel_tool_calls=True,
    grammars=("json_object", "json_schema"),
    seed=True,
    top_k=False,
    min_p=False,
    repetition_penalty=False,
    penalties=True,
    logit_bias=True,
    min_tokens=False,
    stops=4,
    stop_token_ids=False,
    ignore_eos=False,
    token_prompts=False,
    template=False,
    thinking="none",
    reasoning=False,
    user=False,
    salt=False,
    bypass=False,
    priority=False,
    max_completion_tokens=False,
    defaults=False,
)
_OPEN: Final = msgspec.structs.replace(
    _COMPATIBLE,
    completions=True,
    embeddings=True,
    top_k=True,
    min_p=True,
    repetition_penalty=True,
    stops=16,
    ignore_eos=True,
    token_prompts=True,
    template=True,
    thinking="template",
    reasoning=True,
    defaults=True,
)
KINDS: Final[Mapping[str, UpstreamFeatures]] = {
    "compatible": _COMPATIBLE,
    "openai": msgspec.structs.replace(
        _COMPATIBLE, embeddings=True, thinking="effort", max_completion_tokens=True, user=True
    ),
    "vllm": msgspec.structs.replace(
        _OPEN,
        echo=True,
        grammars=("json_object", "json_schema", "regex", "choice", "lark"),
        min_tokens=True,
        stop_token_ids=True,
        salt=True,
        bypass=True,  # with a unique salt
    ),
    "sglang": msgspec.structs.replace(
        _OPEN,
        echo=True,
        grammars=("json_object", "json_schema", "regex"),
        min_tokens=True,
        stop_token_ids=True,
        salt=True,
        bypass=True,
    ),
    "llama.cpp": msgspec.structs.replace(_OPEN, n=False, bypass=True),
    "openvino": msgspec.structs.replace(  # the server that comes with Headrace
        _OPEN,
        images=False,
        embeddings=False,
        n=False,
        logprobs=False,
        tools=False,
        parallel_tool_calls=False,
        logit_bias=False,
        min_tokens=True,
        stop_token_ids=True,
    ),
    "tgi": msgspec.structs.replace(
        _COMPATIBLE, completions=True, n=False, parallel_tool_calls=False, grammars=(), logit_bias=False
    ),
    "headrace": msgspec.structs.replace(
        _OPEN,
        echo=True,
        grammars=("json_object", "json_schema", "regex", "choice", "lark"),
        min_tokens=True,
        stop_token_ids=True,
        bypass=True,
        priority=True,
        max_completion_tokens=True,
        defaults=False,
    ),
}
# Default path of the health check by kind.
HEALTH: Final[Mapping[str, str]] = {
    "vllm": "/health",
    "sglang": "/health",
    "llama.cpp": "/health",
    "openvino": "/health",
    "tgi": "/health",
    "headrace": "/health/ready",
}


class UpstreamTimeouts(Section, frozen=True):
    connect_s: Seconds = 5.0  # DNS, connection and TLS
    first_s: Seconds = 60.0  # to the first output; not applied to responses that are not streamed
    chunk_s: Seconds = 20.0  # between two events, or two chunks of a response that is not streamed
    usage_s: Seconds = 2.0  # from the last output to usage and end, which are optional
    total_s: Seconds = 600.0  # from the request's arrival, including queueing and retries


class UpstreamRetries(Section, frozen=True):
    """Retries. A request is not retried once output has reached the client."""

    most: Annotated[int, Meta(ge=0, le=10)] = 2  # per request
    share: Share = 0.1  # retry budget as a share of all requests
    reserve: Annotated[int, Meta(ge=0)] = 5  # retries allowed beyond the share, so that the first failures can retry
    base_s: Seconds = 0.1  # first backoff, at most; doubles with each retry
    longest_s: Seconds = 5.0  # one backoff, at most; no retry if Retry-After asks for more
    after_s: Seconds = 60.0  # of the upstream's Retry-After passed on to clients, at most


class UpstreamHealthConfig(Section, frozen=True):
    path: str | None = None  # requested with GET; None: the default of the kind; "" disables the check
    interval_s: Seconds = 10.0
    timeout_s: Seconds = 5.0
    failures: Count = 2  # in a row, after which the upstream gets no requests until a check succeeds


class UpstreamConfig(Section, frozen=True):
    """An OpenAI-compatible server that serves a variant."""

    url: Text | None = None  # base URL without /chat/completions: "http://10.0.0.5:8000/v1"
    kind: UpstreamKind = "compatible"  # sets the default features
    model: str = ""  # the model's name on that server; empty: the same name
    key_env: Text | None = None  # environment variable with the API key
    key: Secret | None = None  # or the API key itself
    key_header: Text = "authorization"  # `authorization` sends `Bearer KEY`
    headers: Headers = msgspec.field(default_factory=dict[str, str])  # extra headers of every request
    takes: UpstreamFeatures = UpstreamFeatures()
    context: Count | None = None  # tokens, prompt and output; longer prompts are rejected before they are sent
    tokenizer: str = ""  # folder, GGUF file, bundled or downloaded model to count tokens with; empty: estimate
    connections: Count = 256  # requests in flight at once
    queue: Annotated[int, Meta(ge=0)] = 256  # requests that may wait for a connection
    queue_s: Seconds = 10.0  # longest wait for a connection
    buffer_bytes: Annotated[int, Meta(ge=1024)] = 256 * 1024  # 256 KiB read ahead of a slow client
    event_bytes: Annotated[int, Meta(ge=1024)] = 1024 * 1024  # 1 MiB, longest event
    answer_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024 * 1024  # 32 MiB, longest response that is not streamed
    idle_s: Seconds = 4.0  # an idle connection is kept open; most servers close it after 5
    ca_file: str = ""  # CA certificates for TLS; empty: the system's
    proxy_env: bool = False  # use the proxy from the environment (HTTPS_PROXY, NO_PROXY)
    timeouts: UpstreamTimeouts = UpstreamTimeouts()
    retries: UpstreamRetries = UpstreamRetries()
    breaker: UpstreamBreakerConfig = UpstreamBreakerConfig()
    health: UpstreamHealthConfig = UpstreamHealthConfig()
    # Between readings of GET /v1/capacity, if kind is headrace; 0: never
    capacity_s: Annotated[float, Meta(ge=0, le=4)] = 1.0
    managed: ManagedConfig | None = None  # Headrace starts and supervises the server


def features_of(config: UpstreamConfig) -> UpstreamFeatures:
    """Return the supported features, with defaults of the kind filled in."""
    configured = {name: value for name, value in msgspec.structs.asdict(config.takes).items() if value is not None}
    # A vLLM that others run rejects priorities unless it was started with its priority scheduler, as a managed one is.
    ours = {"priority": True} if config.kind == "vllm" and config.managed is not None else {}
    return msgspec.structs.replace(KINDS[config.kind], **(ours | configured))


def health_path(config: UpstreamConfig) -> str:
    """Return the path of the health check; empty: no check."""
    path = config.health.path
    return HEALTH.get(config.kind, "") if path is None else path


_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e\t]*")
_RESERVED_HEADERS: Final = (
    "content-length",
    "content-type",
    "transfer-encoding",
    "host",
    "connection",
    "accept-encoding",
)


def check_upstream(
    config: UpstreamConfig, environ: Mapping[str, str], where: str, *, processes: int = 1
) -> Iterator[Finding]:
    """Check what types and ranges cannot express. `where`: the table's path; `processes`: of the server. Findings never
    contain a secret."""
    yield from check_managed(config.managed, config.kind, config.url, processes, where)
    try:
        parts = urlsplit(config.url or "")
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, is_valid = urlsplit(""), False
    if config.url is None:
        if config.managed is None:
            yield where, "missing required key url (or the table managed, for an engine that Headrace starts)"
    elif not is_valid or parts.query or parts.fragment:
        yield f"{where}.url", "expected an http:// or https:// URL with a host and without a query"
    elif parts.username is not None or parts.password is not None:
        yield f"{where}.url", "expected a URL without user and password; use key_env or headers"
    if config.key is not None and config.key_env is not None:
        yield where, "expected key or key_env, found both"
    elif config.key_env is not None and not environ.get(config.key_env):
        yield f"{where}.key_env", f"the environment variable {config.key_env} is not set or empty"
    elif config.key_env is not None and not _VALUE.fullmatch(environ[config.key_env]):
        yield f"{where}.key_env", f"expected ASCII characters without line breaks in {config.key_env}"
    elif config.key is not None and not _VALUE.fullmatch(config.key):
        yield f"{where}.key", "expected ASCII characters without line breaks"
    for name, value in {**config.headers, config.key_header: ""}.items():
        here = f"{where}.key_header" if name == config.key_header else f"{where}.headers"
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            yield here, "expected a valid HTTP header name and value"
        elif name.lower() in _RESERVED_HEADERS:
            yield here, f"{name.lower()} is set by the server; remove it"
    yield from config.breaker.check(f"{where}.breaker")
    takes = features_of(config)
    if not (takes.chat or takes.completions or takes.embeddings):
        yield f"{where}.takes", "expected at least one of chat, completions and embeddings"
    path = health_path(config)
    if path and not path.startswith("/"):
        yield f"{where}.health.path", "expected a path that starts with /"
