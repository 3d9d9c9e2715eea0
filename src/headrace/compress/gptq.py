"""Rounds a matrix column by column and corrects the columns that follow for the error (GPTQ, Frantar et al. 2022).

With act order the columns whose inputs are largest come first. Grids are fitted before, to the original columns, so
that groups stay runs of inputs and no reader needs a permutation.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.compress.grids import Grid, group_of
from headrace.compress.layer_pass import F32

_BLOCK: Final = 128  # columns that are rounded before the rest is corrected
_TRIANGLE: Final = 64  # order of the triangles that are inverted directly


def round_with_correction(
    weights: F32,
    grid: Grid,
    hessian: F32,
    *,
    act_order: bool = True,
    damping: float = 0.01,
    zeros: bool = False,
) -> NDArray[np.uint8]:
    """Return codes for [outputs, inputs]. `hessian` is the mean of the outer products of the input rows. With `zeros`
    the weights that are 0 stay so."""
    inputs = weights.shape[1]
    sizes: F32 = np.diag(hessian)
    order = np.argsort(-sizes if act_order else np.zeros(inputs), kind="stable")
    upper = inverse_factor(hessian[np.ix_(order, order)], damping).astype(np.float32)
    groups = group_of(inputs, grid.spec)[order]
    left = weights[:, order]  # a copy
    kept = left != 0 if zeros else None
    codes = np.empty(left.shape, dtype=np.uint8)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        block = np.asfortranarray(left[:, start:stop])
        errors = np.empty_like(block)
        for at in range(stop - start):
            column = start + at
            mine = groups[column : column + 1]
            wanted = block[:, at : at + 1]
            codes[:, column] = grid.codes(wanted if kept is None else wanted * kept[:, column, None], mine)[:, 0]
            value = grid.values(codes[:, column : column + 1], mine)[:, 0]
            errors[:, at] = (block[:, at] - value) / upper[column, column]
            block[:, at + 1 :] -= np.outer(errors[:, at], upper[column, column + 1 : stop])
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    found = np.empty_like(codes)
    found[:, order] = codes
    return found


def inverse_factor(hessian: NDArray[Any], damping: float) -> NDArray[Any]:
    """Return the upper U of which U.T @ U is the inverse of the damped matrix.

    Inputs that are always 0 get a diagonal of 1, and the damping grows until the matrix has a factor.
    """
    matrix = hessian.astype(np.float64)
    diagonal = np.einsum("ii->i", matrix)  # a view
    diagonal[diagonal == 0] = 1.0
    added = damping * float(diagonal.mean())
    while True:
        diagonal += added
        try:
            lower = np.linalg.cholesky(matrix[::-1, ::-1])
        except np.linalg.LinAlgError:
            added *= 10
            continue
        return _inverse_upper(lower[::-1, ::-1])


def _inverse_upper(upper: NDArray[Any]) -> NDArray[Any]:
    """Invert an upper triangle by halves, which is products of matrices."""
    size = len(upper)
    if size <= _TRIANGLE:
        return np.linalg.inv(upper)
    half = size // 2
    found = np.zeros_like(upper)
    found[:half, :half] = _inverse_upper(upper[:half, :half])
    found[half:, half:] = _inverse_upper(upper[half:, half:])
    found[:half, half:] = -found[:half, :half] @ upper[:half, half:] @ found[half:, half:]
    return found
