"""Medusa heads and an EAGLE layer in torch, as they are trained: predictions for every place and every draft at once.

Both predict states from which the model's own head gives the next tokens. Does not know examples or optimisers.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapt.decoder import rotated
from headrace.models.draft_heads import EagleLayer, HeadBlock, MedusaHeads, eagle_shapes
from headrace.models.spec import ModelSpec

_LAYER: Final = "layers.0"
_SPREAD: Final = 0.02  # of an EAGLE layer's first weights


class HeadNetwork(Protocol):
    @property
    def trained(self) -> dict[str, Tensor]: ...

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        """Return, for each of `depth` drafts, the predicted states [rows, length, hidden].

        `states` [rows, length, hidden] are what the answers' tokens were chosen from and `embedded` those tokens'
        embeddings. The prediction of draft d at place i is for the state that token i + 1 was chosen from, made when
        the last d tokens up to i were drafts; places below d have none.
        """
        ...


class MedusaNetwork:
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


class EagleNetwork:
    def __init__(self, spec: ModelSpec, seed: int) -> None:
        """`spec` is the layer's own."""
        generator = torch.Generator().manual_seed(seed)
        size = spec.hidden_size
        self._spec = spec
        self.trained: dict[str, Tensor] = {}
        for name, shape in eagle_shapes(spec).items():
            first = torch.empty(shape).normal_(0.0, _SPREAD, generator=generator)
            self.trained[name] = (torch.ones(shape) if len(shape) == 1 else first).requires_grad_()
        join = torch.empty(size, 2 * size).normal_(0.0, _SPREAD, generator=generator)
        join[:, size:] += torch.eye(size)  # it begins with the state that it reads
        self.trained["join"] = join.requires_grad_()
        self.trained["join.bias"] = torch.zeros(size).requires_grad_()

    def predict(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        found: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        tables = self._rope(states.shape[1])
        for draft in range(depth):
            inputs = functional.linear(
                torch.cat((embedded, states), dim=-1), self.trained["join"], self.trained["join.bias"]
            )
            queries, own_keys, own_values = self._heads(inputs, tables)
            keys.append(own_keys)
            values.append(own_values)
            mixed = _attend(queries, keys, values, self._spec.attention_scale)
            outputs = inputs + functional.linear(mixed, self.trained[f"{_LAYER}.attn.o"])
            outputs = outputs + self._mlp(outputs)
            found.append(outputs)
            if draft + 1 < depth:
                states = _later(outputs, 1)
        return found

    def layer(self, tokens: NDArray[np.int32] | None) -> EagleLayer:
        tensors = {name: _array(value) for name, value in self.trained.items() if name.startswith(_LAYER)}
        return EagleLayer(self._spec, _array(self.trained["join"]), _array(self.trained["join.bias"]), tensors, tokens)

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
        weight = self.trained[f"{_LAYER}.mlp.norm"]
        normed = functional.rms_norm(states, weight.shape, weight, self._spec.norm_eps)
        gate, up = functional.linear(normed, self.trained[f"{_LAYER}.mlp.gate_up"]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.trained[f"{_LAYER}.mlp.down"])

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        (rope,) = self._spec.ropes
        angles = torch.arange(length)[:, None] * torch.tensor(rope.inv_freq)
        return angles.cos() * rope.scale, angles.sin() * rope.scale


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
