"""Chooses a factor for each input of a product, by which its weights grow and its inputs shrink (AWQ, SmoothQuant).

The exact model stays the same; what rounding does to it changes. Where factors go is the layer's matter: see
layer_compression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.compress.grids import GridSpec, dequantise, fit, round_to_nearest
from headrace.compress.input_statistics import InputStatistics
from headrace.compress.layer_pass import F32

Doubles = NDArray[np.float64]
Sets = tuple[int, int, int]  # of inputs: [sets, members, size]; the members of a set share their factors

_EXPONENTS: Final = np.linspace(0.0, 0.95, 20)
_LEAST: Final = 1e-4
_RANGE: Final = 1e4  # between the largest factor and the smallest


def search_factors(
    weights: Sequence[F32], spec: GridSpec, statistics: InputStatistics, *, sets: Sets | None = None
) -> tuple[F32, float]:
    """Return the factors of AWQ's search, and the exponent that won (0: all factors are 1).

    Factors are the mean size of each input, to a power. Each power is judged by the error of the products' outputs on
    samples of the inputs.
    """
    rows = statistics.samples
    best, exponent, least = np.ones(weights[0].shape[1], dtype=np.float32), 0.0, np.inf
    size = np.maximum(statistics.mean_abs, _LEAST * max(float(statistics.mean_abs.max()), 1e-30))
    for each in _EXPONENTS if len(rows) else ():
        factors = _bounded(_joined(size, sets, np.mean) ** each)
        error = 0.0
        for weight in weights:
            scaled = weight * factors
            grid = fit(scaled, spec, clip=False)
            scaled = dequantise(round_to_nearest(scaled, grid), grid)
            scaled /= factors
            scaled -= weight
            error += float(np.square(rows @ scaled.T).sum(dtype=np.float64))
        if error < least:
            best, exponent, least = factors, float(each), error
    return best, exponent


def smooth_factors(
    weights: Sequence[F32], statistics: InputStatistics, *, strength: float = 0.5, sets: Sets | None = None
) -> F32:
    """Return SmoothQuant's factors: the largest input to the power of `strength`, over the largest weight to the
    rest."""
    largest = np.maximum.reduce([np.abs(weight).max(axis=0) for weight in weights]).astype(np.float64)
    peak = statistics.peak.astype(np.float64)
    inputs, columns = (np.maximum(_joined(each, sets, np.max), 1e-5) for each in (peak, largest))
    return _bounded(inputs**strength / columns ** (1 - strength))


def _joined(values: Doubles, sets: Sets | None, of: Callable[..., Doubles]) -> Doubles:
    """Return the values, or for inputs that must have one factor together the same value."""
    if sets is None:
        return values
    each = of(values.reshape(sets), axis=1, keepdims=True)
    return np.broadcast_to(each, sets).reshape(-1)


def _bounded(factors: Doubles) -> F32:
    """Return factors around 1."""
    factors = factors / np.sqrt(factors.max() * factors.min())
    return np.clip(factors, 1 / _RANGE, _RANGE).astype(np.float32)
