"""Times attention with the whole matrix of scores beside tiled attention, and separate products beside joined ones.

Both arms are numpy on the same arrays, so the ratio is that of the technique and not of a language: the core's kernels
do the tiled and joined forms in C++. Memory is counted, not sampled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
TILE = 64  # tokens, as in the core


class KernelResult(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the rounds, in seconds; bytes of intermediate results."""

    technique: str
    tokens: int
    plain_s: float
    better_s: float
    plain_bytes: int
    better_bytes: int
    difference: float  # largest between the two results

    @property
    def times(self) -> float:
        return self.plain_s / self.better_s


def full_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention with all scores at once: [heads, tokens, size] each."""
    tokens = q.shape[1]
    scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[2]))
    scores[:, np.triu(np.ones((tokens, tokens), dtype=bool), 1)] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    return scores @ v


def tiled_attention(q: Floats, k: Floats, v: Floats, tile: int = TILE) -> Floats:
    """The same with a running maximum over tiles of keys; tiles after the diagonal are skipped."""
    heads, tokens, size = q.shape
    out = np.empty_like(q)
    scale = np.float32(1.0 / np.sqrt(size))
    for begin in range(0, tokens, tile):
        end = min(begin + tile, tokens)
        rows = q[:, begin:end] * scale
        most = np.full((heads, end - begin, 1), -np.inf, dtype=np.float32)
        total = np.zeros((heads, end - begin, 1), dtype=np.float32)
        value = np.zeros((heads, end - begin, size), dtype=np.float32)
        for at in range(0, end, tile):
            stop = min(at + tile, end)
            scores = rows @ k[:, at:stop].transpose(0, 2, 1)
            if at == begin:
                scores[:, np.triu(np.ones((end - begin, stop - at), dtype=bool), 1)] = -np.inf
            peak = np.maximum(most, scores.max(axis=2, keepdims=True))
            np.exp(scores - peak, out=scores)
            kept = np.exp(most - peak)
            total = total * kept + scores.sum(axis=2, keepdims=True)
            value = value * kept + scores @ v[:, at:stop]
            most = peak
        out[:, begin:end] = value / total
    return out


def compare_attention(tokens: int, *, heads: int = 4, size: int = 64, rounds: int = 3, seed: int = 0) -> KernelResult:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((heads, tokens, size), dtype=np.float32) for _ in range(3))
    plain, better, difference = _timed(lambda: full_attention(q, k, v), lambda: tiled_attention(q, k, v), rounds)
    tile = min(TILE, tokens)
    return KernelResult(
        technique="tiled attention",
        tokens=tokens,
        plain_s=plain,
        better_s=better,
        plain_bytes=4 * heads * tokens * tokens,
        better_bytes=4 * heads * tile * (tile + size + 2),
        difference=difference,
    )


def compare_fusion(
    tokens: int, *, hidden: int = 256, inner: int = 768, kv: int = 128, rounds: int = 3, seed: int = 0
) -> KernelResult:
    """Compare q, k, v, gate and up as five products with two joined ones, the activation in place."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32)
    sizes = (hidden, kv, kv, inner, inner)
    parts = [rng.standard_normal((hidden, each), dtype=np.float32) / np.float32(np.sqrt(hidden)) for each in sizes]
    qkv, gate_up = np.concatenate(parts[:3], axis=1), np.concatenate(parts[3:], axis=1)

    def separate() -> Floats:
        q, k, v, gate, up = (x @ part for part in parts)
        grown = np.exp(-gate)
        sigmoid = np.reciprocal(grown + np.float32(1.0))
        silu = np.multiply(gate, sigmoid)
        return np.concatenate([q, k, v, np.multiply(silu, up)], axis=1).astype(np.float32, copy=False)

    def joined() -> Floats:
        out = np.empty((tokens, hidden + 2 * kv + inner), dtype=np.float32)
        np.matmul(x, qkv, out=out[:, : hidden + 2 * kv])
        both = x @ gate_up
        gate, up, target = both[:, :inner], both[:, inner:], out[:, hidden + 2 * kv :]
        np.negative(gate, out=target)
        np.exp(target, out=target)
        target += 1.0
        np.divide(gate, target, out=target)
        target *= up
        return out

    plain, better, difference = _timed(separate, joined, rounds)
    outputs = hidden + 2 * kv
    return KernelResult(
        technique="joined products",
        tokens=tokens,
        plain_s=plain,
        better_s=better,
        plain_bytes=4 * tokens * (outputs + 5 * inner),  # and exp, sigmoid and silu
        better_bytes=4 * tokens * 2 * inner,
        difference=difference,
    )


def _timed(plain: Callable[[], Floats], better: Callable[[], Floats], rounds: int) -> tuple[float, float, float]:
    difference = float(np.abs(plain() - better()).max())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for found, run in zip(times, (plain, better), strict=True):
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1]), difference
