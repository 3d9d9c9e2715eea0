"""Estimates the length and duration of responses from recent ones of the same tenant and surface.

Memory is bounded. Estimates need not be right: a reservation that is too small is extended, one that is too large gives
the rest back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

from headrace.gateway.limits.limit_scopes import SECOND

_UNKNOWN_MICROS: Final = 5 * SECOND  # assumed duration before any response is known
# Length assumed before any response is known, by surface. Spoken answers and calls within a program are short.
_FIRST_TOKENS: Final[Mapping[str, int]] = {"voice": 128, "embedded": 128}
_FIRST_TOKENS_ELSEWHERE: Final = 512
_MARGIN: Final = 2  # the estimate is at least this many times the longest of a few responses


class _Recent:
    """The most recent values, in order of arrival and of size."""

    __slots__ = ("_came", "_sorted")

    def __init__(self, most: int) -> None:
        self._came: deque[int] = deque(maxlen=most)
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: int) -> None:
        if len(self._came) == self._came.maxlen:
            del self._sorted[bisect_left(self._sorted, self._came[0])]
        self._came.append(value)
        insort(self._sorted, value)

    def p95(self) -> int:
        return self._sorted[-(-len(self._sorted) * 95 // 100) - 1]

    def largest(self) -> int:
        return self._sorted[-1]


class OutputEstimates:
    def __init__(
        self,
        *,
        first_tokens: int | None = None,  # assumed length before any response is known; default: by surface
        few: int = 20,  # responses that count as few
        recent: int = 128,  # responses to remember
        pairs: int = 4096,  # pairs of tenant and surface, the most recently used
    ) -> None:
        self._first_tokens = first_tokens
        self._few = few
        self._recent = recent
        self._most_pairs = pairs
        self._pairs: OrderedDict[tuple[str, str], tuple[_Recent, _Recent]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pairs)

    def tokens(self, tenant: str, surface: str, most: int) -> int:
        """Return the 95th percentile of the length, at most `most`.

        With few responses known it is twice the longest of them, or what is left of the first assumption, which each
        response makes count for less: a half after the first, a third after the second.
        """
        first = self._first_tokens or _FIRST_TOKENS.get(surface, _FIRST_TOKENS_ELSEWHERE)
        known = self._pairs.get((tenant, surface))
        if known is None:
            return min(first, most)
        lengths, _ = known
        if len(lengths) < self._few:
            return min(max(first // (len(lengths) + 1), _MARGIN * lengths.largest()), most)
        return min(lengths.p95(), most)

    def micros(self, tenant: str, surface: str) -> int:
        """Return the 95th percentile of the duration in microseconds."""
        known = self._pairs.get((tenant, surface))
        return _UNKNOWN_MICROS if known is None else known[1].p95()

    def learn(self, tenant: str, surface: str, tokens: int, micros: int) -> None:
        """Add a complete response."""
        pair = (tenant, surface)
        known = self._pairs.get(pair)
        if known is None:
            if len(self._pairs) >= self._most_pairs:
                self._pairs.popitem(last=False)
            known = self._pairs[pair] = _Recent(self._recent), _Recent(self._recent)
        self._pairs.move_to_end(pair)
        known[0].add(tokens)
        known[1].add(micros)
