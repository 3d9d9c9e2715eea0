"""Percentage splits: sends shares of the conversations to different variants, each conversation always to the same.

Owns the identity of a conversation, its bucket and the shares. A bucket follows from the split's salt, the tenant and
the conversation alone, so it is the same in every gateway and after every restart, and splits with different salts are
independent. If a share grows at the expense of its neighbour, only conversations of that neighbour move.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from headrace.gateway.serving.exchange import Exchange

BUCKETS: Final = 1_000_000  # of a split: shares are exact to a ten-thousandth of a percent
_MESSAGE_CHARS: Final = 4096  # of a message, that identify it
_PROMPT_CHARS: Final = 64  # of a prompt without messages, or tokens
_HASH_RANGE: Final = 2**64


class Split(msgspec.Struct, frozen=True):
    salt: str
    ends: tuple[tuple[str, int], ...]  # the variants in order, and the bucket before which each ends

    @classmethod
    def of(cls, name: str, percent: Mapping[str, float], salt: str = "") -> Split:
        """ValueError if the shares do not add up to 100 percent."""
        ends: list[tuple[str, int]] = []
        end = 0
        for variant, share in percent.items():
            count = round(share * BUCKETS / 100)
            if abs(count * 100 / BUCKETS - share) > 1e-9:
                raise ValueError(f"expected shares in steps of 0.0001 percent, found {share:g}")
            end += count
            ends.append((variant, end))
        if end != BUCKETS:
            raise ValueError(f"expected shares that add up to 100 percent, found {end * 100 / BUCKETS:g}")
        return cls(salt or name, tuple(ends))

    def choose(self, conversation: bytes) -> str:
        bucket = bucket_of(self.salt, conversation)
        return next(variant for variant, end in self.ends if bucket < end)


def bucket_of(salt: str, conversation: bytes) -> int:
    """Return a conversation's bucket, from 0 to BUCKETS - 1."""
    digest = blake2b(conversation, digest_size=8, key=blake2b(salt.encode(), digest_size=32).digest()).digest()
    return int.from_bytes(digest) * BUCKETS // _HASH_RANGE


def conversation_key(exchange: Exchange, key: str) -> bytes:
    """Identify a conversation by its id in the metadata, else its user, else its messages up to the user's first."""
    text_request, tenant = exchange.text_request, exchange.caller.tenant
    named = text_request.metadata.get(key)
    if named is not None:
        return _joined(tenant, "id", named)
    if text_request.user:
        return _joined(tenant, "user", text_request.user)
    beginning: list[str] = []
    if text_request.messages is not None:
        for message in text_request.messages:
            content = message.get("content") or ""
            beginning += (message["role"], str(len(content)), content[:_MESSAGE_CHARS])
            if message["role"] == "user":
                break
    else:
        first = next(iter(text_request.prompts or ()), "")
        beginning.append(first[:_PROMPT_CHARS] if isinstance(first, str) else str(first[:_PROMPT_CHARS]))
    return _joined(tenant, "began", *beginning)


def _joined(*parts: str) -> bytes:
    """Encode texts so that different lists give different bytes."""
    return b"".join(b"%d:%b" % (len(each), each) for each in (part.encode("utf-8", "replace") for part in parts))
