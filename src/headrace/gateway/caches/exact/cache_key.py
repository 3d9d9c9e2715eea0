"""What makes two requests the same request: the key of the exact cache.

Owns the key, the tags that a request gives its answer, and the list of what does not matter. Every field of TextRequest
and of SamplingParams is a part of the key unless it stands in that list with its reason, so a new field cannot be
forgotten: it costs a hit at worst, never a wrong answer. Knows no store.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.requests.text_request import TextRequest

if TYPE_CHECKING:
    from headrace.gateway.serving.fleet import ServedVariant

FORMAT: Final = 1  # of the key; another one finds nothing that this one has stored
TAGS: Final = "cache_tags"  # the key of a request's metadata that has them, with commas between
MOST_TAGS: Final = 8
_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")

# What the prompt's tokens are made of. It is in the key by itself only where there are no tokens.
OF_THE_PROMPT: Final = ("messages", "prompts", "template", "think")

# Fields of TextRequest that two requests may differ in and still have the same answer, each with the reason.
WITHOUT_EFFECT: Final = {
    "model": "the variant that answers is in the key, with its full name and its fingerprint",
    "sampling": "its fields are in the key one by one",
    "grammar_of": "names a parameter in errors",
    "stream": "how the answer is delivered; a hit streams as well",
    "include_usage": "how the answer is delivered",
    "deadline_s": "an answer that a deadline cut is not stored",
    "surface": "when the request runs, not what it says",
    "priority": "when the request runs, not what it says",
    "speculate": "speculative decoding does not change an answer",
    "cache": "a request with cache off has no key",
    "seeded": "whether the seed is in the key",
    "sources": "they are in the messages by then",
    "overflow": "how the messages were made to fit; the prompt says to what",
    "degrade": "how much less is done; what of it shapes the answer is in the key by itself",
    "user": "kept for the log",
    "metadata": "handed back by the endpoint; its cache_tags are in the key as tags",
}

# Fields of SamplingParams that choose among tokens, where the likeliest one is always taken.
OF_DRAWING: Final = ("top_k", "top_p", "min_p", "seed")

_ASKED: Final = tuple(
    name for name in TextRequest.__struct_fields__ if name not in WITHOUT_EFFECT and name not in OF_THE_PROMPT
)
_GREEDY: Final = tuple(name for name in SamplingParams.__struct_fields__ if name not in OF_DRAWING)
_UNSEEDED: Final = tuple(name for name in SamplingParams.__struct_fields__ if name != "seed")

_asked_values = attrgetter(*_ASKED)
_prompt_values = attrgetter(*OF_THE_PROMPT)
_greedy_values = attrgetter(*_GREEDY)
_unseeded_values = attrgetter(*_UNSEEDED)
_seeded_values = attrgetter(*SamplingParams.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode


class CacheKey(msgspec.Struct, frozen=True):
    """An answer that the cache may have."""

    tenant: str
    key: bytes  # 32 bytes
    tags: tuple[str, ...] = ()
    n: int = 1  # answers to each prompt
    choices: int = 1  # answers in all
    repeatable: bool = True  # generated again, it would be the same: the likeliest tokens, or a seed that was given


def cache_key_for(
    *,
    tenant: str,
    served: ServedVariant,
    asked: TextRequest,
    prompts: Sequence[Sequence[int]] | None,
    seeded: bool,
    policy: str = "",
) -> CacheKey | None:
    """None where there can be no key: something in the request cannot be written down. ApiError for tags that are none.

    `prompts`: the tokens; None where the variant's tokens are not known here, as an upstream's. `seeded`: the request
    has a seed of its own; others get a random one each, which is no part of the key. `policy`: the version of whatever
    else shapes answers, such as guards before and after the model; a new one finds nothing that is old.
    """
    tags = cache_tags(asked)
    greedy = asked.sampling.temperature <= 0.0
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
        asked.messages is not None,
        [_in_order(value) for value in _asked_values(asked)],
        [_in_order(value) for value in _sampling_values(asked.sampling, greedy=greedy, seeded=seeded)],
        None if prompts is None else [len(prompt) for prompt in prompts],
    ]
    if prompts is None:
        parts.append(_prompt_values(asked))
    try:
        digest = hashlib.sha256(_encode(parts))
        for prompt in prompts or ():
            digest.update(array("I", prompt))
    except (TypeError, ValueError, OverflowError, RecursionError):
        # Half a character, a number of more than 64 bits, nesting without an end: they come from clients' own schemas.
        return None
    count = len(asked.prompts or (None,)) if prompts is None else len(prompts)
    return CacheKey(tenant, digest.digest(), tags, asked.n, count * asked.n, greedy or seeded)


def _sampling_values(sampling: SamplingParams, *, greedy: bool, seeded: bool) -> tuple[Any, ...]:
    if greedy:
        return _greedy_values(sampling)
    return _seeded_values(sampling) if seeded else _unseeded_values(sampling)


def _in_order(value: Any) -> Any:
    """Sets and tables of numbers have no order of their own."""
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[int]", value))
    if isinstance(value, dict):
        return sorted(cast("dict[int, float]", value).items())
    return value


def cache_tags(asked: TextRequest) -> tuple[str, ...]:
    """ApiError for what is no list of tags.

    Tags are a part of the key: what is stored without `pricing` must not answer a request that has it, because neither
    its time to live nor the next invalidation of `pricing` would hold for it.
    """
    text = asked.metadata.get(TAGS)
    if not text:
        return ()
    tags = sorted({tag.strip() for tag in text.split(",")})
    parameter = f"metadata.{TAGS}"
    if len(tags) > MOST_TAGS:
        raise invalid_request(f"'{parameter}' may have {MOST_TAGS} tags at most, not {len(tags)}", parameter)
    for tag in tags:
        if not is_valid_tag(tag):
            raise invalid_request(
                f"'{parameter}': '{tag[:64]}' is no tag: 1 to 64 letters, digits and any of _ . : -", parameter
            )
    return tuple(tags)


def is_valid_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None
