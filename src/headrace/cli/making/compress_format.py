"""The flags of `headrace compress` that choose a format, block types of a GGUF file, or zeros."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from headrace.cli.making.compress_target import CompressTarget
from headrace.compress.block_grids import BLOCK_TYPES
from headrace.compress.compressed_folder import FORMATS, SPARSE
from headrace.compress.pruning import PRUNERS, parse_sparsity
from headrace.compress.recipe import GGUF_BITS, KEPT, Recipe
from headrace.errors import RequestError


def sparse_recipe(recipe: Recipe, sparsity: str, pruner: str, keep: Sequence[str], *, rounds: bool) -> Recipe:
    """Return a recipe that sets weights to 0, in all products but those that --keep leaves as they are."""
    if pruner not in PRUNERS:
        raise RequestError(f"Unknown pruner '{pruner}'. Expected {', '.join(PRUNERS)}.", parameter="pruner")
    patterns = [entry.rpartition("=")[0] for entry in keep if entry.endswith(f"={KEPT}")]
    pruned = [name for name in recipe.bits if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    bits = recipe.bits if rounds else dict.fromkeys(recipe.bits, KEPT)
    return msgspec.structs.replace(
        recipe, sparsity=parse_sparsity(sparsity), pruner=pruner, pruned=tuple(pruned), bits=bits
    )


def nested_recipe(recipe: Recipe) -> Recipe:
    """Return a recipe with double quantisation, which only NF4 has."""
    if recipe.grid(4).kind != "nf4":
        raise RequestError(f"--double-quant is for nf4 and nf4+gptq, not {recipe.method}.", parameter="double_quant")
    return msgspec.structs.replace(recipe, nested=True)


def default_format(recipe: Recipe) -> str:
    if not recipe.rounds:
        return "dense"
    return "bitsandbytes" if recipe.grid(4).kind == "nf4" else "compressed-tensors"


def check_format(kind: str, recipe: Recipe) -> None:
    """Raise RequestError for a format that does not hold what the recipe makes."""
    if kind not in FORMATS:
        raise RequestError(f"Unknown format '{kind}'. Expected {', '.join(FORMATS)}.", parameter="format")
    if kind == SPARSE and (recipe.rounds or not recipe.sparsity):
        raise RequestError(
            f"{SPARSE} holds weights with zeros that are not rounded. Pass --sparsity, and no --bits.",
            parameter="format",
        )
    if kind == "dense" and recipe.rounds:
        raise RequestError("dense holds no rounded weights. Remove --format or --bits.", parameter="format")
    if kind == "gguf" and recipe.sparsity and recipe.rounds and not recipe.symmetric:
        raise RequestError(
            "Block types with a minimum have no exact 0. Pass --symmetric with --sparsity for a GGUF file.",
            parameter="symmetric",
        )
    if recipe.kind == "fp8":
        _check_fp8(recipe)
    if kind in ("compressed-tensors", "bitsandbytes"):
        if not recipe.rounds:
            raise RequestError(f"{kind} is for rounded weights. Remove --format or pass --bits.", parameter="format")
        if (kind == "bitsandbytes") != (recipe.grid(4).kind == "nf4"):
            raise RequestError(
                f"{kind} does not hold the codes of {recipe.method}. bitsandbytes takes nf4, compressed-tensors all "
                "other methods.",
                parameter="format",
            )


def _check_fp8(recipe: Recipe) -> None:
    if recipe.group:
        raise RequestError("FP8 files have a scale per output. Remove --group.", parameter="group")
    if any(bits not in (8, KEPT) for bits in recipe.bits.values()):
        raise RequestError("FP8 has 8 bits, and --keep PATTERN=16 keeps what it names as it is.", parameter="keep")


def gguf_recipe(recipe: Recipe, block_type: str | None, target: CompressTarget | None) -> Recipe:
    """Return a recipe whose products get block types of GGUF."""
    if recipe.scaling == "smoothquant" or recipe.kind != "integer":
        raise RequestError(
            f"GGUF files have no {recipe.method}. Choose rtn, gptq, awq or awq+gptq.", parameter="method"
        )
    if target is not None:
        raise RequestError(
            "A GGUF file takes no mixed plan. Pass --bits 8, 6 or 4, and --keep PATTERN=BITS for products that need "
            "more.",
            parameter="bits",
        )
    bits, name = dict(recipe.bits), ""
    if block_type is not None:
        name = block_type.upper()
        if name not in BLOCK_TYPES:
            raise RequestError(
                f"Unknown block type '{block_type}'. Expected {', '.join(BLOCK_TYPES)}.", parameter="block_type"
            )
        usual = max(set(bits.values()), key=list(bits.values()).count)
        bits = {product: BLOCK_TYPES[name].bits if each == usual else each for product, each in bits.items()}
    wrong = sorted({each for each in bits.values() if each not in (*GGUF_BITS, KEPT)})
    if wrong:
        raise RequestError(
            f"GGUF files of {wrong[0]} bits are not written. Expected --bits 8, 6 or 4.", parameter="bits"
        )
    return msgspec.structs.replace(recipe, gguf=True, block_type=name, bits=bits)


def plain_recipe(recipe: Recipe, block_type: str | None) -> Recipe:
    """Return the recipe of a folder, which has no block types."""
    if block_type is not None:
        raise RequestError("--block-type is for GGUF files. Give OUT the ending .gguf.", parameter="block_type")
    return recipe
