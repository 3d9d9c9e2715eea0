"""Measures what rounding each product alone does to a model's predictions, in one pass over the layers.

Beside the model itself, the pass carries one copy of the hidden states for each product that was rounded on its own, so
that a layer is read once however many products there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.compress.grids import dequantise, fit, round_to_nearest
from headrace.compress.layer_compression import relative_error
from headrace.compress.layer_pass import (
    CHUNK_TOKENS,
    F32,
    LayerPass,
    Tokens,
    embed,
    final_norm,
    head_logits,
    head_weight,
    load_layer,
)
from headrace.compress.recipe import Recipe
from headrace.models.model_folder import ModelFolder
from headrace.models.tensor_shapes import is_product

PROBE_BITS: Final = 3  # few enough that the effect of one product stands out
TOKENS: Final = 512  # whose predictions are compared
_LOGITS: Final = 1 << 22  # of one model at a time


class ProductSensitivity(msgspec.Struct, frozen=True):
    name: str  # canonical
    weights: int
    kl: dict[int, float]  # by bits: KL(model || model with this product rounded), nats per token


class _Recording(LayerPass):
    """A layer that keeps the inputs of its products."""

    def __init__(self, folder: ModelFolder, index: int, tensors: dict[str, F32]) -> None:
        super().__init__(folder.spec, index, tensors)
        self.inputs: dict[str, F32] = {}

    def product(self, name: str, inputs: F32) -> F32:
        self.inputs[name] = inputs
        return super().product(name, inputs)


def measure_sensitivity(
    folder: ModelFolder,
    sequences: Sequence[Sequence[int]],
    recipe: Recipe,
    candidates: Sequence[int],
    *,
    tokens: int = TOKENS,
    watch: Callable[[int, int], None] = lambda _, __: None,
) -> list[ProductSensitivity]:
    """Return the divergence that each product causes at each of the `candidates` bits.

    It is measured at PROBE_BITS with rounding to nearest, over `tokens` tokens of the sequences. For other bits it
    grows with the square error of the product's outputs, which is measured for all of them.
    """
    joined = Tokens.join(_first(sequences, tokens))
    base = embed(folder, joined)
    names: list[str] = []
    states: list[F32] = []
    errors: list[dict[int, float]] = []
    count = len(folder.spec.layers)
    for index in range(count):
        watch(index, count + 1)
        tensors = load_layer(folder, index)
        layer = _Recording(folder, index, tensors)
        before, base = base, layer.forward(base, joined.offsets)
        inputs = layer.inputs
        plain = LayerPass(folder.spec, index, tensors)
        states = _forward(plain, states, joined)
        for name in [each for each in tensors if is_product(f"layers.{index}.{each}")]:
            weights = tensors[name]
            error: dict[int, float] = {}
            for bits in sorted({PROBE_BITS, *candidates}):
                grid = fit(weights, recipe.grid(bits, weights.shape[1]))
                values = dequantise(round_to_nearest(weights, grid), grid)
                error[bits] = relative_error(weights, values, inputs.get(name, weights[:0]))
                if bits == PROBE_BITS:
                    changed = LayerPass(folder.spec, index, {**tensors, name: values})
                    states.append(changed.forward(before, joined.offsets))
            names.append(f"layers.{index}.{name}")
            errors.append(error)
    watch(count, count + 1)
    divergences = _divergences(folder, base, states)
    found: list[ProductSensitivity] = []
    for name, error, divergence in zip(names, errors, divergences, strict=True):
        share = {bits: error[bits] / max(error[PROBE_BITS], 1e-30) for bits in candidates}
        rows, columns = folder.shapes[name]
        found.append(
            ProductSensitivity(name, rows * columns, {bits: divergence * each for bits, each in share.items()})
        )
    return found


def _first(sequences: Sequence[Sequence[int]], most: int) -> list[Sequence[int]]:
    """Return the beginnings of a few sequences, together `most` tokens."""
    each = max(16, most // 4)
    found: list[Sequence[int]] = []
    left = most
    for sequence in sequences:
        if left <= 0:
            break
        found.append(sequence[: min(each, left)])
        left -= len(found[-1])
    return found


def _forward(layer: LayerPass, states: Sequence[F32], tokens: Tokens) -> list[F32]:
    found: list[F32] = []
    length = len(tokens.ids)
    step = max(1, CHUNK_TOKENS // length)
    for start in range(0, len(states), step):
        some = states[start : start + step]
        offsets = [0, *(copy * length + end for copy in range(len(some)) for end in tokens.offsets[1:])]
        found += np.split(layer.forward(np.concatenate(some), offsets), len(some))
    return found


def _divergences(folder: ModelFolder, base: F32, states: Sequence[F32]) -> list[float]:
    norm = final_norm(folder)
    head = head_weight(folder)
    totals = np.zeros(len(states))
    step = max(1, _LOGITS // len(head))
    for start in range(0, len(base), step):
        rows = slice(start, start + step)
        expected = _log_softmax(head_logits(folder.spec, base[rows], norm, head))
        shares = np.exp(expected)
        for place, state in enumerate(states):
            found = _log_softmax(head_logits(folder.spec, state[rows], norm, head))
            totals[place] += float((shares * (expected - found)).sum(dtype=np.float64))
    return [max(float(total) / len(base), 0.0) for total in totals]


def _log_softmax(logits: F32) -> F32:
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
