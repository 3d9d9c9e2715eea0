"""Fits a product by least squares to the outputs that it had before the inputs changed. Chooses nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from headrace.compress.layer_pass import F32

RIDGE: Final = 1e-2  # of the mean square of the inputs: how closely the fit keeps to the weights


def fit_product(weights: F32, old: F32, pairs: Iterable[tuple[F32, F32]]) -> F32:
    """Return weights near `weights` whose outputs on the new inputs are closest to those of `old` on the old ones."""
    width = weights.shape[1]
    gram = np.zeros((width, width), dtype=np.float32)
    cross = np.zeros((width, len(old)), dtype=np.float32)
    for new_inputs, old_inputs in pairs:
        gram += new_inputs.T @ new_inputs
        cross += new_inputs.T @ (old_inputs @ old.T)
    return fitted(weights, gram, cross)


def fitted(weights: F32, gram: F32, cross: F32, ridge: float | None = None) -> F32:
    """Return weights near `weights` for inputs with these sums of products, with each other and with the outputs."""
    matrix = gram.astype(np.float64)
    left = cross - matrix @ weights.T
    matrix[np.diag_indices_from(matrix)] += (RIDGE if ridge is None else ridge) * max(
        float(np.diag(matrix).mean()), 1e-30
    )
    return (weights + np.linalg.solve(matrix, left).T).astype(np.float32)
