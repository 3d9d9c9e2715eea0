"""What a configuration says of an upstream: where it is, what it takes, how long what may take, and how often again.

Owns the shapes with their defaults, and what the kinds of servers take. Opens nothing and reads no environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headrace.config.breaker_section import UpstreamBreakerConfig
from headrace.config.value_types import Count, Finding, Seconds, Secret, Section, Share, Text

# Header values may be secrets too.
Headers = Annotated[dict[str, str], Meta(extra={"secret": True})]

UpstreamKind = Literal["compatible", "openai", "vllm", "sglang", "llama.cpp", "tgi", "headrace"]
GrammarName = Literal["json_object", "json_schema", "regex", "choice", "lark"]
ThinkingParameter = Literal["none", "template", "effort"]


class UpstreamFeatures(Section, frozen=True):
    """What the server takes. What is not said here is as its kind has it."""

    chat: bool | None = None  # /chat/completions
    completions: bool | None = None  # /completions
    embeddings: bool | None = None  # /embeddings
    stream: bool | None = None  # answers as server-sent events
    stream_options: bool | None = None  # include_usage
    n: bool | None = None  # several answers, and several prompts, in one request
    logprobs: bool | None = None
    echo: bool | None = None  # with the log-probabilities of the prompt
    tools: bool | None = None
    parallel_tool_calls: bool | None = None  # the parameter
    grammars: tuple[GrammarName, ...] | None = None  # what an answer can be held to
    seed: bool | None = None
    top_k: bool | None = None
    min_p: bool | None = None
    repetition_penalty: bool | None = None
    penalties: bool | None = None  # frequency_penalty and presence_penalty
    logit_bias: bool | None = None
    min_tokens: bool | None = None
    stops: Annotated[int, Meta(ge=0, le=64)] | None = None  # most texts in `stop`
    stop_token_ids: bool | None = None
    ignore_eos: bool | None = None
    token_prompts: bool | None = None  # prompts as token ids
    template: bool | None = None  # chat_template_kwargs
    thinking: ThinkingParameter | None = None  # by which parameter it is told to reason first, or not to
    reasoning: bool | None = None  # the reasoning of earlier answers, in the messages
    user: bool | None = None  # whom a request is for, as `user`; otherwise it stays here
    salt: bool | None = None  # cache_salt, by which tenants share no cached prefix
    bypass: bool | None = None  # a request can have its prompt computed anew: `cache` off
    priority: bool | None = None
    max_completion_tokens: bool | None = None  # by this name in a chat, rather than max_tokens
    defaults: bool | None = None  # sampling has defaults of the server's own, so that every setting is to be sent


_COMPATIBLE: Final = UpstreamFeatures(
    chat=True,
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
        bypass=True,  # by a salt that nobody else has
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
# Where such a server says that it is well.
HEALTH: Final[Mapping[str, str]] = {
    "vllm": "/health",
    "sglang": "/health",
    "llama.cpp": "/health",
    "tgi": "/health",
    "headrace": "/health/ready",
}


class UpstreamTimeouts(Section, frozen=True):
    connect_s: Seconds = 5.0  # name, connection and TLS
    first_s: Seconds = 60.0  # from the request to the first output; with an answer that is not streamed, not held
    chunk_s: Seconds = 20.0  # between two events, and two parts of an answer that is not streamed
    usage_s: Seconds = 2.0  # from the last output to the usage and the end, which the answer can do without
    total_s: Seconds = 600.0  # from the request's arrival, waits and further attempts included


class UpstreamRetries(Section, frozen=True):
    """Attempts after the first. None once something of the answer has reached the client."""

    most: Annotated[int, Meta(ge=0, le=10)] = 2  # of one request
    share: Share = 0.1  # of all requests: at most so many attempts more
    reserve: Annotated[int, Meta(ge=0)] = 5  # that there may be beyond the share, so that the first failures have some
    base_s: Seconds = 0.1  # the first wait is up to so long, and each next one up to twice as long
    longest_s: Seconds = 5.0  # of one wait; an upstream that asks for a longer one is not asked again
    after_s: Seconds = 60.0  # most of an upstream's Retry-After that clients are told


class UpstreamHealthConfig(Section, frozen=True):
    path: str | None = None  # asked with GET; as its kind has it by default; "" asks nothing
    interval_s: Seconds = 10.0
    timeout_s: Seconds = 5.0
    failures: Count = 2  # in a row, after which nothing more is sent until one succeeds


class UpstreamConfig(Section, frozen=True):
    """An OpenAI-compatible server that answers in a variant's place."""

    url: Text  # up to what stands before /chat/completions: "http://10.0.0.5:8000/v1"
    kind: UpstreamKind = "compatible"  # of server: what it takes beyond what all have in common
    model: str = ""  # its name there; the model's own by default
    key_env: Text | None = None  # the environment variable that has the key
    key: Secret | None = None  # or the key itself
    key_header: Text = "authorization"  # that carries it; in this one after `Bearer `
    headers: Headers = msgspec.field(default_factory=dict[str, str])  # further ones
    takes: UpstreamFeatures = UpstreamFeatures()
    context: Count | None = None  # tokens, prompt and answer together, where a prompt is to be refused here already
    tokenizer: str = ""  # model folder, bundled name or hub id to count tokens with; estimated without
    connections: Count = 256  # requests that run there at once
    queue: Annotated[int, Meta(ge=0)] = 256  # that wait here for one of them
    queue_s: Seconds = 10.0  # that one waits at most
    buffer_bytes: Annotated[int, Meta(ge=1024)] = 256 * 1024  # 256 KiB read ahead of a client that is slower
    event_bytes: Annotated[int, Meta(ge=1024)] = 1024 * 1024  # 1 MiB, the longest event
    answer_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024 * 1024  # 32 MiB, the longest answer that is not streamed
    idle_s: Seconds = 4.0  # that a connection is kept between two requests; most servers close it after 5
    ca_file: str = ""  # certificates that the server's is checked against; the system's by default
    proxy_env: bool = False  # through the proxy that the environment names (HTTPS_PROXY, NO_PROXY)
    timeouts: UpstreamTimeouts = UpstreamTimeouts()
    retries: UpstreamRetries = UpstreamRetries()
    breaker: UpstreamBreakerConfig = UpstreamBreakerConfig()
    health: UpstreamHealthConfig = UpstreamHealthConfig()


