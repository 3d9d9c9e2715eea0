"""An EAGLE-3 layer at work: it reads hidden states of several of the model's layers, and has a head of its own.

Owns the layer's executor. Does not draft.
"""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.executor import StepResult
from headrace.engine.speculation.head_drafter import Floats
from headrace.engine.speculation.joined_layer import rms_norm
from headrace.models.eagle3_layer import Eagle3Layer
from headrace.models.precision import Precision


class Eagle3Head(msgspec.Struct):
    target: CpuExecutor
    executor: CpuExecutor  # of the layer; its results are its own hidden states
    layer: Eagle3Layer
    join: _core.Packed  # [hidden, states x the model's hidden]
    head: _core.Packed
    embedding: _core.Packed | None  # None: the model's
    has_logits: bool = False
    reads_prompts: bool = True

    @property
    def reads(self) -> tuple[int, ...]:
        return self.layer.reads

    @property
    def tokens(self) -> NDArray[np.int32] | None:
        return self.layer.tokens

    def joined(self, states: Floats) -> Floats:
        """Return the one state that the layer reads in place of those of the model's layers."""
        norms, eps = self.layer.join_norms, self._eps
        if norms:
            parts = np.split(states, len(norms), axis=1)
            states = np.concatenate(
                [rms_norm(part, norm, eps) for part, norm in zip(parts, norms, strict=True)], axis=1
            )
        return self.target.products.multiply(self.join, states, self.executor.spec.hidden_size)

    def features(self, tokens: NDArray[np.int32], states: Floats) -> Floats:
        """Return what the layer reads for tokens and the states before them, [tokens, 2 hidden]."""
        embedded = (
            self.target.products.embeddings(tokens) if self.embedding is None else self.embedding.unpack_rows(tokens)
        )
        if self.layer.state_norm is not None:
            states = rms_norm(states, self.layer.state_norm, self._eps)
        return np.concatenate([states, rms_norm(embedded, self.layer.token_norm, self._eps)], axis=1)

    def results(self, result: StepResult) -> tuple[Floats, Floats]:
        """Return the logits of a step's rows, and the states that the next drafts read."""
        states = result.values
        normed = rms_norm(states, self.layer.norm, self._eps)
        logits = self.target.products.multiply(self.head, normed, self.executor.spec.vocab_size)
        return logits, normed if self.layer.returns_normed else states

    @property
    def _eps(self) -> float:
        return self.executor.spec.norm_eps


def eagle3_head(target: CpuExecutor, layer: Eagle3Layer, precision: Precision) -> Eagle3Head:
    """Load an EAGLE-3 layer. `precision` is that of all its products and of an embedding of its own."""
    products = target.products
    head = layer.head
    if head is None:
        every = np.arange(target.spec.vocab_size, dtype=np.int32)
        head = products.head_rows(every if layer.tokens is None else layer.tokens)
    tensors = products.pack_layers(layer.spec, {**layer.tensors, "embed": head}, precision)
    return Eagle3Head(
        target,
        target.beside(layer.spec, tensors),
        layer,
        products.pack(layer.join, precision),
        cast("_core.Packed", tensors.tensors["embed"]),
        None if layer.embedding is None else products.pack(layer.embedding, precision),
    )
