"""Computes a decoder layer by layer in numpy and f32, so that one layer's weights are in memory at a time.

The core computes whole steps with weights that are packed already. Compression needs the inputs of each product, while
the products after it still change, and reads the layers of a model larger than memory one after the other. The result
is that of the core in f32. Knows nothing of quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.model_folder import ModelFolder
from headrace.models.spec import ModelSpec, NormKind, RopeSpec

F32 = NDArray[np.float32]
CHUNK_TOKENS: Final = 4096  # computed together; the memory of a pass beside hidden states and weights grows with it


class Tokens(NamedTuple):
    """Sequences of tokens, joined."""

    ids: NDArray[np.intp]
    offsets: tuple[int, ...]  # where each sequence begins, and the end of the last

    @classmethod
    def join(cls, sequences: Sequence[Sequence[int]]) -> Tokens:
        lengths = [len(sequence) for sequence in sequences]
        ids = np.concatenate([np.asarray(sequence, dtype=np.intp) for sequence in sequences])
        return cls(ids, (0, *(int(end) for end in np.cumsum(lengths))))

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in pairwise(self.offsets))

    def chunks(self, most: int = CHUNK_TOKENS) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Yield whole sequences of about `most` tokens: their rows, and their offsets from the first row."""
        first = 0
        for at in range(1, len(self.offsets)):
            if at + 1 == len(self.offsets) or self.offsets[at + 1] - self.offsets[first] > most:
                begin = self.offsets[first]
                yield slice(begin, self.offsets[at]), tuple(end - begin for end in self.offsets[first : at + 1])
                first = at


class MlpRows(NamedTuple):
    """Rows that go through one MLP: all of them, or those of an expert."""

    mlp: str  # "mlp", or "mlp.experts.3"
    rows: NDArray[np.intp] | slice
    shares: F32 | None  # of each row's output; None: all of it


def load_layer(folder: ModelFolder, index: int) -> dict[str, F32]:
    """Return a layer's tensors in f32, by their names within the layer: "attn.qkv"."""
    prefix = f"layers.{index}."
    names = [name for name in folder.shapes if name.startswith(prefix)]
    return {name.removeprefix(prefix): load_tensor(folder, name) for name in names}


def load_tensor(folder: ModelFolder, name: str) -> F32:
    """Return a canonical tensor in f32; norms as they are multiplied."""
    values = folder.tensor(name).to_f32()
    if folder.spec.norm_offset and is_norm(name):
        values = values + np.float32(folder.spec.norm_offset)
    if name in ("norm", "norm.bias"):
        values = values * np.float32(folder.spec.logit_scale)
    return values


def final_norm(folder: ModelFolder) -> tuple[F32, F32 | None] | None:
    """Return the weight and bias of the norm after the last layer."""
    if not folder.spec.final_norm:
        return None
    bias = load_tensor(folder, "norm.bias") if "norm.bias" in folder.shapes else None
    return load_tensor(folder, "norm"), bias


def is_norm(name: str) -> bool:
    return name.endswith("norm")


def embed(folder: ModelFolder, tokens: Tokens) -> F32:
    """Return the hidden states before the first layer."""
    table = folder.tensor("embed")
    rows = table.data[tokens.ids]  # converts only the rows that occur
    values = type(table)(table.name, table.dtype, rows.shape, rows, table.path).to_f32()
    return values * np.float32(folder.spec.embedding_scale)


def head_weight(folder: ModelFolder) -> F32:
    return folder.tensor("embed" if folder.spec.tied else "head").to_f32()


def head_logits(spec: ModelSpec, hidden: F32, norm: tuple[F32, F32 | None] | None, head: F32) -> F32:
    """Return logits of rows of hidden states after the last layer."""
    rows = hidden if norm is None else normalise(hidden, *norm, spec)
    logits = rows @ head.T
    if spec.logit_softcap:
        cap = np.float32(spec.logit_softcap)
        logits = cap * np.tanh(logits / cap)
    return logits


