"""Percentage splits: a share of the conversations goes to another variant, and every conversation stays where it is.

Owns what identifies a conversation, the place that it has in a split, and the shares. A place follows from the split's
salt, the tenant and the conversation alone, so it is the same in every gateway and after every restart, and two splits
with different salts have nothing to do with each other. Where a share grows at the cost of the one before or after it,
only conversations of that one move.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from headrace.gateway.serving.exchange import Exchange

UNITS: Final = 1_000_000  # parts of a split: shares are exact to a ten-thousandth of a percent
_LOOKED: Final = 4096  # characters of a message that identify it
_BEGINNING: Final = 64  # of a text without messages
_PLACES: Final = 2**64


class Split(msgspec.Struct, frozen=True):
    salt: str
    ends: tuple[tuple[str, int], ...]  # the variants in order, and the unit before which each ends

    @classmethod
    def of(cls, name: str, percent: Mapping[str, float], salt: str = "") -> Split:
        """ValueError where the shares are not 100 percent."""
        ends: list[tuple[str, int]] = []
        end = 0
        for variant, share in percent.items():
            units = round(share * UNITS / 100)
            if abs(units * 100 / UNITS - share) > 1e-9:
                raise ValueError(f"{share:g} percent is finer than a ten-thousandth of one")
            end += units
            ends.append((variant, end))
        if end != UNITS:
            raise ValueError(f"the shares are {end * 100 / UNITS:g} percent together, not 100")
        return cls(salt or name, tuple(ends))

    def choose(self, conversation: bytes) -> str:
        place = bucket_of(self.salt, conversation)
        return next(variant for variant, end in self.ends if place < end)


def bucket_of(salt: str, conversation: bytes) -> int:
    """From 0 to UNITS - 1."""
    digest = blake2b(conversation, digest_size=8, key=blake2b(salt.encode(), digest_size=32).digest()).digest()
    return int.from_bytes(digest) * UNITS // _PLACES


def conversation_key(exchange: Exchange, key: str) -> bytes:
    """What a conversation is told by: its id in the metadata, or its user, or how it began.

    Its beginning is all up to the first message of the user: what is said later changes nothing.
    """
    asked, tenant = exchange.asked, exchange.caller.tenant
    named = asked.metadata.get(key)
    if named is not None:
        return _joined(tenant, "id", named)
    if asked.user:
        return _joined(tenant, "user", asked.user)
    said: list[str] = []
    if asked.messages is not None:
        for message in asked.messages:
            content = message.get("content") or ""
            said += (message["role"], str(len(content)), content[:_LOOKED])
            if message["role"] == "user":
                break
    else:
        first = next(iter(asked.prompts or ()), "")
        said.append(first[:_BEGINNING] if isinstance(first, str) else str(first[:_BEGINNING]))
    return _joined(tenant, "began", *said)


def _joined(*parts: str) -> bytes:
    """So that no two lists of texts are the same bytes."""
    return b"".join(b"%d:%b" % (len(each), each) for each in (part.encode("utf-8", "replace") for part in parts))
