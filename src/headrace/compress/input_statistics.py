"""Gathers what a method needs to know of a product's inputs, a chunk of rows at a time: never all of the rows."""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace.compress.layer_pass import F32

SAMPLES: Final = 512  # rows that are kept as they are


class InputStatistics:
    """Statistics of the rows that a product multiplies. A mixture's expert may get none."""

    def __init__(self, inputs: int, *, total: int, hessian: bool = False) -> None:
        """`total` is about how many rows are to come: the samples are spread over them."""
        self.rows = 0
        self.mean_abs = np.zeros(inputs, dtype=np.float64)
        self.mean_square = np.zeros(inputs, dtype=np.float64)
        self.peak = np.zeros(inputs, dtype=np.float32)
        self.hessian: F32 | None = np.zeros((inputs, inputs), dtype=np.float32) if hessian else None
        self._step = max(1, total // SAMPLES)
        self._samples: list[F32] = []
        self._next = 0  # row that is sampled next

    def add(self, rows: F32) -> None:
        count = len(rows)
        if not count:
            return
        size = np.abs(rows)
        share = count / (self.rows + count)
        self.mean_abs += (size.mean(axis=0, dtype=np.float64) - self.mean_abs) * share
        self.mean_square += (np.square(rows).mean(axis=0, dtype=np.float64) - self.mean_square) * share
        np.maximum(self.peak, size.max(axis=0), out=self.peak)
        if self.hessian is not None:
            self.hessian *= np.float32(1 - share)
            self.hessian += (rows.T @ rows) * np.float32(share / count)
        if self._next < self.rows + count:
            self._samples.append(rows[self._next - self.rows :: self._step].copy())
            self._next += len(self._samples[-1]) * self._step
        self.rows += count

    @property
    def samples(self) -> F32:
        """Rows spread over all that were added; at least SAMPLES of them if there were as many."""
        if not self._samples:
            return np.zeros((0, len(self.peak)), dtype=np.float32)
        return np.concatenate(self._samples)
