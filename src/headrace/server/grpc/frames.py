"""How the endpoints hand messages to an RPC: as frames, each a byte for its kind, four for its length, and the data."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

MESSAGE: Final = 0  # serialised
ERROR: Final = 1  # an error of a stream that has begun, as JSON in the shape of the HTTP API, after its status

_HEAD: Final = struct.Struct(">BI")
_STATUS: Final = struct.Struct(">H")


def message_frame(data: bytes) -> bytes:
    return _HEAD.pack(MESSAGE, len(data)) + data


def error_frame(status: int, body: bytes) -> bytes:
    return _HEAD.pack(ERROR, len(body) + _STATUS.size) + _STATUS.pack(status) + body


def read_error(data: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an error's frame."""
    return _STATUS.unpack_from(data)[0], data[_STATUS.size :]


def split_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the data of each frame."""
    place = 0
    while place < len(data):
        kind, length = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        yield kind, data[place : place + length]
        place += length