def normalise(rows: F32, weight: F32, bias: F32 | None, spec: ModelSpec, kind: NormKind | None = None) -> F32:
    if (kind or spec.norm) == "layer":
        rows = rows - rows.mean(axis=-1, keepdims=True)
    scale = 1 / np.sqrt(np.mean(np.square(rows), axis=-1, keepdims=True) + np.float32(spec.norm_eps))
    found = rows * scale * weight
    return found if bias is None else found + bias


class LayerPass:
    """One layer of a decoder. `tensors` may be replaced between calls; each call uses those of the moment."""

    def __init__(self, spec: ModelSpec, index: int, tensors: dict[str, F32]) -> None:
        self.spec = spec
        self.layer = spec.layers[index]
        self.tensors = tensors
        self.up = "gate_up" if spec.gated else "up"

    def attention_inputs(self, hidden: F32) -> F32:
        """Return the inputs of `attn.qkv`."""
        return self._norm("attn.norm", hidden) if self.spec.pre_norm else hidden

    def attend(self, inputs: F32, offsets: Sequence[int]) -> F32:
        """Return the inputs of `attn.o`."""
        spec = self.spec
        qkv = self.product("attn.qkv", inputs)
        out = np.empty((len(inputs), spec.q_size), dtype=np.float32)
        for begin, end in pairwise(offsets):
            out[begin:end] = self._attend_one(qkv[begin:end])
        return out

    def after_attention(self, hidden: F32, attended: F32) -> F32:
        return self._join("attn", hidden, self.product("attn.o", attended))

    def mlp_inputs(self, hidden: F32) -> F32:
        """Return the inputs of the MLP, and of the router."""
        return self._norm("mlp.norm", hidden) if self.spec.pre_norm else hidden

    def routes(self, inputs: F32) -> list[MlpRows]:
        """Return which rows go through which MLP. An expert without rows is listed too."""
        experts = self.spec.experts
        if not self.layer.experts or experts is None:
            return [MlpRows("mlp", slice(None), None)]
        shares = _softmax(inputs @ self.tensors["mlp.router"].T)
        order = np.argsort(-shares, axis=1, kind="stable")[:, : experts.top_k]
        chosen = np.take_along_axis(shares, order, axis=1)
        if experts.normalise:
            chosen = chosen / chosen.sum(axis=1, keepdims=True)
        found: list[MlpRows] = []
        for expert in range(experts.count):
            rows, places = np.nonzero(order == expert)
            found.append(MlpRows(f"mlp.experts.{expert}", rows, chosen[rows, places]))
        return found

    def open_mlp(self, mlp: str, inputs: F32) -> F32:
        """Return the inputs of `down` of an MLP."""
        inner = self.product(f"{mlp}.{self.up}", inputs)
        if not self.spec.gated:
            return activate(self.spec.activation, inner)
        gate, up = np.split(inner, 2, axis=1)
        return activate(self.spec.activation, gate) * up

    def after_mlp(self, hidden: F32, inputs: F32) -> F32:
        outputs = np.zeros_like(hidden)
        for route in self.routes(inputs):
            values = self.product(f"{route.mlp}.down", self.open_mlp(route.mlp, inputs[route.rows]))
            outputs[route.rows] += values if route.shares is None else values * route.shares[:, None]
        return self._join("mlp", hidden, outputs)

    def forward(self, hidden: F32, offsets: Sequence[int]) -> F32:
        """Return the hidden states after this layer."""
        hidden = self.after_attention(hidden, self.attend(self.attention_inputs(hidden), offsets))
        return self.after_mlp(hidden, self.mlp_inputs(hidden))

    def product(self, name: str, inputs: F32) -> F32:
        outputs = inputs @ self.tensors[name].T
        bias = self.tensors.get(f"{name}.bias")
        return outputs if bias is None else outputs + bias

    def _norm(self, name: str, rows: F32) -> F32:
        return normalise(rows, self.tensors[name], self.tensors.get(f"{name}.bias"), self.spec)

    def _join(self, part: str, hidden: F32, outputs: F32) -> F32:
        if self.spec.out_norm:
            outputs = self._norm(f"{part}.out_norm", outputs)
        joined = hidden + outputs
        return self._norm(f"{part}.residual_norm", joined) if self.spec.residual_norm else joined

    def _attend_one(self, qkv: F32) -> F32:
        """Attend within one sequence."""
        spec, tokens = self.spec, len(qkv)
        q, k, v = np.split(qkv, (spec.q_size, spec.q_size + spec.kv_size), axis=1)
        if spec.qk_norm == "full":
            q = normalise(q, self.tensors["attn.q_norm"], None, spec, "rms")
            k = normalise(k, self.tensors["attn.k_norm"], None, spec, "rms")
        q, k, v = (rows.reshape(tokens, -1, spec.head_size) for rows in (q, k, v))
        if spec.qk_norm == "head":
            q = normalise(q, self.tensors["attn.q_norm"], None, spec, "rms")
            k = normalise(k, self.tensors["attn.k_norm"], None, spec, "rms")
        if self.layer.rope is not None:
            tables = rope_tables(spec.ropes[self.layer.rope], spec.rope_variant(tokens), tokens)
            q, k = _rotate(q, *tables), _rotate(k, *tables)
        mask = _mask(tokens, self.layer.window)
        group = spec.heads // spec.kv_heads
        out = np.empty((tokens, spec.heads, spec.head_size), dtype=np.float32)
        for head in range(spec.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            scores = q[:, heads].transpose(1, 0, 2) @ k[:, head].T
            scores *= np.float32(spec.attention_scale)
            if spec.attention_softcap:
                cap = np.float32(spec.attention_softcap)
                scores = cap * np.tanh(scores / cap)
            scores += mask
            out[:, heads] = (_softmax(scores) @ v[:, head]).transpose(1, 0, 2)
        return out.reshape(tokens, spec.q_size)


def activate(kind: str, values: F32) -> F32:
    match kind:
        case "silu":
            return (values / (1 + np.exp(-values))).astype(np.float32, copy=False)
        case "quick_gelu":
            return (values / (1 + np.exp(np.float32(-1.702) * values))).astype(np.float32, copy=False)
        case "relu":
            return np.maximum(values, 0)
        case "squared_relu":
            return np.square(np.maximum(values, 0))
        case "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (values + np.float32(0.044715) * values**3)
            return (np.float32(0.5) * values * (1 + np.tanh(inner))).astype(np.float32, copy=False)
        case _:
            return (0.5 * values * (1 + _erf(values / math.sqrt(2)))).astype(np.float32)


def _erf(values: NDArray[Any]) -> NDArray[np.float64]:
    """Abramowitz and Stegun 7.1.26: within 1.5e-7."""
    size = np.abs(values.astype(np.float64))
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(values) * (1 - series * np.exp(-size * size))


def _softmax(scores: F32) -> F32:
    """Compute in place where that is possible."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


@lru_cache(maxsize=8)
def rope_tables(rope: RopeSpec, variant: int, tokens: int) -> tuple[F32, F32]:
    """Return cosines and sines [tokens, 1, pairs] of the positions from 0 on."""
    long = variant == 1 and rope.long_inv_freq is not None
    table = np.array(rope.long_inv_freq if long else rope.inv_freq, dtype=np.float32)
    # The angle is rounded to f32 first, as every reference implementation does.
    angles = (np.arange(tokens, dtype=np.float32)[:, None] * table).astype(np.float64)
    scale = np.float32(rope.long_scale if long else rope.scale)
    return np.cos(angles).astype(np.float32)[:, None] * scale, np.sin(angles).astype(np.float32)[:, None] * scale


def _rotate(rows: F32, cosine: F32, sine: F32) -> F32:
    half = cosine.shape[-1]
    first, second = rows[..., :half], rows[..., half : 2 * half]
    turned = rows.copy()
    turned[..., :half] = first * cosine - second * sine
    turned[..., half : 2 * half] = second * cosine + first * sine
    return turned


@lru_cache(maxsize=8)
def _mask(tokens: int, window: int) -> F32:
    """Return what is added to scores: 0 where a token sees another, otherwise minus infinity."""
    back = np.arange(tokens)[:, None] - np.arange(tokens)
    sees = (back >= 0) & ((back < window) if window else True)
    mask = np.full((tokens, tokens), -np.inf, dtype=np.float32)
    mask[sees] = 0
    return mask
