"""Builds the key of the exact cache: what makes two requests the same request.

Owns the key, the tags that a request gives its answer, and the list of fields without effect. Every field of
TextRequest and SamplingParams is in the key unless it is in that list with its reason, so forgetting a new field costs
hits, never wrong answers. Does not know stores.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from headrace.engine.interface.sampling import UNUSED_WHEN_GREEDY, SamplingParams
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.images.message_images import images_of
from headrace.gateway.requests.text_request import TextRequest

if TYPE_CHECKING:
    from headrace.gateway.serving.served_variant import ServedVariant

FORMAT: Final = 1  # of the key; a new format finds no old entries
TAGS: Final = "cache_tags"  # metadata key with the tags, separated by commas
MAX_TAGS: Final = 8
_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")

# What the prompt's tokens are made of: in the key only if there are no tokens.
OF_THE_PROMPT: Final = ("messages", "prompts", "template", "template_hints", "think")

# Fields of TextRequest that do not change the answer, each with the reason.
WITHOUT_EFFECT: Final = {
    "model": "the variant that answers is in the key, with its full name and its fingerprint",
    "sampling": "its fields are in the key one by one",
    "grammar_of": "names a parameter in errors",
    "stream": "how the answer is delivered; a hit streams as well",
    "include_usage": "how the answer is delivered",
    "continuous_usage": "how the answer is delivered",
    "show_reasoning": "the reasoning is left out of what is delivered, after the cache",
    "prediction": "draft tokens do not change an answer",
    "deadline_s": "an answer that a deadline cut is not stored",
    "surface": "when the request runs, not what it says",
    "priority": "when the request runs, not what it says",
    "speculate": "speculative decoding does not change an answer",
    "cache": "a request with cache off has no key",
    "seeded": "whether the seed is in the key",
    "sources": "they are in the messages by then",
    "overflow": "how the messages were made to fit; the prompt says to what",
    "degrade": "how much less is done; what of it shapes the answer is in the key by itself",
    "rewrite": "what rewrites the answer is in the key",
    "user": "kept for the log",
    "pipeline": "only pipelines read it, and the requests that they make have none",
    "metadata": "handed back by the endpoint; its cache_tags are in the key as tags",
}


_ASKED: Final = tuple(
    name for name in TextRequest.__struct_fields__ if name not in WITHOUT_EFFECT and name not in OF_THE_PROMPT
)
_GREEDY: Final = tuple(name for name in SamplingParams.__struct_fields__ if name not in UNUSED_WHEN_GREEDY)
_UNSEEDED: Final = tuple(name for name in SamplingParams.__struct_fields__ if name != "seed")

_asked_values = attrgetter(*_ASKED)
_prompt_values = attrgetter(*OF_THE_PROMPT)
_greedy_values = attrgetter(*_GREEDY)
_unseeded_values = attrgetter(*_UNSEEDED)
_seeded_values = attrgetter(*SamplingParams.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode


class CacheKey(msgspec.Struct, frozen=True):
    """Identifies an answer in the cache."""

    tenant: str
    digest: bytes  # 32 bytes
    tags: tuple[str, ...] = ()
    n: int = 1  # answers to each prompt
    choices: int = 1  # answers in all
    repeatable: bool = True  # greedy or seeded, so that a new generation gives the same answer


def cache_key_for(
    *,
    tenant: str,
    served: ServedVariant,
    text_request: TextRequest,
    prompts: Sequence[Sequence[int]] | None,
    seeded: bool,
    policy: str = "",
    images: Sequence[bytes] = (),
) -> CacheKey | None:
    """Return the key of a request; None if part of the request cannot be encoded. ApiError for invalid tags.

    `prompts`: the tokens; None for an upstream, whose tokens are unknown. `seeded`: the client chose the seed; random
    seeds are not in the key. `policy`: a version of whatever else shapes answers; a new one finds no old entries.
    `images`: digests of the prompts' images, whose tokens are all the same.
    """
    tags = cache_tags(text_request)
    greedy = text_request.sampling.temperature <= 0.0
    parts: list[Any] = [
        FORMAT,
        tenant,
        served.name,
        served.fingerprint,
        None if served.tools is None else served.tools.name,
        None if served.reasoning is None else served.reasoning.name,
        served.max_tokens,
        served.context,
        policy,
        tags,
        text_request.messages is not None,
        [_in_order(value) for value in _asked_values(text_request)],
        [_in_order(value) for value in _sampling_values(text_request.sampling, greedy=greedy, seeded=seeded)],
        None if prompts is None else [len(prompt) for prompt in prompts],
    ]
    if images:
        parts.append(images)
    if prompts is None:
        if any(not image["url"].startswith("data:") for image in images_of(text_request.messages)):
            return None  # what is there may change
        parts.append(_prompt_values(text_request))
    try:
        digest = hashlib.sha256(_encode(parts))
        for prompt in prompts or ():
            digest.update(array("I", prompt))
    except (TypeError, ValueError, OverflowError, RecursionError):
        # Half a surrogate pair, a number over 64 bits or endless nesting, from a client's own schema.
        return None
    count = len(text_request.prompts or (None,)) if prompts is None else len(prompts)
    return CacheKey(tenant, digest.digest(), tags, text_request.n, count * text_request.n, greedy or seeded)


def answer_shape(text_request: TextRequest) -> bytes | None:
    """Return a digest of what shapes the answer to a chat, but for its variant and the texts of its messages: sampling,
    format, tools, images. None if an answer cannot be kept for it."""
    images = [image["url"] for image in images_of(text_request.messages)]
    if any(not url.startswith("data:") for url in images):
        return None  # what is there may change
    sampling = text_request.sampling
    parts: list[Any] = [
        [_in_order(value) for value in _asked_values(text_request)],
        [
            _in_order(value)
            for value in _sampling_values(sampling, greedy=sampling.temperature <= 0.0, seeded=text_request.seeded)
        ],
        [text_request.template, text_request.template_hints, text_request.think],
        images,
    ]
    try:
        return hashlib.sha256(_encode(parts)).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _sampling_values(sampling: SamplingParams, *, greedy: bool, seeded: bool) -> tuple[Any, ...]:
    if greedy:
        return _greedy_values(sampling)
    return _seeded_values(sampling) if seeded else _unseeded_values(sampling)


def _in_order(value: Any) -> Any:
    """Give sets and number tables a fixed order."""
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[int]", value))
    if isinstance(value, dict):
        return sorted(cast("dict[int, float]", value).items())
    return value


def cache_tags(text_request: TextRequest) -> tuple[str, ...]:
    """Return the tags of a request, sorted. ApiError for invalid ones.

    Tags are part of the key: an entry without `pricing` must not answer a request with it, because neither the time to
    live nor the next invalidation of `pricing` would apply to that entry.
    """
    text = text_request.metadata.get(TAGS)
    if not text:
        return ()
    tags = sorted({tag.strip() for tag in text.split(",")})
    parameter = f"metadata.{TAGS}"
    if len(tags) > MAX_TAGS:
        raise invalid_request(f"'{parameter}' has {len(tags)} tags. Expected at most {MAX_TAGS}.", parameter)
    for tag in tags:
        if not is_valid_tag(tag):
            raise invalid_request(
                f"'{parameter}' has the invalid tag '{tag[:64]}'. Use 1 to 64 letters, digits and _ . : -", parameter
            )
    return tuple(tags)


def is_valid_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None
