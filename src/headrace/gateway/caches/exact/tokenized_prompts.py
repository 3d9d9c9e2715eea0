"""Caches tokenised prompts, so that a repeated request is not rendered and tokenised again.

Owns the bounds and the identity of a prompt. Does not know answers. Each tenant's prompts are separate, because a fast
response would reveal that another tenant had sent the same one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import Final

import msgspec

from headrace.gateway.images.message_images import images_of
from headrace.gateway.serving.exchange import Exchange, Prompt

_encode: Final = msgspec.msgpack.Encoder().encode


class TokenizedPrompts:
    """Recently tokenised prompts. Used from one event loop only."""

    def __init__(
        self,
        *,
        most: int = 4096,
        most_tokens: int = 1024**2,  # of all prompts together: 4 MiB
    ) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._kept: OrderedDict[bytes, tuple[array[int], str]] = OrderedDict()  # the least recently used first
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def name(self, exchange: Exchange) -> bytes | None:
        """Return the key of an exchange's prompt: all that it is made of. None if it cannot be cached."""
        text_request, served = exchange.text_request, exchange.served
        if text_request.messages is None or served.upstream is not None or served.tokenizer.uses_clock:
            return None
        if images_of(text_request.messages):
            return None  # where they are is not kept, and those of a URL may change
        tools = None if text_request.choosing == "none" else text_request.tools
        # A model that is reloaded may have another template and another tokenizer under the same name.
        model = (served.name, served.fingerprint)
        ingredients = (exchange.caller.tenant, model, text_request.messages, tools, text_request.template_values)
        try:
            return hashlib.blake2b(_encode(ingredients), digest_size=16).digest()
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None  # not encodable, such as half a surrogate pair

    def find(self, name: bytes) -> list[Prompt] | None:
        kept = self._kept.get(name)
        if kept is None:
            return None
        self._kept.move_to_end(name)
        tokens, tail = kept
        return [Prompt(tuple(tokens), tail)]

    def keep(self, name: bytes, prompts: list[Prompt]) -> None:
        (prompt,) = prompts
        if name in self._kept or len(prompt.tokens) > self._most_tokens // 16:
            return
        self._kept[name] = array("I", prompt.tokens), prompt.tail
        self.tokens += len(prompt.tokens)
        while len(self._kept) > self._most or self.tokens > self._most_tokens:
            _, (gone, _) = self._kept.popitem(last=False)
            self.tokens -= len(gone)
