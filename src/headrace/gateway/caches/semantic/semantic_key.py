"""Which requests the semantic cache may answer, and by which key.

Owns SemanticKey: the question to look for, and a digest of everything else that must be equal. Whatever could change
an answer is in the digest or makes the request ineligible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.engine.interface.sampling import UNUSED_WHEN_GREEDY
from headrace.gateway.caches.semantic.guarded_question import parse_question
from headrace.gateway.images.message_images import images_of
from headrace.gateway.requests.text_request import TextRequest

_encode: Final = msgspec.json.Encoder(order="deterministic").encode


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
            text_request.skip_special_tokens,
            text_request.begun,
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
