"""Causal attention in torch, as training on a CPU computes it fastest. Knows no model."""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as functional
from torch import Tensor

PLAIN_ATTENTION: Final = 768  # tokens; the longest rows whose attention is computed without torch's fused kernel


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of [rows, heads, length, size] on keys and values of fewer heads.

    Rows are padded at their end, where a causal mask already hides what is no text. `scale` multiplies the scores
    (default: size ** -0.5), `window` is the number of tokens that a query sees (0: all), `softcap` bounds scores.
    """
    rows, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    factor = size**-0.5 if scale is None else scale
    limited = 0 < window < length
    if (queries.is_cuda or length > PLAIN_ATTENTION) and not limited and not softcap:
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=factor)
    # On a CPU the backward of torch's fused attention is slow for short rows: three plain steps take a quarter off the
    # whole training step. The query heads that share a KV head are the rows of one product.
    places = torch.arange(length, device=queries.device)
    hidden = places > places[:, None]
    if limited:
        hidden |= places <= places[:, None] - window
    queries = (queries * factor).reshape(rows * kv_heads, shared * length, size)
    scores = torch.bmm(queries, keys.reshape(rows * kv_heads, length, size).transpose(1, 2))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden.repeat(shared, 1), -torch.inf).softmax(-1, dtype=torch.float32).to(values.dtype)
    mixed = torch.bmm(weights, values.reshape(rows * kv_heads, length, size))
    return mixed.view(rows, heads, length, size)
