"""A layer that reads a token's embedding joined with the hidden state before it, and predicts the next hidden state.

From that, the head gives the next token. EAGLE layers and the prediction modules of checkpoints are such layers. Owns
the layer's executor. Does not draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.executor import StepResult
from headrace.engine.speculation.head_drafter import Floats
from headrace.models.draft_heads import EagleLayer
from headrace.models.own_module import OwnModule
from headrace.models.precision import Precision
from headrace.models.prediction_module import JOIN, STATE_NORM, TOKEN_NORM


class DraftLayer(Protocol):
    """A layer that drafts from a token's embedding and the hidden state before it."""

    @property
    def target(self) -> CpuExecutor: ...

    @property
    def executor(self) -> CpuExecutor: ...

    @property
    def tokens(self) -> NDArray[np.int32] | None:
        """Those that it chooses from; None: all."""
        ...

    @property
    def reads(self) -> tuple[int, ...]:
        """The model's layers that begin with the states that it reads; none: it reads the final states."""
        ...

    @property
    def reads_prompts(self) -> bool:
        """Whether its context was the whole text when it was trained, not only the answer."""
        ...

    @property
    def has_logits(self) -> bool:
        """Whether a step of its executor returns logits, not only its hidden states."""
        ...

    def joined(self, states: Floats) -> Floats:
        """Return what `features` takes for the model's hidden states."""
        ...

    def features(self, tokens: NDArray[np.int32], states: Floats) -> Floats:
        """Return what the layer reads for tokens and the states before them, which may be its own."""
        ...

    def results(self, result: StepResult) -> tuple[Floats, Floats]:
        """Return the logits of a step's rows, and the layer's own states that its next drafts read."""
        ...


class JoinedLayer(msgspec.Struct):
    target: CpuExecutor  # whose embedding the layer reads
    executor: CpuExecutor  # of the layer; its results are logits over `tokens`, and its hidden states
    join: _core.Packed  # [hidden, 2 hidden]: embedding, then hidden state
    bias: Floats | None = None
    token_norm: Floats | None = None  # weights of the RMS norms before; None: there are no such norms
    state_norm: Floats | None = None
    tokens: NDArray[np.int32] | None = None  # that the layer chooses from; None: all
    reads_prompts: bool = False
    reads: tuple[int, ...] = ()
    has_logits: bool = True

    def joined(self, states: Floats) -> Floats:
        return states

    def features(self, tokens: NDArray[np.int32], states: Floats) -> Floats:
        """Return what the layer reads for tokens and the hidden states before them, [tokens, hidden]."""
        products = self.target.products
        embedded = products.embeddings(tokens)
        if self.token_norm is not None and self.state_norm is not None:
            eps = self.target.spec.norm_eps
            embedded = rms_norm(embedded, self.token_norm, eps)
            states = rms_norm(states, self.state_norm, eps)
        joined = products.multiply(self.join, np.concatenate([embedded, states], axis=1), states.shape[1])
        if self.bias is not None:
            joined += self.bias
        return joined

    def results(self, result: StepResult) -> tuple[Floats, Floats]:
        assert result.final_states is not None
        return result.values, result.final_states


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


def rms_norm(rows: Floats, weights: Floats, eps: float) -> Floats:
    scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(eps))
    return rows / scale * weights
