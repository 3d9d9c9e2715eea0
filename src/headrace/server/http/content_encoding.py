"""Inflates compressed request bodies: gzip, deflate and, where it is installed, zstd.

Yields small pieces, so that the caller stops at its own limit and a decompression bomb is never inflated beyond it.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from typing import Any, Final

from headrace.gateway.api_errors import ApiError, invalid_request

_PIECE: Final = 64 * 1024  # bytes inflated at once
_MEMBERS: Final = 64  # members of a body; one more for each further KiB, because each costs time even if it is empty
_ZSTD_WINDOW_LOG: Final = 23  # 8 MiB, the largest window that RFC 9659 allows for a content coding


def _zstd_module() -> Any:
    """Return the standard library's module, from Python 3.14 on, else its backport. None if neither is installed."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


_zstd: Any = _zstd_module()
_CORRUPT: Final[tuple[type[Exception], ...]] = (zlib.error,) if _zstd is None else (zlib.error, _zstd.ZstdError)
ACCEPTED: Final = ("gzip", "deflate", *(("zstd",) if _zstd is not None else ()))


class Inflater:
    """Inflates one body. A gzip or zstd body may be several members one after the other."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._decoder: Any = None  # of the current member
        self._members = 0
        self._received = 0  # bytes
        self._head = b""  # the first byte of a deflate body, until the second shows its format

    def inflate(self, data: bytes) -> Iterator[bytes]:
        """Yield the inflated bytes in pieces of at most 64 KiB. ApiError for data that is not of this coding."""
        self._received += len(data)
        if self._coding == "deflate" and self._decoder is None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return
        steps = self._zstd_steps(data) if self._coding == "zstd" else self._zlib_steps(data)
        try:
            yield from filter(None, steps)
        except _CORRUPT:
            raise self._invalid("the data is corrupt") from None

    def finish(self) -> None:
        """End the body. Raise ApiError if it ended early."""
        if self._head or (self._decoder is not None and not self._decoder.eof):
            raise self._invalid("it ends too early")

    def _zlib_steps(self, data: bytes) -> Iterator[bytes]:
        piece = b""
        while data or len(piece) == _PIECE:  # after a full piece, more may be ready without further input
            if self._decoder is None or self._decoder.eof:
                if self._decoder is not None and self._coding == "deflate":
                    raise zlib.error  # a deflate body has one member
                if not data:
                    return
                self._count_member()
                self._decoder = zlib.decompressobj(self._window_bits(data))
                self._head = b""
            piece = self._decoder.decompress(data, _PIECE)
            data = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
            yield piece

    def _count_member(self) -> None:
        self._members += 1
        if self._members > _MEMBERS + self._received // 1024:
            raise self._invalid("it has too many members")

    def _window_bits(self, data: bytes) -> int:
        if self._coding == "gzip":
            return 16 + zlib.MAX_WBITS
        # "deflate" means the zlib format, but some clients send the raw one, which has no header.
        has_header = data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
        return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS

    def _zstd_steps(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self._decoder is None or self._decoder.eof:
                if not data:
                    return
                self._count_member()
                options = {_zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
                self._decoder = _zstd.ZstdDecompressor(options=options)
            yield self._decoder.decompress(data, max_length=_PIECE)
            data = self._decoder.unused_data if self._decoder.eof else b""
            if not self._decoder.eof and self._decoder.needs_input:
                return

    def _invalid(self, reason: str) -> ApiError:
        return invalid_request(
            f"The body is not valid {self._coding}: {reason}. Expected what content-encoding says.",
            code="invalid_content_encoding",
        )


def inflater_for(content_encoding: str | None) -> Inflater | None:
    """Return the inflater for a content-encoding header, None for a plain body. ApiError 415 for any other coding."""
    coding = (content_encoding or "identity").strip().lower()
    if coding in ("identity", ""):
        return None
    coding = coding.removeprefix("x-") if coding == "x-gzip" else coding
    if coding in ACCEPTED:
        return Inflater(coding)
    extra = " For zstd, install the server with the extra 'zstd'." if coding == "zstd" else ""
    raise ApiError(
        f"Unknown content-encoding '{coding[:100]}'. Expected one of {', '.join(ACCEPTED)}, or none.{extra}",
        code="unsupported_content_encoding",
        status=415,
        headers={"accept-encoding": ", ".join(ACCEPTED)},
    )
