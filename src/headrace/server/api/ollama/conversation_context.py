"""The `context` of `/api/generate`: a conversation as a list of integers, which clients send back unchanged.

It holds the messages themselves, three bytes of their JSON in each integer, and not a model's tokens. So it continues
on every variant and upstream, through the model's chat template, and the server keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Struct

from headrace.gateway.api_errors import ApiError, invalid_request

_MARK: Final = 0x68720001  # the first integer: this format, version 1
_MOST: Final = 2**24 - 1  # three bytes


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


_encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(list[_Message])


def encode_context(messages: Sequence[dict[str, Any]]) -> list[int]:
    data = _encode(messages)
    data += b" " * (-len(data) % 3)
    triples = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3).astype(np.uint32)
    return [_MARK, *((triples[:, 0] << 16) | (triples[:, 1] << 8) | triples[:, 2]).tolist()]


def decode_context(context: Sequence[int]) -> list[dict[str, Any]]:
    """Return the messages. ApiError for a context that this server did not make."""
    if context[0] != _MARK or len(context) < 2 or min(context[1:]) < 0 or max(context[1:]) > _MOST:
        raise _foreign()
    numbers = np.array(context[1:], dtype=np.uint32)
    data = np.stack([numbers >> 16, (numbers >> 8) & 0xFF, numbers & 0xFF], axis=1).astype(np.uint8).tobytes()
    try:
        messages = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _foreign() from None
    return [{"role": message.role, "content": message.content} for message in messages]


def _foreign() -> ApiError:
    return invalid_request(
        "'context' is not a conversation of this server. Send the 'context' of an earlier answer unchanged, or use "
        "/api/chat.",
        "context",
        code="invalid_value",
    )
