"""The target of a mixed plan for `headrace compress`: reads it from flags, and prints the plan that meets it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from rich import box
from rich.table import Table

from headrace.cli.making.made_model import table_console
from headrace.compress.bit_plan import CANDIDATES, BitPlan, plan_bits
from headrace.compress.compression import kept_bytes
from headrace.compress.recipe import KEPT, Recipe
from headrace.compress.sensitivity import ProductSensitivity, measure_sensitivity
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder

_SHOWN: Final = (3, 4, 8)  # bits whose cost the table has
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?)B?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}


class CompressTarget(msgspec.Struct, frozen=True):
    """One of these is set."""

    bits: float | None = None  # mean bits per weight in the layers' products, with scales
    size: float | None = None  # bytes of the weight files
    kl: float | None = None


def parse_target(bits: float | None, size: str | None, kl: float | None) -> CompressTarget | None:
    """Return the target of a mixed plan; None if all products get the same bits."""
    if sum(each is not None for each in (bits, size, kl)) > 1:
        raise RequestError("Pass one of --bits, --target-size and --max-kl.", parameter="bits")
    if kl is not None:
        if not kl > 0:
            raise RequestError(f"'max_kl' must be greater than 0, not {kl:g}.", parameter="max_kl")
        return CompressTarget(kl=kl)
    if size is not None:
        found = _SIZE.fullmatch(size.strip())
        if found is None:
            raise RequestError(f"Unknown size '{size}'. Write it like 80MB or 4GB.", parameter="target_size")
        return CompressTarget(size=float(found[1]) * _UNITS[found[2].upper()])
    return None if bits is None or bits == int(bits) else CompressTarget(bits=bits)


def planned(
    folder: ModelFolder,
    sequences: Sequence[Sequence[int]],
    recipe: Recipe,
    target: CompressTarget,
    watch: Callable[[int, int], None],
) -> Recipe:
    """Measure the products, print the plan that meets the target, and return the recipe with its bits."""
    most_bits = _most_bits(folder, recipe, target)  # before minutes are spent on a target that cannot be met
    products = measure_sensitivity(folder, sequences, recipe, CANDIDATES, watch=watch)
    plan = plan_bits(products, recipe, fixed=_fixed(recipe), most_bits=most_bits, most_kl=target.kl)
    _show(products, plan)
    return msgspec.structs.replace(recipe, bits=plan.bits)


def _fixed(recipe: Recipe) -> dict[str, int]:
    """Return the products whose bits --keep names: those that differ from the rest."""
    usual = max(set(recipe.bits.values()), key=list(recipe.bits.values()).count)
    return {name: bits for name, bits in recipe.bits.items() if bits != usual}


def _most_bits(folder: ModelFolder, recipe: Recipe, target: CompressTarget) -> float | None:
    if target.size is None:
        return target.bits
    fixed = _fixed(recipe)
    other = kept_bytes(folder, fixed)
    weights = 0
    for name in recipe.bits:
        rows, columns = folder.shapes[name]
        if name not in fixed:
            weights += rows * columns
        elif fixed[name] < KEPT:
            other += rows * columns * recipe.grid(fixed[name]).stored_bits / 8
    if target.size <= other:
        raise RequestError(
            f"The target of {target.size / 1e6:,.1f} MB is not more than what is kept as it is, embedding and norms: "
            f"{other / 1e6:,.1f} MB.",
            parameter="target_size",
        )
    return (target.size - other) * 8 / weights


def _show(products: Sequence[ProductSensitivity], plan: BitPlan) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("product")
    for heading in ("weights", *(f"KL at {bits} bits" for bits in _SHOWN), "bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in products:
        costs = (f"{each.kl[bits]:.1e}" for bits in _SHOWN)
        table.add_row(each.name, f"{each.weights:,}", *costs, str(plan.bits[each.name]))
    console = table_console()
    console.print(table)
    console.print(
        f"The plan has {plan.bits_per_weight:.2f} bits per weight with scales, and expects a KL of about "
        f"{plan.kl:.2g} with rounding to nearest."
    )
