"""Chooses which weights of a matrix become 0: by magnitude, by Wanda, or by SparseGPT, which corrects the others.

Wanda (Sun et al. 2023) weighs a magnitude by the size of its input. SparseGPT (Frantar and Alistarh 2023) goes through
the columns as GPTQ does and moves the error of a removed weight into the columns that follow. Knows one matrix at a
time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.compress.gptq import inverse_factor
from headrace.compress.input_statistics import InputStatistics
from headrace.compress.layer_pass import F32
from headrace.errors import RequestError

PRUNERS: Final = ("sparsegpt", "wanda", "magnitude")
STRUCTURED: Final = "2:4"  # two of every four neighbours are 0
_BLOCK: Final = 128  # columns whose removed weights are chosen together

Mask = NDArray[np.bool_]  # of weights that stay


def parse_sparsity(text: str) -> str:
    """Return "2:4", or a share such as "0.5" in one form."""
    if text.strip() == STRUCTURED:
        return STRUCTURED
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise RequestError(
            f"'sparsity' must be {STRUCTURED} or a share between 0 and 1 such as 0.5, not {text}.", parameter="sparsity"
        )
    return f"{share:g}"


def prune(weights: F32, statistics: InputStatistics, pruner: str, sparsity: str, *, damping: float = 0.01) -> F32:
    """Return the weights with zeros. Without inputs, as an expert may have none, magnitudes decide."""
    if pruner == "sparsegpt" and statistics.rows and statistics.hessian is not None:
        return _prune_with_correction(weights, statistics.hessian, sparsity, damping)
    scores = np.abs(weights)
    if pruner == "magnitude" or not statistics.rows:
        # A share is taken of the whole matrix: some outputs keep more than others.
        return weights * keep(scores, sparsity, by_row=False)
    return weights * keep(scores * np.sqrt(statistics.mean_square).astype(np.float32), sparsity, by_row=True)


def keep(scores: F32, sparsity: str, *, by_row: bool) -> Mask:
    """Return a mask of the highest scores: of every four neighbours, of each row, or of all."""
    if sparsity == STRUCTURED:
        fours = scores.reshape(len(scores), -1, 4)
        return (np.argsort(np.argsort(-fours, axis=2, kind="stable"), axis=2) < 2).reshape(scores.shape)
    flat = scores if by_row else scores.reshape(1, -1)
    removed = int(flat.shape[1] * float(sparsity))
    mask = np.ones(flat.shape, dtype=np.bool_)
    if removed:
        np.put_along_axis(mask, np.argpartition(flat, removed - 1, axis=1)[:, :removed], False, axis=1)
    return mask.reshape(scores.shape)


def _prune_with_correction(weights: F32, hessian: F32, sparsity: str, damping: float) -> F32:
    upper = inverse_factor(hessian, damping).astype(np.float32)
    diagonal = np.diag(upper)
    left = weights.copy()
    inputs = weights.shape[1]
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        block = np.asfortranarray(left[:, start:stop])
        kept = np.empty(block.shape, dtype=np.bool_)
        if sparsity != STRUCTURED:
            kept = keep(np.square(block / diagonal[start:stop]), sparsity, by_row=False)
        errors = np.empty_like(block)
        for at in range(stop - start):
            column = start + at
            if sparsity == STRUCTURED and at % 4 == 0:
                four = slice(at, at + 4)
                scores = np.square(block[:, four] / diagonal[column : column + 4])
                kept[:, four] = keep(np.ascontiguousarray(scores), sparsity, by_row=True)
            value = block[:, at] * kept[:, at]
            errors[:, at] = (block[:, at] - value) / upper[column, column]
            block[:, at] = value
            block[:, at + 1 :] -= np.outer(errors[:, at], upper[column, column + 1 : stop])
        left[:, start:stop] = block
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return left


def zeros(weights: F32) -> float:
    """Return the share of weights that are 0."""
    return 1 - np.count_nonzero(weights) / max(weights.size, 1)
