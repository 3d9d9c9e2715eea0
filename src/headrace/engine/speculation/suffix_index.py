"""Finds earlier occurrences of the end of a token sequence.

A hash table of adjacent pairs, as compressors use: adding a token takes constant time, and memory is bounded by the
window.
"""

from __future__ import annotations

from array import array
from typing import Final

_LONGEST: Final = 32  # tokens compared backwards
_NOWHERE: Final = -1
_FIRST: Final = 0x9E3779B1  # multiplier of the pair's hash: odd, about 32 bits
_SECOND: Final = 0x85EBCA77


class SuffixIndex:
    """Earlier places of each pair of adjacent tokens: the latest by hash, and from each the one before it.

    A place is the index of the token after the pair. Takes 4 bytes per token of the window, and as much for the hashes.
    """

    def __init__(self, window: int, tokens: int) -> None:
        self._window = 1 << (window - 1).bit_length()
        size = min(self._window, max(1024, 1 << tokens.bit_length()))
        self._hashes = size - 1
        self._last = array("i", [_NOWHERE]) * size
        self._before = array("i")  # by place, modulo the window
        self._done = 0  # indexed places
        self._followed = (0, 0, 0)  # where the tokens ended, the place found, its length

    def add(self, tokens: list[int], most: int) -> None:
        """Index every pair that has a token after it, `most` at a time."""
        window, last, before, hashes = self._window, self._last, self._before, self._hashes
        start = self._done
        end = min(len(tokens), start + most)
        for place in range(start, end):
            if place < 2:
                previous = _NOWHERE
            else:
                key = ((tokens[place - 2] * _FIRST + tokens[place - 1] * _SECOND) >> 16) & hashes
                previous = last[key]
                last[key] = place
            if place < window:
                before.append(previous)
            else:
                before[place & (window - 1)] = previous
        self._done = max(start, end)

    def find(self, tokens: list[int], candidates: int) -> tuple[int, int]:
        """Return the place whose preceding tokens match the end of `tokens` the longest, and the length of the
        match."""
        end = len(tokens)
        if end < 3:
            return 0, 0
        ended, place, length = self._followed
        if length and tokens[ended:end] == tokens[place : place + end - ended]:
            place, length = place + end - ended, min(_LONGEST, length + end - ended)
        else:
            place, length = 0, 0
        if length < _LONGEST:
            place, length = self._search(tokens, candidates, place, length)
        self._followed = (end, place, length)
        return place, length

    def _search(self, tokens: list[int], candidates: int, place: int, length: int) -> tuple[int, int]:
        end = len(tokens)
        first, second = tokens[end - 2], tokens[end - 1]
        key = ((first * _FIRST + second * _SECOND) >> 16) & self._hashes
        other = self._last[key]
        oldest = max(2, end - self._window)
        while candidates and other >= oldest:
            candidates -= 1
            if tokens[other - 1] == second and tokens[other - 2] == first:
                common = 2
                limit = min(_LONGEST, other)
                while common < limit and tokens[other - 1 - common] == tokens[end - 1 - common]:
                    common += 1
                if common > length:
                    place, length = other, common
                    if common == _LONGEST:
                        break
            previous = self._before[other & (self._window - 1)]
            if previous >= other:
                break
            other = previous
        return place, length
