"""Spreads a table of attention biases from buckets of distances to distances, as T5 and MPNet read it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def bucket_of(distance: int, buckets: int, max_distance: int) -> int:
    """Return the bucket of a distance: key minus query. Half of the buckets are for keys after their query.

    Of a half, the first half holds one distance each; the rest grow with the logarithm, and the last holds all from
    `max_distance` on.
    """
    half = buckets // 2
    start, size = (half if distance > 0 else 0), abs(distance)
    exact = half // 2
    if size < exact:
        return start + size
    share = np.log(np.float32(size) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    return start + min(exact + int(share * np.float32(half - exact)), half - 1)


def spread_buckets(table: NDArray[np.float32], max_distance: int) -> NDArray[np.float32]:
    """Return [heads, 2 * max_distance + 1], the biases of the distances -max_distance to max_distance, from [buckets,
    heads]."""
    distances = range(-max_distance, max_distance + 1)
    return table[[bucket_of(distance, len(table), max_distance) for distance in distances]].T.copy()
