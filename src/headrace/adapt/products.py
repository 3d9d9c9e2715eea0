"""Product: a matrix product with a weight that is trained, frozen, or frozen with an adapter.

A frozen weight may be kept in the core's packed layout, in integers, and is unpacked for each use: it has exactly the
values that the engine serves at that precision. A weight that is trained for a precision is rounded by the core too.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

import headrace._core as _core
from headrace.models.packing import pack_matrix
from headrace.models.precision import Precision


class LowRank(NamedTuple):
    """What an adapter adds to some rows of a product's weight: scale * B A."""

    rows: slice
    a: Tensor  # [rank, inputs]
    b: Tensor  # [rows, rank]
    scale: float

    def matrix(self) -> Tensor:
        return self.scale * (self.b @ self.a)


class Product:
    def __init__(
        self,
        weight: Tensor | _core.Packed,
        bias: Tensor | None,
        *,
        outputs: int,
        rounding: Precision | None = None,
        pool: _core.Pool,
    ) -> None:
        """`rounding` is the precision that the weight, with its adapter, is rounded to in every step."""
        self.weight = weight
        self.bias = bias
        self.outputs = outputs
        self.adapters: list[LowRank] = []
        self._rounding = rounding
        self._pool = pool
        self._rounded: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._rounding is not None:
            return functional.linear(inputs, self._straight_through(self._rounding), self.bias)
        if isinstance(self.weight, Tensor):
            outputs = functional.linear(inputs, self.weight, self.bias)
        else:
            outputs = _packed_product(inputs, self.weight)
            outputs = outputs if self.bias is None else outputs + self.bias
        if not self.adapters:
            return outputs
        parts: list[Tensor] = []
        end = 0
        for adapter in self.adapters:
            if adapter.rows.start > end:
                parts.append(inputs.new_zeros((*inputs.shape[:-1], adapter.rows.start - end)))
            parts.append(functional.linear(functional.linear(inputs, adapter.a), adapter.b) * adapter.scale)
            end = adapter.rows.stop
        if end < self.outputs:
            parts.append(inputs.new_zeros((*inputs.shape[:-1], self.outputs - end)))
        return outputs + (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0])

    def forget_rounding(self) -> None:
        """Round again at the next use, because the weights have changed."""
        self._rounded = None

    def merged(self) -> Tensor:
        """Return the weight with its adapter."""
        weight = self._dense()
        for adapter in self.adapters:
            wide = torch.zeros_like(weight)
            wide[adapter.rows] = adapter.matrix()
            weight = weight + wide
        return weight

    def _dense(self) -> Tensor:
        return self.weight if isinstance(self.weight, Tensor) else unpacked(self.weight)

    def _straight_through(self, precision: Precision) -> Tensor:
        """Return the rounded weight, through which gradients pass as if it were not rounded."""
        weight = self.merged()
        if self._rounded is None:
            self._rounded = unpacked(pack_matrix(weight.detach().numpy(), precision, self._pool))
        return weight + (self._rounded - weight).detach()


def unpacked(weight: _core.Packed) -> Tensor:
    return torch.from_numpy(weight.unpack())


class _PackedProduct(torch.autograd.Function):
    """A product with a packed weight, which is unpacked again for the gradient: dense, it is never kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: _core.Packed) -> Tensor:
        ctx.weight = weight
        return functional.linear(inputs, unpacked(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ unpacked(ctx.weight), None


def _packed_product(inputs: Tensor, weight: _core.Packed) -> Tensor:
    found: Any = _PackedProduct.apply(inputs, weight)
    return found
