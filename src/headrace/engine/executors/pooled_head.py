"""Computes the layers after pooling: the Dense modules of an embedder, the head of a reranker.

One vector at a time, on the caller's thread and in f32, so that a result depends on nothing else that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import CoreTensor
from headrace.models.spec import ModelSpec, PooledActivation

Floats = NDArray[np.float32]


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: float) -> float:
    grown = math.exp(-abs(x))  # of a large one it would overflow
    return (1.0 if x >= 0 else grown) / (1.0 + grown)


# Value by value: numpy's own functions may differ in the last bit from one machine to another.
_ACTIVATIONS: Final[Mapping[PooledActivation, Callable[[float], float]]] = {
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
}


class PooledHead:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, CoreTensor], isa: str) -> None:
        self._spec = spec
        self._isa = isa
        self._pool = _core.Pool(1)  # the caller's thread: the model's own threads are busy with the next step
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("pooled.")}

    def apply(self, vector: Floats) -> Floats:
        """Return the vector after all layers."""
        for index, layer in enumerate(self._spec.pooled_layers):
            name = f"pooled.{index}"
            rows = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
            out = np.empty((1, layer.outputs), dtype=np.float32)
            _core.multiply(cast("_core.Packed", self._tensors[name]), rows, out, self._pool, self._isa)
            vector = out[0]
            if layer.bias:
                vector = vector + self._vector(f"{name}.bias")
            activation = _ACTIVATIONS.get(layer.activation)
            if activation is not None:
                vector = np.array([activation(value) for value in vector.tolist()], dtype=np.float32)
            if layer.norm:
                vector = self._normalised(f"{name}.norm", vector)
        return vector

    def _normalised(self, name: str, vector: Floats) -> Floats:
        values = vector.astype(np.float64)
        centred = values - values.mean()
        scaled = centred / math.sqrt(float((centred * centred).mean()) + self._spec.norm_eps) * self._vector(name)
        if f"{name}.bias" in self._tensors:
            scaled = scaled + self._vector(f"{name}.bias")
        return scaled.astype(np.float32)

    def _vector(self, name: str) -> Floats:
        return cast("Floats", self._tensors[name])
