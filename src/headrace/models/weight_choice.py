"""Chooses the precision of a model's weights when the user names none ("auto"), and says why.

What is not quantised on disk becomes bf16. Whole numbers and FP8 keep their codes, where the kernels have a layout for
them; everything else goes to the nearest richer precision. Does not read weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec

from headrace.models.formats.model_weights import ModelWeights
from headrace.models.formats.quantised_layer import StoredLayout
from headrace.models.gguf.gguf_weights import GgufWeights
from headrace.models.model_folder import ModelFolder
from headrace.models.precision import (
    AUTO,
    AUTO_FLOAT_ROWS,
    AUTOS,
    Precision,
    WeightFormat,
    WeightPlan,
    parse_plan,
    stored_format,
)
from headrace.models.prediction_module import has_prediction_module
from headrace.models.tensor_shapes import is_product

_RICHER: Final = Precision("int8", 32, rotated=True)
# Tables that whole numbers only come near to. With rows in 8 bits, which are not rotated beside stored codes, they lose
# three times what _RICHER does; with rows of floats half of it.
_NEAR_TABLES: Final = frozenset({"nf4", "fp4"})
_LONGEST: Final = 128  # inputs of a group: activations are rounded per group too, so long groups are divided
_UNIT: Final = 32  # inputs; the kernels' groups are multiples of it
_CLOSER: Final = 16  # inputs of the only group below it, which int4 and int2 may have
# Layers after the last one of a model predict further tokens, as those do whose name has a part "mtp".
_LAYER: Final = re.compile(r"(?:(?:model\.)?(?:language_model\.)?layers|blk)\.(\d{1,6})\.")


def choose_plan(
    folder: ModelFolder,
    weights: str = AUTO,
    *,
    group: str | int | None = None,
    keep: Sequence[str] | Mapping[str, str] = (),
) -> WeightPlan:
    """Return the plan that a user's options mean for a model."""
    plan = parse_plan(weights, group=group, keep=keep, embedder=folder.spec.embeds)
    if weights not in AUTOS:
        return plan
    float_rows = weights == AUTO_FLOAT_ROWS
    stored = {name: _precision(folder, name, float_rows=float_rows) for name in folder.shapes if is_product(name)}
    found = {name: precision for name, precision in stored.items() if precision is not None}
    if float_rows:
        found = {name: _with_float_rows(precision) for name, precision in found.items()}
    return msgspec.structs.replace(plan, stored=found)


def describe_choice(folder: ModelFolder, plan: WeightPlan, *, drafts: bool = False) -> str:
    """Return what most weights became and why, and which are left out; empty if nothing was chosen.

    `drafts` says that the model drafts with its own prediction module.
    """
    count = 0 if drafts else len(prediction_tensors(folder))
    unused = f"{count} tensors of layers that predict further tokens are not used" if count else ""
    if count and has_prediction_module(folder):
        unused += ' (speculation = "mtp" drafts with them)'
    return "; ".join(filter(None, (_describe_precision(folder, plan), unused)))


def prediction_tensors(folder: ModelFolder) -> list[str]:
    """Return the tensors in the files that belong to layers that predict further tokens (multi-token prediction)."""
    layers = len(folder.spec.layers)
    return sorted(name for name in folder.weights.names if _predicts(name, layers))


def _predicts(name: str, layers: int) -> bool:
    if name.startswith("mtp.") or ".mtp." in name:
        return True
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= layers


def _describe_precision(folder: ModelFolder, plan: WeightPlan) -> str:
    if not plan.stored or isinstance(folder.weights, ModelWeights):
        return ""
    if isinstance(folder.weights, GgufWeights):
        return _describe_blocks(folder, plan, folder.weights)
    precision, _ = Counter(plan.stored.values()).most_common(1)[0]
    if precision.stored:
        why = "the codes in the files"
    elif precision.format == "bf16":
        why = "it loses less than integers"
    else:
        why = "the kernels have no layout for the codes in the files"
    return f"{precision.name} from {folder.weights.scheme.label}: {why}"


def _with_float_rows(precision: Precision) -> Precision:
    return msgspec.structs.replace(precision, float_rows=True) if precision.is_integer else precision


def _describe_blocks(folder: ModelFolder, plan: WeightPlan, weights: GgufWeights) -> str:
    """Return what the types of a GGUF file became, most weights first: a file mixes several."""
    sizes: Counter[tuple[str, Precision]] = Counter()
    for name, precision in plan.stored.items():
        kinds = sorted({weights.block_type(part.name) for part in folder.sources[name]})
        sizes[" with ".join(kinds), precision] += math.prod(folder.shapes[name])
    return "; ".join(
        f"{precision.name} from GGUF's {kind}, {'the codes in the file' if precision.stored else 'repacked'}"
        for (kind, precision), _ in sizes.most_common()
    )


def _precision(folder: ModelFolder, name: str, *, float_rows: bool) -> Precision | None:
    """Return the precision of a tensor that is quantised on disk, in all its parts; None if it is not."""
    layouts: set[StoredLayout] = set()
    if any(part.by_head is not None and folder.weights.layout(part.name) is not None for part in folder.sources[name]):
        return Precision("bf16")  # groups of codes may lie across the inputs of a head
    for part in folder.sources[name]:
        layout = None if part.index is not None else folder.weights.layout(part.name)
        if layout is None:
            return None
        layouts.add(layout)
    if any(layout.kind == "float" for layout in layouts):
        return _kept_fp8(layouts)
    layout = layouts.pop()
    near = layout.table in _NEAR_TABLES and not float_rows
    if layouts or near or (layout.kind != "codes" and not layout.table):
        return _RICHER
    group = _LONGEST if layout.group % _LONGEST == 0 else layout.group
    kind = cast(WeightFormat, layout.table) if layout.table else stored_format(layout.bits)
    if group % _UNIT:
        if group % _CLOSER or layout.table or layout.bits > 4:
            return _RICHER
        group = _CLOSER
        kind = "int2" if layout.bits == 2 else "int4"
    if any(part.tiled_inputs is not None and part.tiled_inputs[1] % group for part in folder.sources[name]):
        return _RICHER  # groups of inputs would not stay together
    zeros = not (layout.symmetric or layout.offsets or layout.table)
    return Precision(kind, group, stored=True, zeros=zeros, offsets=layout.offsets)


def _kept_fp8(layouts: set[StoredLayout]) -> Precision:
    """Return the precision of FP8 numbers: their own, or bf16, which rounds a number times its scale, if the parts of a
    tensor differ or the kernels have no group of the size. Numbers of 16 bits without zeros become bf16 too."""
    layout = layouts.pop()
    if layouts or not layout.table or layout.group % _UNIT:
        return Precision("bf16")
    group = _LONGEST if layout.group and layout.group % _LONGEST == 0 else layout.group
    if group and _LONGEST % group:
        return Precision("bf16")
    return Precision(cast(WeightFormat, layout.table), group, stored=True)
