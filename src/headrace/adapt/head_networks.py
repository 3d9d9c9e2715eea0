"""Medusa heads and EAGLE layers in torch, as they are trained: predictions for every place and every draft at once.

All predict states from which a head gives the next tokens: the model's, or that of an EAGLE-3 layer. Does not know
examples or optimisers.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapt.decoder import rotated
from headrace.models.draft_heads import EagleLayer, HeadBlock, MedusaHeads, eagle_shapes
from headrace.models.eagle3_layer import Eagle3Layer, eagle3_shapes
from headrace.models.spec import ModelSpec

_LAYER: Final = "layers.0"
_SPREAD: Final = 0.02  # of an EAGLE layer's first weights


class HeadNetwork(Protocol):
    @property
    def trained(self) -> dict[str, Tensor]: ...

    @property
    def own_head(self) -> Tensor | None:
        """The head that its predicted states are for; None: the model's."""
        ...

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        """Return, for each of `depth` drafts, the predicted states [rows, length, hidden].

        `states` [rows, length, hidden] are what the answers' tokens were chosen from and `embedded` those tokens'
        embeddings; for an EAGLE-3 layer, the states of the layers that it reads come first. The prediction of draft d
        at place i is for the state that token i + 1 was chosen from, made when the last d tokens up to i were drafts;
        places below d have none.
        """
        ...


class MedusaNetwork:
    own_head: Tensor | None = None

    def __init__(self, spec: ModelSpec, count: int) -> None:
        size = spec.hidden_size
        self.trained: dict[str, Tensor] = {}
        for head in range(count):
            self.trained[f"{head}.weight"] = torch.zeros(size, size).requires_grad_()
            self.trained[f"{head}.bias"] = torch.zeros(size).requires_grad_()
        self._count = count

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        found: list[Tensor] = []
        for head in range(min(depth, self._count)):
            weight, bias = self.trained[f"{head}.weight"], self.trained[f"{head}.bias"]
            ahead = states + functional.silu(functional.linear(states, weight, bias))
            found.append(_later(ahead, head))
        return found

    def heads(self, tokens: NDArray[np.int32] | None) -> MedusaHeads:
        blocks = [
            [HeadBlock(_array(self.trained[f"{head}.weight"]), _array(self.trained[f"{head}.bias"]))]
            for head in range(self._count)
        ]
        return MedusaHeads(blocks, [], tokens)


