"""Cuts the texts of an embedding or reranking call to the tokens that a model takes, if the request says so.

The same wish has four names: `truncate` of Cohere (NONE, START, END) and of TEI (with `truncation_direction`), and
`truncate_prompt_tokens` of vLLM. Without any, a text that is too long is rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import invalid_request
from headrace.gateway.serving.engine_answering import tokens_of
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.text.user_text import UserText

LONG_TEXT: Final = 4096  # characters; longer ones are tokenised in a thread


class Truncation(msgspec.Struct, frozen=True):
    most: int | None = None  # tokens; None: as many as the model takes
    keep_end: bool = False  # cut at the start


def read_truncation(given: Mapping[str, Any], context: int) -> Truncation | None:
    """Read the parameters of a request. `context` is the model's, in tokens."""
    wish = given.get("truncate")
    most: int | None = given.get("truncate_prompt_tokens")
    if most == -1:
        most, wish = None, wish or True
    if most is not None and not 1 <= most <= context:
        raise invalid_request(
            f"'truncate_prompt_tokens' must be 1 to {context}, the model's context, or -1 for all of it, not {most}.",
            "truncate_prompt_tokens",
        )
    if wish in (None, False, "NONE") and most is None:
        return None
    return Truncation(most, wish == "START" or str(given.get("truncation_direction")).lower() == "left")


async def tokens_within(
    served: ServedVariant, text: str | Sequence[int], parameter: str, truncation: Truncation | None
) -> tuple[tuple[int, ...], bool]:
    """Return a text's tokens for an embedding, and whether it was cut."""
    if isinstance(text, str):
        text = UserText(text)
    if truncation is None:
        return await tokens_of(served, text, parameter, answered=False), False
    most = truncation.most or served.context
    cut = False
    if isinstance(text, str):
        encode, keep_end = served.tokenizer.encode_within, truncation.keep_end
        if len(text) > LONG_TEXT:
            text, cut = await asyncio.to_thread(encode, text, most, keep_end=keep_end)
        else:
            text, cut = encode(text, most, keep_end=keep_end)
    elif len(text) > most:
        text, cut = (text[-most:] if truncation.keep_end else text[:most]), True
    return await tokens_of(served, text, parameter, answered=False), cut
