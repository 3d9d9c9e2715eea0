"""What a step of a model must read and multiply at least, whatever computes it."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.models.packing import packed_size
from headrace.models.precision import WeightPlan
from headrace.models.spec import ModelSpec
from headrace.models.tensor_shapes import is_product, tensor_shapes


class StepWork(msgspec.Struct, frozen=True):
    """The least work of a step: every weight that one token uses is read once, and multiplied once for each row."""

    weight_bytes: int
    kv_bytes_per_token: float  # of every token that a sequence attends to
    operations_per_row: float  # of products; a multiply and an add are two
    operations_per_result: float  # of the head, for each row whose logits are wanted
    operations_per_pair: float  # of attention, for each token that a row attends to

    def bytes_read(self, kv_tokens: int) -> float:
        """`kv_tokens`: those of all sequences of the step together."""
        return self.weight_bytes + self.kv_bytes_per_token * kv_tokens

    def operations(self, rows: int, results: int, pairs: int) -> float:
        """`pairs`: of a row and a token that it attends to."""
        products = self.operations_per_row * rows + self.operations_per_result * results
        return products + self.operations_per_pair * pairs


def step_work(spec: ModelSpec, plan: WeightPlan, kv_bytes_per_token: float) -> StepWork:
    shapes = active_shapes(spec)
    head = int(np.prod(shapes.pop("embed" if spec.tied else "head", (0,))))
    products = sum(int(np.prod(shape)) for name, shape in shapes.items() if is_product(name))
    return StepWork(
        decode_bytes(spec, plan),
        kv_bytes_per_token * spec.kv_reads,
        2.0 * products,
        2.0 * head,
        2.0 * spec.pair_size,
    )


def active_parameters(spec: ModelSpec) -> int:
    """Count the parameters that one token uses: only chosen experts, no embedding unless it is also the head."""
    return sum(int(np.prod(shape)) for shape in active_shapes(spec).values())


def decode_bytes(spec: ModelSpec, plan: WeightPlan) -> int:
    return packed_size(spec, active_shapes(spec), plan)


def active_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes = tensor_shapes(spec)
    for name in list(shapes):
        if spec.experts is not None and ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            if expert >= spec.experts.top_k:
                del shapes[name]
    if not spec.tied:
        del shapes["embed"]  # one row is read
    shapes.pop("inputs.embed", None)
    shapes.pop("positions", None)
    shapes.pop("token_types", None)
    shapes.pop("distances", None)
    return shapes
