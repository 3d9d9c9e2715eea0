"""Pools the key and value heads of a layer into fewer (multi-head to grouped-query attention, Ainslie et al. 2023).

Before heads are averaged they are turned towards each other, which leaves the layer the same: values by any rotation,
which goes into the output product, and keys by a rotation of each pair of dims that the rope turns, which goes into the
queries. Knows one layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.compress.layer_pass import F32, LayerPass


def pool_heads(layer: LayerPass, inputs: F32, kv_heads: int) -> dict[str, F32]:
    """Return `attn.qkv` (and its bias) and `attn.o` with `kv_heads` key and value heads. `inputs` are rows of the
    layer's attention inputs, by which heads are aligned."""
    spec = layer.spec
    size, share = spec.head_size, spec.kv_heads // kv_heads
    q, k, v = (part.copy() for part in np.split(_with_bias(layer), (spec.q_size, spec.q_size + spec.kv_size)))
    rows = inputs if "attn.qkv.bias" not in layer.tensors else np.hstack([inputs, np.ones_like(inputs[:, :1])])
    o = layer.tensors["attn.o"].copy()
    queries = spec.heads // spec.kv_heads
    turns = spec.qk_norm == "none" and layer.layer.rope is not None
    pairs = len(spec.ropes[layer.layer.rope or 0].inv_freq) if spec.ropes else 0
    pooled_k, pooled_v = list[F32](), list[F32]()
    for group in range(kv_heads):
        heads = range(group * share, (group + 1) * share)
        first = slice(heads[0] * size, (heads[0] + 1) * size)
        for head in heads[1:]:
            own = slice(head * size, (head + 1) * size)
            of_queries = slice(head * queries * size, (head + 1) * queries * size)
            rotation = _rotation(rows @ v[own].T, rows @ v[first].T)
            v[own] = rotation.T @ v[own]
            columns = o[:, of_queries].reshape(len(o), queries, size)
            o[:, of_queries] = (columns @ rotation).reshape(len(o), -1)
            if turns:
                turn = _pair_turns(rows @ k[own].T, rows @ k[first].T, pairs)
                k[own] = turn @ k[own]
                turned = turn @ q[of_queries].reshape(queries, size, -1)
                q[of_queries] = turned.reshape(queries * size, -1)
        pooled_k.append(_mean(k, heads, size))
        pooled_v.append(_mean(v, heads, size))
    joined = np.concatenate([q, *pooled_k, *pooled_v])
    if "attn.qkv.bias" not in layer.tensors:
        return {"attn.qkv": joined, "attn.o": o}
    return {"attn.qkv": joined[:, :-1], "attn.qkv.bias": joined[:, -1], "attn.o": o}


def _with_bias(layer: LayerPass) -> F32:
    """Return the weights with the bias as one more column: both are turned and averaged alike."""
    weights, bias = layer.tensors["attn.qkv"], layer.tensors.get("attn.qkv.bias")
    return weights if bias is None else np.hstack([weights, bias[:, None]])


def _mean(rows: F32, heads: range, size: int) -> F32:
    return rows[heads[0] * size : (heads[-1] + 1) * size].reshape(len(heads), size, -1).mean(axis=0)


def _rotation(values: F32, target: F32) -> F32:
    """Return the orthogonal matrix that brings rows of values closest to the target's (Procrustes)."""
    left, _, right = np.linalg.svd(values.T.astype(np.float64) @ target)
    return (left @ right).astype(np.float32)


def _pair_turns(keys: F32, target: F32, pairs: int) -> F32:
    """Return the matrix that turns each pair of dims by the angle that brings keys closest to the target's."""
    size = keys.shape[1]
    turn = np.eye(size, dtype=np.float32)
    one = keys[:, :pairs] + 1j * keys[:, pairs : 2 * pairs]
    other = target[:, :pairs] + 1j * target[:, pairs : 2 * pairs]
    angles: NDArray[np.float64] = np.angle((np.conj(one) * other).sum(axis=0))
    first, second = np.arange(pairs), np.arange(pairs, 2 * pairs)
    turn[first, first] = turn[second, second] = np.cos(angles)
    turn[first, second], turn[second, first] = -np.sin(angles), np.sin(angles)
    return turn
