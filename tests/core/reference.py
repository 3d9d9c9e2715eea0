"""The forward pass of any ModelSpec in plain float64 numpy, one sequence at a time.

Owns the mathematics that the core is held to, written from the spec's own words and sharing no code with the core.
Knows nothing of batches, blocks or formats, except that `stored` may round what would be kept in KV memory and `read`
the rows that a product of rounded weights reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.models.distance_buckets import spread_buckets
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec

Doubles = NDArray[np.float64]
Tensors = Mapping[str, NDArray[np.float32]]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def exact(values: Doubles) -> Doubles:
    return values


def bf16(values: Doubles) -> Doubles:
    """Rounded to the nearest bf16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def int8(values: Doubles) -> Doubles:
    """Rounded to 127 steps on either side, with one scale for each last axis."""
    scale = np.abs(values).max(axis=-1, keepdims=True) / 127
    return np.rint(values / np.where(scale > 0, scale, 1)) * scale


def f16_scale(values: Doubles, code: float) -> Doubles:
    """What a token's codes in the KV memory are multiplied by, of each last axis. `code`: of the largest value, and if
    it is negative the scale has the other sign."""
    largest = np.abs(values).max(axis=-1, keepdims=True)
    if code < 0:
        largest = np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)
    return (largest / code).astype(np.float16).astype(np.float64)


def int8_kv(values: Doubles) -> Doubles:
    """As int8, with a scale that is itself rounded to f16."""
    scale = f16_scale(values, 127)
    return np.clip(np.rint(values / np.where(scale > 0, scale, 1)), -127, 127) * scale


def int4_kv(values: Doubles) -> Doubles:
    scale = f16_scale(values, -8)
    return np.clip(np.rint(values / np.where(scale != 0, scale, 1)), -8, 7) * scale


def fp8_kv(values: Doubles) -> Doubles:
    """Three bits of fraction, and exponents from -6 to 8."""
    scale = f16_scale(values, 448)
    codes = np.clip(values / np.where(scale > 0, scale, 1), -448, 448)
    exponent = np.floor(np.log2(np.maximum(np.abs(codes), 2.0**-6)))
    step = np.exp2(exponent - 3)
    return np.rint(codes / step) * step * scale


def int8_rows(format: str, group: int) -> Callable[[Doubles], Doubles]:
    """Rounds each group of a row by itself, for weights of that format; group 0 is the whole row."""
    if (format, group) == ("int4", 32):
        group = 128  # groups whose scales are multiples of one share a row's scale too

    def rounded(values: Doubles) -> Doubles:
        if not group:
            return int8(values)
        starts = range(0, values.shape[-1], group)
        return np.concatenate([int8(values[..., start : start + group]) for start in starts], axis=-1)

    return rounded


STORED: dict[str, Callable[[Doubles], Doubles]] = {
    "f32": exact,
    "bf16": bf16,
    "int8": int8_kv,
    "fp8": fp8_kv,
    "int4": int4_kv,
}
LARGEST_CODE: dict[Callable[[Doubles], Doubles], float] = {int8_kv: 127, fp8_kv: 448, int4_kv: -8}


