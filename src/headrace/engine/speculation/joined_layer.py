"""A layer that reads a token's embedding joined with the hidden state before it, and predicts the next hidden state.

From that, the head gives the next token. EAGLE layers and the prediction modules of checkpoints are such layers. Owns
the layer's executor. Does not draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.speculation.head_drafter import Floats
from headrace.models.draft_heads import EagleLayer
from headrace.models.own_module import OwnModule
from headrace.models.precision import Precision
from headrace.models.prediction_module import JOIN, STATE_NORM, TOKEN_NORM


class JoinedLayer(msgspec.Struct):
    target: CpuExecutor  # whose embedding the layer reads
    executor: CpuExecutor  # of the layer; its results are logits over `tokens`, and its hidden states
    join: _core.Packed  # [hidden, 2 hidden]: embedding, then hidden state
    bias: Floats | None = None
    token_norm: Floats | None = None  # weights of the RMS norms before; None: there are no such norms
    state_norm: Floats | None = None
    tokens: NDArray[np.int32] | None = None  # that the layer chooses from; None: all
    reads_prompts: bool = False  # its context was the whole text when it was trained, not only the answer

    def features(self, tokens: NDArray[np.int32], states: Floats) -> Floats:
        """Return what the layer reads for tokens and the hidden states before them, [tokens, hidden]."""
        products = self.target.products
        embedded = products.embeddings(tokens)
        if self.token_norm is not None and self.state_norm is not None:
            eps = self.target.spec.norm_eps
            embedded = _rms_norm(embedded, self.token_norm, eps)
            states = _rms_norm(states, self.state_norm, eps)
        joined = products.multiply(self.join, np.concatenate([embedded, states], axis=1), states.shape[1])
        if self.bias is not None:
            joined += self.bias
        return joined


def eagle_layer(target: CpuExecutor, layer: EagleLayer, precision: Precision) -> JoinedLayer:
    """Load an EAGLE layer. `precision` is that of the layer, and of the head over the tokens that it chooses from."""
    products = target.products
    every = np.arange(target.spec.vocab_size, dtype=np.int32)
    tensors = {**layer.tensors, "embed": products.head_rows(every if layer.tokens is None else layer.tokens)}
    return JoinedLayer(
        target,
        target.beside(layer.spec, products.pack_layers(layer.spec, tensors, precision)),
        products.pack(layer.join, precision),
        bias=layer.join_bias,
        tokens=layer.tokens,
    )


def prediction_layer(target: CpuExecutor, own: OwnModule, *, cache: Path | None = None) -> JoinedLayer:
    """Load the prediction module of the target's own checkpoint. It shares the target's embedding and head."""
    executor, joins = target.predicting(own, cache=cache)
    return JoinedLayer(
        target,
        executor,
        cast("_core.Packed", joins[JOIN]),
        token_norm=cast("Floats", joins[TOKEN_NORM]),
        state_norm=cast("Floats", joins[STATE_NORM]),
        reads_prompts=True,
    )


def _rms_norm(rows: Floats, weights: Floats, eps: float) -> Floats:
    scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(eps))
    return rows / scale * weights
