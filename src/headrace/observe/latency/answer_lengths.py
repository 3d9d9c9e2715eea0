"""The lengths of generated answers: how long they are, what ended them, and whether the default length fits.

Reads the sketches of a Row by ending and by who set the limit. Counts tokens; sees no text.
"""

from __future__ import annotations

import math
from typing import Any, Final

from headrace.observe.latency.latency_book import Row
from headrace.observe.latency.sketch import Sketch, merged

CLIENT: Final = "client"  # the request set max_tokens
DEFAULT: Final = "default"  # it did not
_CUT: Final = frozenset({"length", "deadline", "limit", "budget"})  # endings that the model did not choose
_LEFT: Final = "gone"  # the reader left while the answer was written
_LEAST: Final = 100  # answers, for advice
_MOST_CUT: Final = 0.01  # share of answers that a default may cut without a word
_SHORTER: Final = 0.8  # of the default, for it to be worth changing
_STEP: Final = 16  # tokens that advice is rounded up to


def length_key(ending: str, *, set_by_client: bool) -> str:
    return f"{ending} {CLIENT if set_by_client else DEFAULT}"


class AnswerLengths:
    """The answers of one row."""

    def __init__(self, row: Row) -> None:
        self._sketches = {tuple(key.split(" ", 1)): sketch for key, sketch in row.lengths.items()}

    def _merged(self, *, ending: str | None = None, limit: str | None = None) -> Sketch:
        return merged(
            sketch
            for (its_ending, its_limit), sketch in self._sketches.items()
            if ending in (None, its_ending) and limit in (None, its_limit)
        )

    def count(self, *, ending: str | None = None, limit: str | None = None) -> int:
        return self._merged(ending=ending, limit=limit).count

    def cut_share(self, limit: str | None = None) -> float:
        """Return the share of answers that a limit, a budget or a deadline ended."""
        every = self.count(limit=limit)
        return sum(self.count(ending=each, limit=limit) for each in _CUT) / every if every else 0.0

    def as_json(self) -> dict[str, Any]:
        every = self._merged()
        answers = every.count
        p50, p90, p95, p99 = (round(value) for value in every.quantiles((0.5, 0.9, 0.95, 0.99)))
        endings = sorted({ending for ending, _ in self._sketches})
        left = self._merged(ending=_LEFT)
        return {
            "answers": answers,
            "mean_tokens": round(every.sum / answers, 1) if answers else 0.0,
            "p50_tokens": p50,
            "p90_tokens": p90,
            "p95_tokens": p95,
            "p99_tokens": p99,
            "endings": {each: round(self.count(ending=each) / answers, 4) for each in endings},
            "cut_share": round(self.cut_share(), 4),
            "left_share": round(left.count / answers, 4) if answers else 0.0,
            "left_after_tokens": round(left.quantiles((0.5,))[0]) if left.count else None,
            "without_max_tokens": self.count(limit=DEFAULT),
            "without_max_tokens_cut_share": round(self.cut_share(DEFAULT), 4),
        }

    def advice(self, surface: str, default: int | None) -> str:
        """Return what to do about a surface's default length; empty if it fits, or too little is known."""
        if self.count(limit=DEFAULT) < _LEAST:
            return ""
        key = f"surfaces.{surface}.max_tokens"
        cut = self.cut_share(DEFAULT)
        if cut > _MOST_CUT:
            now = "the model's default" if default is None else f"{key} = {default}"
            return f"{now} cuts {100 * cut:.1f} % of the answers to requests without max_tokens. Raise it."
        (needed,) = self._merged(ending="stop", limit=DEFAULT).quantiles((0.99,))
        enough = math.ceil(needed / _STEP) * _STEP
        if not enough or (default is not None and enough > _SHORTER * default):
            return ""
        return (
            f"99 % of the answers to requests without max_tokens end by themselves within {enough} tokens. "
            f"Set {key} = {enough}, so that a runaway answer ends there and less is reserved of limits and budgets."
        )
