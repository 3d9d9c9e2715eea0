"""Describes how a model is made smaller: the method, the grid, and the bits of each tensor. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from headrace.compress.block_grids import BLOCK_TYPES, block_type
from headrace.compress.grids import NF4_BLOCK, GridSpec, ScaleType
from headrace.errors import RequestError

Scaling = Literal["none", "awq", "smoothquant"]
Rounding = Literal["nearest", "gptq"]

METHODS: Final[Mapping[str, tuple[Scaling, Rounding, Literal["integer", "nf4", "fp8"]]]] = {
    "rtn": ("none", "nearest", "integer"),
    "gptq": ("none", "gptq", "integer"),
    "awq": ("awq", "nearest", "integer"),
    "awq+gptq": ("awq", "gptq", "integer"),
    "smoothquant": ("smoothquant", "nearest", "integer"),
    "smoothquant+gptq": ("smoothquant", "gptq", "integer"),
    "nf4": ("none", "nearest", "nf4"),
    "nf4+gptq": ("none", "gptq", "nf4"),
    "fp8": ("none", "nearest", "fp8"),
    "fp8+gptq": ("none", "gptq", "fp8"),
}
BITS: Final = (2, 3, 4, 5, 6, 7, 8)
GROUPS: Final = (128, 64, 32)
GGUF_BITS: Final = (4, 6, 8)  # that our GGUF files have
KEPT: Final = 16  # "bits" of a tensor that stays as it is


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How every product is made smaller; `bits` says which. What differs between two recipes differs in the result."""

    method: str = "awq+gptq"
    group: int = 128  # inputs that share a scale; 0: the whole row
    symmetric: bool = False
    clip: bool = True
    act_order: bool = True
    damping: float = 0.01
    strength: float = 0.5  # of smoothquant
    scale_type: ScaleType = "bf16"
    nested: bool = False  # the magnitudes of NF4's blocks are rounded too
    gguf: bool = False  # grids are those of GGUF's block types
    block_type: str = ""  # of the products with the bits of this type, whatever their rows; "": chosen by bits
    sparsity: str = ""  # "2:4", or the share of zeros; "": none are made
    pruner: str = "sparsegpt"
    pruned: tuple[str, ...] = ()  # products that get zeros
    bits: dict[str, int] = {}  # of every product, by its canonical name; 16: kept

    @property
    def scaling(self) -> Scaling:
        return METHODS[self.method][0]

    @property
    def rounding(self) -> Rounding:
        return METHODS[self.method][1]

    @property
    def calibrates(self) -> bool:
        """True if the method looks at the inputs of products."""
        return (self.rounds and (self.scaling != "none" or self.rounding != "nearest")) or self.prunes_by_inputs

    @property
    def rounds(self) -> bool:
        return any(bits < KEPT for bits in self.bits.values())

    @property
    def prunes_by_inputs(self) -> bool:
        return bool(self.sparsity) and self.pruner != "magnitude"

    @property
    def needs_hessian(self) -> bool:
        return (self.rounds and self.rounding == "gptq") or (bool(self.sparsity) and self.pruner == "sparsegpt")

    @property
    def quantises_activations(self) -> bool:
        """True if the files say that readers quantise activations too."""
        return self.scaling == "smoothquant" or self.kind == "fp8"

    @property
    def kind(self) -> Literal["integer", "nf4", "fp8"]:
        return METHODS[self.method][2]

    def grid(self, bits: int, inputs: int = 256) -> GridSpec:
        """Return the grid of products with these bits; `inputs` of a row decide which block types of GGUF it fills."""
        if self.gguf:
            named = self.block_type and BLOCK_TYPES[self.block_type].bits == bits
            return GridSpec.of_blocks(self.block_type if named else block_type(bits, inputs, symmetric=self.symmetric))
        if self.kind == "nf4":
            return GridSpec(bits=4, group=NF4_BLOCK, kind="nf4", scale_type="f32", nested=self.nested)
        if self.kind == "fp8":
            return GridSpec(bits=8, group=self.group, kind="fp8", scale_type=self.scale_type)
        return GridSpec(bits=bits, group=self.group, symmetric=self.symmetric, scale_type=self.scale_type)


class SplitPlan(msgspec.Struct, frozen=True):
    """Into how many experts every MLP is split. All have the same number of neurons."""

    routed: int
    active: int  # of the routed ones, for each token
    shared: int

    @property
    def parts(self) -> int:
        return self.routed + self.shared

    @property
    def active_share(self) -> float:
        """Return the share of the neurons that a token goes through."""
        return (self.active + self.shared) / self.parts


def check_method(name: str) -> str:
    if name not in METHODS:
        raise RequestError(f"Unknown method '{name}'. Expected {', '.join(METHODS)}.", parameter="method")
    return name