class _LayerNetwork(ABC):
    """A layer that predicts each state from a token's embedding and the state before it, which may be its own."""

    own_head: Tensor | None = None

    def __init__(self, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """`spec` is the layer's own."""
        self._generator = torch.Generator().manual_seed(seed)
        self._spec = spec
        self.trained: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            first = self._random(*shape)
            self.trained[name] = (torch.ones(shape) if len(shape) == 1 else first).requires_grad_()

    @abstractmethod
    def _known(self, states: Tensor) -> Tensor:
        """Return what it reads of the model's states."""

    @abstractmethod
    def _inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention reads, and what its result is added to."""

    @abstractmethod
    def _shown(self, states: Tensor) -> Tensor:
        """Return what the head reads of its states."""

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        found: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        tables = self._rope(states.shape[1])
        states = self._known(states)
        for draft in range(depth):
            inputs, residual = self._inputs(embedded, states)
            queries, own_keys, own_values = self._heads(inputs, tables)
            keys.append(own_keys)
            values.append(own_values)
            mixed = _attend(queries, keys, values, self._spec.attention_scale)
            outputs = residual + functional.linear(mixed, self.trained[f"{_LAYER}.attn.o"])
            outputs = outputs + self._mlp(outputs)
            found.append(self._shown(outputs))
            if draft + 1 < depth:
                states = _later(outputs, 1)
        return found

    def _tensors(self) -> dict[str, NDArray[np.float32]]:
        return {name: _array(value) for name, value in self.trained.items() if name.startswith(_LAYER)}

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape).normal_(0.0, _SPREAD, generator=self._generator)

    def _normed(self, values: Tensor, name: str) -> Tensor:
        weight = self.trained[name]
        return functional.rms_norm(values, weight.shape, weight, self._spec.norm_eps)

    def _heads(self, inputs: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._spec
        rows, length, _ = inputs.shape
        projected = functional.linear(inputs, self.trained[f"{_LAYER}.attn.qkv"])
        queries, keys, values = (
            part.view(rows, length, -1, spec.head_size).transpose(1, 2)
            for part in projected.split(spec.qkv_parts, dim=-1)
        )
        shared = spec.heads // spec.kv_heads
        keys = rotated(keys, *tables).repeat_interleave(shared, 1)
        return rotated(queries, *tables), keys, values.repeat_interleave(shared, 1)

    def _mlp(self, states: Tensor) -> Tensor:
        normed = self._normed(states, f"{_LAYER}.mlp.norm")
        gate, up = functional.linear(normed, self.trained[f"{_LAYER}.mlp.gate_up"]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.trained[f"{_LAYER}.mlp.down"])

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        (rope,) = self._spec.ropes
        angles = torch.arange(length)[:, None] * torch.tensor(rope.inv_freq)
        return angles.cos() * rope.scale, angles.sin() * rope.scale


class EagleNetwork(_LayerNetwork):
    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__(spec, eagle_shapes(spec), seed)
        size = spec.hidden_size
        join = self._random(size, 2 * size)
        join[:, size:] += torch.eye(size)  # it begins with the state that it reads
        self.trained["join"] = join.requires_grad_()
        self.trained["join.bias"] = torch.zeros(size).requires_grad_()

    def layer(self, tokens: NDArray[np.int32] | None) -> EagleLayer:
        join, bias = _array(self.trained["join"]), _array(self.trained["join.bias"])
        return EagleLayer(self._spec, join, bias, self._tensors(), tokens)

    def _known(self, states: Tensor) -> Tensor:
        return states

    def _inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.cat((embedded, states), dim=-1)
        inputs = functional.linear(pairs, self.trained["join"], self.trained["join.bias"])
        return inputs, inputs

    def _shown(self, states: Tensor) -> Tensor:
        return states


class Eagle3Network(_LayerNetwork):
    def __init__(
        self,
        spec: ModelSpec,
        reads: tuple[int, ...],
        head: NDArray[np.float32],
        norm: NDArray[np.float32],
        seed: int,
    ) -> None:
        """`reads` are the model's layers whose input it reads. `head` are the rows of the model's and `norm` the
        factors of the norm before them, which its own begin with."""
        super().__init__(spec, eagle3_shapes(spec), seed)
        size = spec.hidden_size
        self._reads = reads
        join = self._random(size, len(reads) * size)
        join[:, -size:] += torch.eye(size)  # it begins with the state of the highest layer
        self.trained["join"] = join.requires_grad_()
        self.trained["token_norm"] = torch.ones(size).requires_grad_()
        self.trained["norm"] = torch.from_numpy(norm.copy()).requires_grad_()
        self.trained["head"] = torch.from_numpy(head.copy()).requires_grad_()
        self.own_head = self.trained["head"]

    def layer(self, tokens: NDArray[np.int32] | None) -> Eagle3Layer:
        join, token_norm, norm, head = (_array(self.trained[name]) for name in ("join", "token_norm", "norm", "head"))
        return Eagle3Layer(
            self._spec,
            self._reads,
            join,
            self._tensors(),
            token_norm=token_norm,
            state_norm=None,
            norm=norm,
            head=head,
            tokens=tokens,
        )

    def _known(self, states: Tensor) -> Tensor:
        join = self.trained["join"]
        return functional.linear(states[..., : join.shape[1]], join)

    def _inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._normed(embedded, "token_norm"), self._normed(states, f"{_LAYER}.attn.norm")
        return torch.cat(normed, dim=-1), states

    def _shown(self, states: Tensor) -> Tensor:
        return self._normed(states, "norm")


def _attend(queries: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Attention of the newest draft: on known places up to the first draft, and on the drafts since.

    `keys` and `values` are those of each draft at every place. A place sees its own in the newest, the one before in
    the draft before, and so on; of the first, which reads known states, it sees all places that are left.
    """
    rows, heads, length, size = queries.shape
    behind = len(keys) - 1
    places = torch.arange(length)
    scores = [(queries @ keys[0].transpose(2, 3) * scale).masked_fill(places > places[:, None] - behind, -1e9)]
    seen = [_later(value, behind - draft, 2) for draft, value in enumerate(values[1:], start=1)]
    for draft, key in enumerate(keys[1:], start=1):
        scores.append((queries * _later(key, behind - draft, 2)).sum(-1, keepdim=True) * scale)
    weights = torch.cat(scores, dim=-1).softmax(-1)
    mixed = weights[..., :length] @ values[0]
    for draft, value in enumerate(seen):
        mixed = mixed + weights[..., length + draft, None] * value
    return mixed.transpose(1, 2).reshape(rows, length, heads * size)


def _later(values: Tensor, count: int, dim: int = 1) -> Tensor:
    """Move values `count` places on; zeros take the first places."""
    if count == 0:
        return values
    length = values.shape[dim]
    kept = values.narrow(dim, 0, max(0, length - count))
    zeros = torch.zeros_like(values.narrow(dim, 0, min(count, length)))
    return torch.cat((zeros, kept), dim=dim)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().numpy().copy()
