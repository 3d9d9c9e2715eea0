"""Quantises weights to the K-quant blocks that the package gguf only reads: Q4_K and Q6_K, by rounding.

Plainer than llama.cpp's search for scales, so a file made with it is not the best of its kind; both engines read the
same file, which is all that a comparison needs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BLOCK = 256


def _ratio(numerator: F32, denominator: F32) -> F32:
    """Divide, with 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def _half(values: F32) -> Bytes:
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)


def q4_k(values: F32) -> Bytes:
    """[rows, inputs] to [rows, bytes]: eight groups of 32 with scales and minima of six bits."""
    groups = values.reshape(-1, 8, 32)
    minima = np.maximum(-groups.min(2), 0)
    scales = (groups.max(2) + minima) / 15
    d, dmin = scales.max(1, keepdims=True) / 63, minima.max(1, keepdims=True) / 63
    d, dmin = d.astype(np.float16).astype(np.float32), dmin.astype(np.float16).astype(np.float32)
    six = np.clip(np.rint(_ratio(scales, np.broadcast_to(d, scales.shape))), 0, 63).astype(np.uint8)
    low = np.clip(np.rint(_ratio(minima, np.broadcast_to(dmin, minima.shape))), 0, 63).astype(np.uint8)
    scale, minimum = (d * six)[:, :, None], (dmin * low)[:, :, None]
    codes = np.clip(np.rint(_ratio(groups + minimum, np.broadcast_to(scale, groups.shape))), 0, 15).astype(np.uint8)
    first = six[:, :4] | ((six[:, 4:] >> 4) << 6)
    second = low[:, :4] | ((low[:, 4:] >> 4) << 6)
    third = (six[:, 4:] & 15) | ((low[:, 4:] & 15) << 4)
    pairs = codes.reshape(-1, 4, 2, 32)
    data = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.hstack([_half(d), _half(dmin), first, second, third, data]).reshape(len(values), -1)


def q6_k(values: F32) -> Bytes:
    """[rows, inputs] to [rows, bytes]: sixteen groups of 16 with scales of eight bits."""
    groups = values.reshape(-1, 16, 16)
    largest = np.abs(groups).max(2)
    d = (largest.max(1, keepdims=True) / 32 / 127).astype(np.float16).astype(np.float32)
    eight = np.clip(np.rint(_ratio(largest / 32, np.broadcast_to(d, largest.shape))), 0, 127).astype(np.int8)
    scale = (d * eight)[:, :, None]
    codes = np.clip(np.rint(_ratio(groups, np.broadcast_to(scale, groups.shape))), -32, 31).astype(np.int8) + 32
    halves = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # each half: four runs of 32
    low = np.concatenate(
        [(halves[:, :, run] & 15) | ((halves[:, :, run + 2] & 15) << 4) for run in (0, 1)], axis=2
    ).reshape(-1, 128)
    high = np.zeros((len(codes), 2, 32), dtype=np.uint8)
    for run in range(4):
        high |= (halves[:, :, run] >> 4) << (2 * run)
    return np.hstack([low, high.reshape(-1, 64), eight.view(np.uint8), _half(d)]).reshape(len(values), -1)
