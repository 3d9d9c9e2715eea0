"""Compares two spans of traffic, with intervals: what became slower, dearer or less reliable.

Requests of one hour are alike, so a draw resamples blocks of six hours, not requests. An interval of 99 % keeps false
alarms rare among many comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.cli.report.weeks import HOUR, Key, Span
from headrace.observe.latency.latency_book import Row
from headrace.observe.latency.sketch import PER_OCTAVE

Floats = NDArray[np.float64]

CONFIDENCE: Final = 0.99
_BLOCK_S: Final = 6 * HOUR
_DRAWS: Final = 1000
_LEAST_BLOCKS: Final = 4  # with traffic, of each span
_LEAST_REQUESTS: Final = 100  # of each span
_WORTH_S: Final = 0.05  # a smaller change is not called one
_SEED: Final = 20_260_101

# Latencies and their percentiles that are compared.
_PERCENTILES: Final = (("ttft", 0.5), ("ttft", 0.95), ("itl", 0.95), ("tpot", 0.5), ("e2e", 0.95))


class Change(msgspec.Struct):
    key: Key  # surface and model
    what: str
    unit: str  # ms, share or micros
    before: float
    after: float
    low: float | None  # of the ratio after / before; for shares, of the difference. None: too little traffic
    high: float | None

    @property
    def is_difference(self) -> bool:
        return self.unit == "share"

    @property
    def verdict(self) -> str:
        """`worse`, `better`, `same` (no change that the traffic shows), or `unknown`."""
        if self.low is None or self.high is None:
            return "unknown"
        nothing, worth = (0.0, 0.001) if self.is_difference else (1.0, _WORTH_S)
        change = self.after - self.before if self.is_difference else self.after / self.before - 1.0
        if self.low > nothing and change >= worth:
            return "worse"
        return "better" if self.high < nothing and change <= -worth else "same"


def changes(before: Span, after: Span) -> list[Change]:
    """Compare each surface and model with traffic in both spans, the busiest first."""
    rows = {key: row.requests for key, row in after.rows(("surface", "model")).items() if key[1] != "-"}
    earlier = before.rows(("surface", "model"))
    found: list[Change] = []
    for key in sorted(rows, key=lambda each: -rows[each]):
        if key in earlier:
            found += _compare(key, before.by_hour(key), after.by_hour(key))
    return found


def _compare(key: Key, before: Mapping[int, Row], after: Mapping[int, Row]) -> list[Change]:
    rng = np.random.default_rng(_SEED)
    spans = (_blocks(before), _blocks(after))
    enough = all(
        len(blocks) >= _LEAST_BLOCKS and sum(row.requests for row in blocks) >= _LEAST_REQUESTS for blocks in spans
    )
    weights = [_weights(rng, len(blocks)) if enough else np.zeros((0, len(blocks))) for blocks in spans]
    found: list[Change] = []
    for name, share in _PERCENTILES:
        counts = [_counts(blocks, name) for blocks in spans]
        if any(not each.sum() for each in counts):
            continue
        at = [float(_percentiles(each.sum(axis=0, keepdims=True), share)[0]) * 1e3 for each in counts]
        ratios = None
        if enough:
            draws = [_percentiles(weight @ each, share) for weight, each in zip(weights, counts, strict=True)]
            ratios = draws[1] / draws[0]
        found.append(_change(key, f"{name.upper()} p{share * 100:g}", "ms", at, ratios))
    found += _rates(key, spans, weights if enough else None)
    return found


def _rates(key: Key, spans: Sequence[Sequence[Row]], weights: Sequence[Floats] | None) -> list[Change]:
    """Compare the failed share, and the price and machine time of a thousand requests."""
    measures: tuple[tuple[str, str, Callable[[Row], float], float], ...] = (
        ("failed", "share", lambda row: row.failed, 1.0),
        ("price of 1,000 requests", "micros", lambda row: row.micros, 1e3),
        ("machine time of 1,000 requests", "s", lambda row: row.machine_s, 1e3),
    )
    found: list[Change] = []
    for what, unit, amount, scale in measures:
        sums = [np.array([amount(row) for row in blocks], dtype=np.float64) for blocks in spans]
        requests = [np.array([row.requests for row in blocks], dtype=np.float64) for blocks in spans]
        at = [scale * float(top.sum() / max(bottom.sum(), 1.0)) for top, bottom in zip(sums, requests, strict=True)]
        if not any(at) or (unit != "share" and not all(at)):
            continue
        draws = None
        if weights is not None:
            rates = [
                scale * (weight @ top) / np.maximum(weight @ bottom, 1.0)
                for weight, top, bottom in zip(weights, sums, requests, strict=True)
            ]
            draws = rates[1] - rates[0] if unit == "share" else rates[1] / np.maximum(rates[0], 1e-12)
        found.append(_change(key, what, unit, at, draws))
    return found


def _change(key: Key, what: str, unit: str, at: Sequence[float], draws: Floats | None) -> Change:
    low = high = None
    if draws is not None:
        rest = (1.0 - CONFIDENCE) / 2.0
        low, high = (float(each) for each in np.nanquantile(draws, (rest, 1.0 - rest)))
    return Change(key, what, unit, at[0], at[1], low, high)


def _blocks(hours: Mapping[int, Row]) -> list[Row]:
    """Add hours up to blocks of six; blocks without traffic are left out."""
    found: dict[int, Row] = {}
    for hour, row in hours.items():
        found.setdefault(hour // _BLOCK_S, Row()).merge(row)
    return [row for _, row in sorted(found.items())]


def _weights(rng: np.random.Generator, blocks: int) -> Floats:
    """Return how often each block is in each draw."""
    return rng.multinomial(blocks, np.full(blocks, 1.0 / blocks), size=_DRAWS).astype(np.float64)


_LOWEST: Final = -20 * PER_OCTAVE
_BUCKETS: Final = 38 * PER_OCTAVE  # of every sketch: 1 µs to a day and a half


def _counts(blocks: Sequence[Row], name: str) -> Floats:
    """Return the values of each block by bucket."""
    found = np.zeros((len(blocks), _BUCKETS))
    for place, row in enumerate(blocks):
        if (sketch := row.sketches.get(name)) is not None:
            for bucket, count in sketch.counts.items():
                found[place, min(max(bucket - _LOWEST, 0), _BUCKETS - 1)] += count
    return found


def _percentiles(counts: Floats, share: float) -> Floats:
    """Return the percentile of each row, in seconds: the middle of its bucket. Without values it is no number."""
    filled = np.cumsum(counts, axis=1)
    wanted = share * np.maximum(filled[:, -1:] - 1.0, 0.0)
    bucket = np.argmax(filled > wanted, axis=1) + _LOWEST
    above, below = 2.0 ** (bucket / PER_OCTAVE), 2.0 ** ((bucket - 1) / PER_OCTAVE)
    return np.where(filled[:, -1] > 0.0, 2.0 * above * below / (above + below), np.nan)
