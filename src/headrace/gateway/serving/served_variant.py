"""ServedVariant: one way to serve a model, with its engine or upstream, tokenizer and output formats.

Knows no configuration: variant_engines builds it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, runtime_checkable

import msgspec

from headrace.engine.interface.request import AdapterRef, GenerationRequest
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.api_errors import ApiError
from headrace.gateway.images.image_reader import ImageReader
from headrace.gateway.images.message_images import images_of
from headrace.gateway.output.reasoning import ReasoningFormat
from headrace.gateway.output.tool_formats import ToolFormat
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.upstreams.upstream import Upstream
from headrace.models.sentence_files import Prompts
from headrace.models.spec import RankingSpec
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.user_text import UserText

NO_BOUND: Final = 2**31 - 1  # tokens, if only the upstream knows its context


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
    images: ImageReader | None = None  # None: it reads text only, or the upstream reads them
    no_images: str = ""  # why it reads none, where its files have an image part
    prompts: Prompts = Prompts()  # texts that an embedder puts before its input
    special_tokens: bool = False  # whether a prompt of a completion may hold control tokens
    upstream: Upstream | None = None  # serves it in place of an engine
    description: ModelDescription | None = None  # None: only the upstream knows
    adapter: AdapterRef | None = None  # that its requests are computed with
    base: str = ""  # of an adapter: the variant that it belongs to
    tenants: tuple[str, ...] = ()  # of an adapter: those that may use it; empty: all
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def variant(self) -> str:
        """The name of the variant that computes: without its adapter."""
        return self.base or self.name

    @property
    def own_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if this server does not have it."""
        return None if isinstance(self.tokenizer, NoTokenizer) else self.tokenizer

    @property
    def reads_images(self) -> bool:
        return self.images is not None or (self.upstream is not None and bool(self.upstream.takes.images))

    @property
    def takes_tools(self) -> bool:
        return self.tools is not None or (self.upstream is not None and bool(self.upstream.takes.tools))

    def why_not_for(self, text_request: TextRequest) -> str | None:
        """Return why it cannot take a request that another variant can, whatever its load; None if it can."""
        if images_of(text_request.messages) and not self.reads_images:
            return "it reads no images"
        if text_request.tools and text_request.choosing != "none" and not self.takes_tools:
            return "it knows no tools"
        return None

    @property
    def purpose(self) -> str:
        """What the model does, for messages about what it does not."""
        if self.kind == "reranker":
            return "reranks documents (/v1/rerank)"
        return "makes embeddings (/v1/embeddings)" if self.kind == "encoder" else "generates text"

    @property
    def known_context(self) -> int | None:
        """The context in tokens; None if only the upstream knows it."""
        return self.context if self.context < NO_BOUND else None

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
            **({"parent": self.base} if self.adapter is not None else {}),
        }

    def with_adapter(
        self, ref: AdapterRef, *, tenants: Sequence[str] = (), created: int | None = None
    ) -> ServedVariant:
        """Return this variant with an adapter, as a model of its own."""
        return msgspec.structs.replace(
            self,
            name=f"{self.name}:{ref.name}",
            fingerprint=f"{self.fingerprint}-{ref.digest[:10]}",
            adapter=ref,
            base=self.name,
            tenants=tuple(tenants),
            created=int(time.time()) if created is None else created,
        )


def no_tokens(name: str) -> ApiError:
    return ApiError(
        f"The tokens of '{name}' are unknown: an upstream serves it, and its configuration names no tokenizer.",
        parameter="model",
        code="unsupported_parameter",
    )


class NoEngine:
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


class NoTokenizer(Tokenizer):
    """Placeholder for an unknown tokenizer: every access to an attribute is an ApiError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python looks these up itself and copes without
            raise AttributeError(attribute)
        raise no_tokens(self._name)
