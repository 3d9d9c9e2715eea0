"""Finds chunks of a collection that nearly repeat another, without comparing each with all.

Each chunk has a sketch: the smallest hashes of its runs of words, in bands. Two chunks that share a band are
candidates, and near_duplicates decides about them exactly. Texts with 80 % of their runs in common share a band with
a probability of 0.997.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.degradation.shaping.near_duplicates import RUN_WORDS, find_repeats
from headrace.gateway.folded_words import words

BANDS: Final = 8
_ROWS: Final = 3  # hashes in a band
_PRIME: Final = np.uint64((1 << 61) - 1)


@cache
def _factors() -> NDArray[np.uint64]:
    """Return factors and summands of the hashes. They are fixed, because sketches are stored."""
    return np.random.default_rng(20_011).integers(1, 1 << 28, size=(BANDS * _ROWS, 2), dtype=np.uint64)


def text_digest(text: str) -> bytes:
    """Return 16 bytes that are equal for texts with the same words."""
    return hashlib.blake2b("\0".join(words(text)).encode(errors="surrogatepass"), digest_size=16).digest()


def sketch_bands(text: str) -> list[int]:
    """Return a number for each band, less than 2**63."""
    found = words(text)
    ends = range(RUN_WORDS, max(RUN_WORDS, len(found)) + 1)
    runs = {zlib.crc32(" ".join(found[max(0, end - RUN_WORDS) : end]).encode(errors="surrogatepass")) for end in ends}
    hashes = np.fromiter(runs, dtype=np.uint64, count=len(runs))
    factors = _factors()
    mixed = (factors[:, :1] * hashes[None, :] + factors[:, 1:]) % _PRIME
    least = mixed.min(axis=1).reshape(BANDS, _ROWS)
    return [
        int.from_bytes(hashlib.blake2b(bytes([band]) + row.tobytes(), digest_size=8).digest()) >> 1
        for band, row in enumerate(least)
    ]


def find_repeated(text: str, candidates: Sequence[str]) -> int | None:
    """Return the index of a candidate that the text repeats, or None."""
    for index, candidate in enumerate(candidates):
        if find_repeats((candidate, text))[1] is not None:
            return index
    return None