def features_of(config: UpstreamConfig) -> UpstreamFeatures:
    """What the server takes, with nothing left open."""
    said = {name: value for name, value in msgspec.structs.asdict(config.takes).items() if value is not None}
    return msgspec.structs.replace(KINDS[config.kind], **said)


def health_path(config: UpstreamConfig) -> str:
    """Empty where nothing is asked."""
    path = config.health.path
    return HEALTH.get(config.kind, "") if path is None else path


_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e\t]*")
_OURS: Final = ("content-length", "content-type", "transfer-encoding", "host", "connection", "accept-encoding")


def check_upstream(config: UpstreamConfig, environ: Mapping[str, str], where: str) -> Iterator[Finding]:
    """What is wrong beyond types and ranges: a key by its path, and what it is. No secret is in the words."""
    try:
        parts = urlsplit(config.url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, fine = urlsplit(""), False
    if not fine or parts.query or parts.fragment:
        yield f"{where}.url", "expected http:// or https:// with a host, without a query"
    elif parts.username is not None or parts.password is not None:
        yield f"{where}.url", "expected no user and no password in it; use key_env or headers"
    if config.key is not None and config.key_env is not None:
        yield where, "expected one of key and key_env, found both"
    elif config.key_env is not None and not environ.get(config.key_env):
        yield f"{where}.key_env", f"the environment variable {config.key_env} is not set, or empty"
    elif config.key_env is not None and not _VALUE.fullmatch(environ[config.key_env]):
        yield f"{where}.key_env", f"expected ASCII characters without line breaks in {config.key_env}"
    elif config.key is not None and not _VALUE.fullmatch(config.key):
        yield f"{where}.key", "expected ASCII characters without line breaks"
    for name, value in {**config.headers, config.key_header: ""}.items():
        here = f"{where}.key_header" if name == config.key_header else f"{where}.headers"
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            yield here, "expected names and values that an HTTP header can have"
        elif name.lower() in _OURS:
            yield here, f"{name.lower()} follows from the request"
    yield from config.breaker.findings(f"{where}.breaker")
    takes = features_of(config)
    if not (takes.chat or takes.completions or takes.embeddings):
        yield f"{where}.takes", "expected one at least of chat, completions and embeddings"
    path = health_path(config)
    if path and not path.startswith("/"):
        yield f"{where}.health.path", "expected a path that begins with /"
