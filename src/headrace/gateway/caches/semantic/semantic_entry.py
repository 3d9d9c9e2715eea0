"""The entries of the semantic cache, and the check of which requests it may answer.

Owns SemanticEntry, StoredAnswer and SemanticKey: the question to look for, and a digest of everything else that must be
equal. Whatever could change an answer is in the digest or makes the request ineligible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.engine.interface.sampling import UNUSED_WHEN_GREEDY
from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.caches.semantic.thresholds import Evidence
from headrace.gateway.images.message_images import images_of
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TextRequest, TokenUsage

_encode: Final = msgspec.json.Encoder(order="deterministic").encode


class StoredAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A complete answer."""

    content: str
    reasoning: str = ""
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of these
    machine_s: float = 0.0  # compute time of the generation

    def pieces(self, *, prompt_tokens: int = 0) -> list[ChoiceDelta]:
        """Return the deltas of one choice. `prompt_tokens`: of the request that gets them."""
        usage = TokenUsage(prompt_tokens, self.output_tokens, reasoning_tokens=self.reasoning_tokens)
        return [
            ChoiceDelta(0, content=self.content, reasoning=self.reasoning),
            ChoiceDelta(0, finish="stop", usage=usage),
        ]


class SemanticEntry(msgspec.Struct):
    id: int
    digest: bytes
    question: str
    answer: StoredAnswer
    tags: frozenset[str]
    created: float  # seconds since 1970
    expires: float
    hits: int = 0
    evidence: Evidence = msgspec.field(default_factory=Evidence)

    @property
    def nbytes(self) -> int:
        """The bytes of its texts, without its vector."""
        return len(self.question.encode()) + len(self.answer.content.encode()) + len(self.answer.reasoning.encode())


class SemanticKey(msgspec.Struct, frozen=True):
    """Identifies a request in the cache."""

    question: str  # the last turn of the user
    digest: bytes  # of everything else
    tags: tuple[str, ...] = ()


def semantic_key_for(
    text_request: TextRequest,
    *,
    variant: str,
    policy: str = "",
    sampled: bool = False,
    tools: bool = False,
    surfaces: Sequence[str] = (),
    surface: str = "",
    longest: int = 1000,
    tags: tuple[str, ...] = (),
) -> SemanticKey | str:
    """Return the key, or why the request is ineligible.

    `variant`: its name and fingerprint. `policy`: a version that an operator changes to leave old answers behind.
    `sampled`: accept requests with a temperature. `tools`: accept requests with tools, and turns after a tool's.
    `surfaces`: those that take part; all if empty. `longest`: characters of a question. `tags`: of the request.
    """
    if surfaces and surface not in surfaces:
        return "surface"
    if surface == "agent" and not tools and "agent" not in surfaces:
        return "agent"
    if text_request.messages is None or not text_request.messages:
        return "no chat"
    if text_request.cache != "on":
        return "off by request"
    last = text_request.messages[-1]
    question = last.get("content")
    if last.get("role") != "user" or not isinstance(question, str) or not question.strip():
        return "no question"
    if len(question) > longest:
        return "long"
    if any(not image["url"].startswith("data:") for image in images_of(text_request.messages)):
        return "images"  # what is there may change
    if not tools and (text_request.tools or _has_tools(text_request.messages)):
        return "tools"
    sampling = text_request.sampling
    if (
        text_request.n != 1
        or sampling.logprobs is not None
        or text_request.prompt_logprobs is not None
        or text_request.echo
    ):
        return "shape"
    if sampling.temperature > 0.0 and not sampled:
        return "sampled"
    return SemanticKey(question, _digest(text_request, variant, policy, parse_question(question).script, tags), tags)


def _has_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("role") in ("tool", "function") or message.get("tool_calls") for message in messages)


def _digest(text_request: TextRequest, variant: str, policy: str, script: str, tags: tuple[str, ...]) -> bytes:
    assert text_request.messages is not None
    last = {name: value for name, value in text_request.messages[-1].items() if name != "content"}
    sampling = msgspec.structs.asdict(text_request.sampling)
    if text_request.sampling.temperature == 0.0:
        for unused in UNUSED_WHEN_GREEDY:
            sampling.pop(unused)
    parts = {
        "variant": variant,
        "policy": policy,
        "script": script,
        "before": text_request.messages[:-1],
        "last": last,
        "tools": repr(
            (
                text_request.tools,
                text_request.choosing,
                text_request.only_tool,
                text_request.allowed_tools,
                text_request.parallel_calls,
            )
        ),
        "grammar": repr(text_request.grammar),
        "template": sorted((name, repr(value)) for name, value in text_request.template_values.items()),
        "think": text_request.think,
        "sampling": sorted((name, repr(value)) for name, value in sampling.items()),
        "limits": [
            text_request.max_tokens,
            text_request.min_tokens,
            text_request.stop,
            sorted(text_request.stop_ids),
            text_request.ignore_eos,
        ],
        "profile": text_request.profile,
        "tags": tags,  # an entry without a tag could outlive what the tag allows
    }
    return hashlib.blake2b(_encode_any(parts), digest_size=16).digest()


def _encode_any(value: Any) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:  # lone surrogates, which some clients send
        return repr(value).encode("utf-8", "surrogatepass")


def storable_answer(choices: Sequence[Choice]) -> StoredAnswer | None:
    """Return what may be stored of an answer; None if it was cut, calls tools or is empty."""
    if len(choices) != 1:
        return None
    choice = choices[0]
    if choice.finish != "stop" or choice.calls or not choice.content.strip():
        return None
    used = choice.usage
    return StoredAnswer(
        choice.content,
        choice.reasoning,
        used.output_tokens,
        used.reasoning_tokens,
        round(used.prefill_s + used.decode_s, 6),
    )


def with_example(text_request: TextRequest, entry: SemanticEntry) -> TextRequest:
    """Insert the stored question and answer as an example turn before the user's own."""
    assert text_request.messages is not None
    example = [{"role": "user", "content": entry.question}, {"role": "assistant", "content": entry.answer.content}]
    return text_request.but(messages=[*text_request.messages[:-1], *example, text_request.messages[-1]])