def rotation(width: int) -> Doubles:
    """The symmetric orthogonal matrix that a head of this width is rotated by; the identity if it cannot be."""
    if width % 16:
        return np.eye(width)
    columns = width & -width
    odd = width // columns
    parts = max(part for part in range(1, min(odd, 63) + 1, 2) if odd % part == 0)
    turns = 2 * np.pi * np.outer(np.arange(parts), np.arange(parts)) / parts
    bits = np.arange(columns)[:, None] & np.arange(columns)[None, :]
    signs = np.array([[(-1.0) ** int(value).bit_count() for value in row] for row in bits])
    block = np.kron(np.cos(turns) + np.sin(turns), signs) / math.sqrt(columns * parts)
    return np.kron(np.eye(odd // parts), block)


def rounded_weights(scores: Doubles, scale: Doubles) -> Doubles:
    """Weights [heads, rows, tokens] of scores in powers of two, each rounded beside the largest score up to its chunk.

    What is rounded is the weight times its token's scale; the sum that all are divided by is of unrounded weights.
    """
    chunk = np.arange(scores.shape[2]) // 64
    ends = np.append(np.flatnonzero(np.diff(chunk)), len(chunk) - 1)
    peaks = np.maximum.accumulate(scores, axis=2)[:, :, ends][:, :, chunk]
    last = peaks[:, :, -1:]
    with np.errstate(invalid="ignore"):  # of chunks before the first token that a row sees
        rounded = bf16(np.exp2(scores - peaks) * scale[:, None, :]) / scale[:, None, :] * np.exp2(peaks - last)
    return np.where(np.isneginf(scores), 0.0, rounded) / np.exp2(scores - last).sum(axis=2, keepdims=True)


def sigmoid(values: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-values))


def forward(
    spec: ModelSpec,
    tensors: Tensors,
    tokens: Sequence[int],
    *,
    variant: int = 0,
    stored: Callable[[Doubles], Doubles] = exact,
    read: Callable[[Doubles], Doubles] = exact,
    twos: bool = False,
    hidden: bool = False,
    second: int = -1,
) -> Doubles:
    """Logits of every token, or its final hidden state. `twos`: attention rounds to bf16 what meets keys and values."""

    def weight(name: str) -> Doubles:
        return tensors[name].astype(np.float64)

    def product(name: str, x: Doubles) -> Doubles:
        y = read(x) @ weight(name).T
        return y + weight(f"{name}.bias") if f"{name}.bias" in tensors else y

    def by_head(name: str, x: Doubles, outputs: int) -> Doubles:
        heads = weight(name).reshape(spec.heads, -1, x.shape[2])[:, :outputs]
        return np.einsum("ihd,hod->iho", read(x), heads)

    def norm(name: str, x: Doubles) -> Doubles:
        if spec.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        y = rms(x, spec.norm_eps) * weight(name)
        return y + weight(f"{name}.bias") if f"{name}.bias" in tensors else y

    def mlp(name: str, x: Doubles, inner: int) -> Doubles:
        if spec.activation == "clamped_silu":
            both = product(f"{name}.gate_up", x)
            gate, up = np.minimum(both[:, :inner], spec.gate_limit), both[:, inner:]
            opened = gate * sigmoid(spec.gate_slope * gate) * (np.clip(up, -spec.gate_limit, spec.gate_limit) + 1)
        elif spec.gated:
            both = product(f"{name}.gate_up", x)
            opened = activation(spec.activation, both[:, :inner]) * both[:, inner:]
        else:
            opened = activation(spec.activation, product(f"{name}.up", x))
        return product(f"{name}.down", opened)

    def mixture(name: str, x: Doubles, routed: Doubles | None = None) -> Doubles:
        """`routed`: what the router reads, x itself by default."""
        experts = spec.experts
        assert experts is not None
        scores = (x if routed is None else routed) @ weight(f"{name}.router").T
        if experts.bias:
            scores = scores + weight(f"{name}.router.bias")
        chances = sigmoid(scores) if experts.scoring == "sigmoid" else softmax(scores)
        y = np.zeros_like(x)
        for row, chance in enumerate(chances):
            rank = chance + weight(f"{name}.router_bias") if experts.correction else chance
            if experts.groups > 1:
                parts = rank.reshape(experts.groups, -1)
                groups = np.sort(parts, axis=1)[:, -experts.group_best :].sum(axis=1)
                left_out = np.argsort(-groups, kind="stable")[experts.top_groups :]
                rank = parts.copy()
                rank[left_out] = -np.inf
                rank = rank.ravel()
            best = np.argsort(-rank)[: experts.top_k]
            if experts.margin:
                best, weights = near_best(scores[row], experts.top_k, experts.margin)
                chance = np.zeros_like(chance)
                chance[best] = weights
            share = experts.scale * chance[best] / (chance[best].sum() if experts.normalise else 1.0)
            if experts.beside:
                share = share * weight(f"{name}.expert_scales")[best]
            for expert, part in zip(best, share, strict=True):
                read, counted = (part, 1.0) if experts.scales_inputs else (1.0, part)
                one = mlp(f"{name}.experts.{expert}", x[row : row + 1] * read, experts.intermediate_size)
                y[row] += counted * one[0]
        if experts.shared_size:
            part = sigmoid(x @ weight(f"{name}.shared_gate").T) if experts.shared_gate else np.float64(1)
            y = y + part * mlp(f"{name}.shared", x, experts.shared_size)
        return y

    def both(name: str, x: Doubles, h: Doubles, layer: LayerSpec) -> Doubles:
        """What an MLP and the experts beside it add: the MLP reads h, and the experts read x through their own norm."""
        routed = rms(x, spec.norm_eps) * weight(f"{name}.router_norm") / math.sqrt(spec.hidden_size)
        dense = norm(f"{name}.dense_out_norm", mlp(name, h, spec.inner_size(layer)))
        return dense + norm(f"{name}.experts_out_norm", mixture(name, norm(f"{name}.experts_norm", x), routed))

    def layer_inputs(x: Doubles) -> Doubles:
        """[tokens, layers, size]."""
        inputs = spec.layer_inputs
        assert inputs is not None
        own = weight("inputs.embed")[[token if token < inputs.vocab else 0 for token in tokens]]
        made = product("inputs.in", x).reshape(len(x), -1, inputs.size) / math.sqrt(spec.hidden_size)
        made = rms(made, spec.norm_eps) * weight("inputs.norm")
        return (made + own.reshape(made.shape) * math.sqrt(inputs.size)) / math.sqrt(2)

    def around(
        name: str, x: Doubles, sublayer: Callable[[Doubles], Doubles], read: Doubles | None = None, pre: str = ""
    ) -> Doubles:
        """Add a sublayer to x. `read`: what it reads, x itself by default; `pre`: whose norm it reads that through."""
        before = f"{pre or name}.norm"
        read = x if read is None else read
        y = sublayer(norm(before, read) if before in tensors else read)
        x = x + (norm(f"{name}.out_norm", y) if spec.out_norm else y)
        return norm(f"{name}.residual_norm", x) if spec.residual_norm else x

    def attention(name: str, index: int, h: Doubles) -> Doubles:
        count = len(h)
        layer = spec.layers[index]
        kv_heads, size, value_size = spec.kv_shape(layer)
        if (latent := spec.latent) is not None:
            first = latent.query_rank or spec.q_size
            q, turning, narrow = np.split(product(f"{name}.qkv", h), [first, first + latent.turning], axis=1)
            if latent.query_rank:
                q = product(f"{name}.q_up", rms(q, 1e-6) * weight(f"{name}.q_latent_norm"))
            narrow = rms(narrow, 1e-6) * weight(f"{name}.kv_latent_norm")
        if latent is not None and latent.kept:
            still = q.reshape(count, spec.heads, -1)[..., latent.turning :]
            still = by_head(f"{name}.q_to_latent", still, latent.rank)
            q = np.concatenate([q.reshape(count, spec.heads, -1)[..., : latent.turning], still], axis=2)
            k, v = np.concatenate([turning, narrow], axis=1), narrow
        elif latent is not None:
            both = product(f"{name}.kv_up", narrow)
            still, v = np.split(both.reshape(count, spec.heads, -1), [spec.head_size - latent.turning], axis=2)
            k = np.concatenate([np.repeat(turning[:, None], spec.heads, axis=1), still], axis=2)
        else:
            ends = [spec.heads * size, (spec.heads + kv_heads) * size]
            q, k, v = np.split(product(f"{name}.qkv", h), ends, axis=1)
        if spec.qk_norm == "full":
            q, k = rms(q, spec.norm_eps) * weight(f"{name}.q_norm"), rms(k, spec.norm_eps) * weight(f"{name}.k_norm")
        q, k, v = (x.reshape(count, -1, wide) for x, wide in ((q, size), (k, size), (v, value_size)))
        if spec.qk_norm == "head":
            q, k = rms(q, spec.norm_eps) * weight(f"{name}.q_norm"), rms(k, spec.norm_eps) * weight(f"{name}.k_norm")
        if spec.qk_norm == "each_head":
            q, k = (
                rms(x - x.mean(axis=-1, keepdims=True), spec.norm_eps) * weight(f"{name}.{kind}").reshape(x.shape[1:])
                for x, kind in ((q, "q_norm"), (k, "k_norm"))
            )
        if spec.qk_norm == "unit" and layer.qk_norm:
            q, k = rms(q, spec.norm_eps), rms(k, spec.norm_eps)
        if layer.grows:
            steps = (np.arange(count) + 1) // spec.growth_tokens
            q = q * (1 + spec.query_growth * np.log1p(steps))[:, None, None]
        if layer.rope is not None:
            q, k = (rotated(x, spec.ropes[layer.rope], variant) for x in (q, k))
        # The dims of a key that are rotated together.
        parts = [size - value_size, value_size] if spec.values_in_keys else [size]
        turns = stored in (int8_kv, int4_kv) and not any(wide % 16 for wide in (*parts, value_size))
        turn_values, *turn_parts = (rotation(wide) if turns else np.eye(wide) for wide in (value_size, *parts))
        turn = np.zeros((size, size))
        for part, first in zip(turn_parts, (0, size - value_size), strict=False):
            turn[first : first + len(part), first : first + len(part)] = part
        q, k, v = q @ turn, k @ turn, v @ turn_values
        # What a token's codes are multiplied by, where it has codes.
        scaled = k if spec.values_in_keys else v
        v_scale = f16_scale(scaled, LARGEST_CODE[stored])[..., 0] if stored in LARGEST_CODE else np.ones(v.shape[:2])
        k, v = stored(k), stored(v)
        if spec.values_in_keys:
            v = k[..., size - value_size :]
        repeat = spec.heads // kv_heads
        k, v, v_scale = (np.repeat(x, repeat, axis=1) for x in (k, v, v_scale))
        unit = 1 / math.log(2) if twos else 1.0
        q = q * spec.attention_scale * unit
        scores = np.einsum("ihd,jhd->hij", bf16(q) if twos else q, k)
        if spec.attention_softcap:
            cap = spec.attention_softcap * unit
            scores = cap * np.tanh(scores / cap)
        i, j = np.arange(count)[:, None], np.arange(count)[None, :]
        if spec.distance_buckets:
            table = spread_buckets(tensors["distances"], spec.max_distance).astype(np.float64)
            scores = scores + table[:, np.clip(j - i, -spec.max_distance, spec.max_distance) + spec.max_distance] * unit
        if spec.alibi:
            scores = scores - np.array(spec.alibi)[:, None, None] * abs(j - i) * unit
        seen = (j <= i) if spec.causal else np.full((count, count), True)
        if layer.chunk:
            seen &= j // layer.chunk == i // layer.chunk
        if layer.window:
            seen &= abs(j - i) < layer.window
        scores = np.where(seen, scores, -np.inf)
        if spec.sinks:  # before all tokens, where the core's running maximum begins
            sinks = np.broadcast_to(weight(f"{name}.sinks")[:, None, None] * unit, (spec.heads, count, 1))
            scores = np.concatenate([sinks, scores], axis=2)
            v_scale = np.concatenate([np.ones_like(v_scale[:1]), v_scale])
            v = np.concatenate([np.zeros_like(v[:1]), v])
        weights = rounded_weights(scores, v_scale.T) if twos else softmax(scores)
        attended = np.einsum("hij,jhd->ihd", weights, v) @ turn_values
        if latent is not None and latent.kept:
            attended = by_head(f"{name}.v_from_latent", attended, latent.value_size)
        return product(f"{name}.o", attended.reshape(count, -1))

    x = weight("embed")[list(tokens)] * spec.embedding_scale
    if spec.token_types:
        x = x + weight("token_types")[[int(0 <= second <= place) for place in range(len(tokens))]]
    if spec.learned_positions:
        x = x + weight("positions")[: len(tokens)]
    if spec.embedding_norm:
        x = norm("embed_norm", x)
    inputs = layer_inputs(x) if spec.layer_inputs is not None else None
    for index, layer in enumerate(spec.layers):
        attn, feed = f"layers.{index}.attn", f"layers.{index}.mlp"
        before = x if spec.parallel else None
        pre = attn if spec.shared_norm else ""
        x = around(attn, x, lambda h, attn=attn, index=index: attention(attn, index, h))
        if layer.experts and spec.experts is not None and spec.experts.beside:
            x = around(feed, x, lambda h, feed=feed, x=x, layer=layer: both(feed, x, h, layer))
        elif layer.experts:
            x = around(feed, x, lambda h, feed=feed: mixture(feed, h), before, pre)
        else:
            x = around(feed, x, lambda h, feed=feed, layer=layer: mlp(feed, h, spec.inner_size(layer)), before, pre)
        if inputs is not None:
            own = f"layers.{index}.inputs"
            opened = activation(spec.activation, product(f"{own}.in", x)) * inputs[:, index]
            x = x + norm(f"{own}.norm", product(f"{own}.out", opened))
        if spec.layer_scale:
            x = x * weight(f"layers.{index}.scale")
    if spec.final_norm:
        x = norm("norm", x)
    if hidden:
        return x
    logits = read(x) @ weight("embed" if spec.tied else "head").T
    if spec.head_bias:
        logits = logits + weight("head.bias")
    return spec.logit_softcap * np.tanh(logits / spec.logit_softcap) if spec.logit_softcap else logits


def near_best(scores: Doubles, count: int, margin: float) -> tuple[list[int], list[float]]:
    """Choose so many experts one by one; weigh each by a softmax over scores near the best of those left."""
    left, chosen, weights = scores.copy(), list[int](), list[float]()
    for _ in range(count):
        best = int(np.argmax(left))
        distance = (left[best] - scores) / np.maximum(abs(scores), left[best])
        near = np.where(distance > 2 * margin, -np.inf, left)
        chosen.append(best)
        weights.append(float(softmax(near)[best]))
        left[best] = -np.inf
    return chosen, weights


def rms(x: Doubles, eps: float) -> Doubles:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def softmax(x: Doubles) -> Doubles:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def activation(kind: str, x: Doubles) -> Doubles:
    match kind:
        case "silu":
            return x / (1.0 + np.exp(-x))
        case "gelu":
            return x / 2 * (1.0 + _erf(x / math.sqrt(2.0)))
        case "gelu_tanh":
            return x / 2 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        case "quick_gelu":
            return x / (1.0 + np.exp(-1.702 * x))
        case _:
            assert kind == "relu"
            return np.maximum(x, 0.0)


def rotated(x: Doubles, rope: RopeSpec, variant: int) -> Doubles:
    """[tokens, heads, dims] turned by each token's position; dims beyond the table stay."""
    table, scale = rope.inv_freq, rope.scale
    if variant and rope.long_inv_freq is not None:
        table, scale = rope.long_inv_freq, rope.long_scale
    half = len(table)
    # The angle itself is an f32, as in every implementation that models are trained and published with.
    positions = np.arange(len(x), dtype=np.float32)[:, None, None]
    angles = (positions * np.array(table, dtype=np.float32)).astype(np.float64)
    cosine, sine = np.cos(angles) * scale, np.sin(angles) * scale
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cosine - second * sine, second * cosine + first * sine, x[..., 2 * half :]]
    return np.concatenate(turned, axis=-1)
