"""Chooses the bits of every product for a target, from what each product's rounding costs. Measures nothing."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from headrace.compress.recipe import Recipe
from headrace.compress.sensitivity import ProductSensitivity
from headrace.errors import RequestError

CANDIDATES: Final = (2, 3, 4, 5, 6, 8)


class BitPlan(msgspec.Struct, frozen=True):
    bits: dict[str, int]
    kl: float  # sum of what the products cost, each alone
    bits_per_weight: float  # with scales


def plan_bits(
    products: Sequence[ProductSensitivity],
    recipe: Recipe,
    *,
    fixed: Mapping[str, int] | None = None,
    most_bits: float | None = None,
    most_kl: float | None = None,
) -> BitPlan:
    """Begin with the fewest bits and give more to the product that gains most for them, until the target is met.

    `most_bits` bounds the mean bits per weight, with scales; `most_kl` the sum of the divergences. `fixed` products
    keep their bits.
    """
    kept = fixed or {}
    free = [each for each in products if each.name not in kept]
    weights = sum(each.weights for each in free)
    if not free:
        return BitPlan(dict(kept), 0.0, 0.0)
    sizes = {bits: recipe.grid(bits).stored_bits for bits in CANDIDATES}
    chosen = {each.name: CANDIDATES[0] for each in free}
    by_name = {each.name: each for each in free}
    used = sizes[CANDIDATES[0]] * weights
    total = sum(each.kl[CANDIDATES[0]] for each in free)
    if most_bits is not None and used > most_bits * weights:
        raise RequestError(
            f"The target is {most_bits:.2f} bits per weight in the layers, and the least with these groups is "
            f"{used / weights:.2f}. Choose a larger target or larger groups.",
            parameter="bits",
        )
    heap = [step for each in free if (step := _best_step(each, chosen[each.name], sizes)) is not None]
    heapq.heapify(heap)
    while heap and (most_kl is None or total > most_kl):
        _, name, bits = heapq.heappop(heap)
        each, now = by_name[name], chosen[name]
        more = (sizes[bits] - sizes[now]) * each.weights
        if most_bits is not None and used + more > most_bits * weights:
            continue  # a smaller product may still fit
        chosen[name] = bits
        used += more
        total += each.kl[bits] - each.kl[now]
        step = _best_step(each, bits, sizes)
        if step is not None:
            heapq.heappush(heap, step)
    if most_kl is not None and total > most_kl:
        raise RequestError(
            f"Even 8 bits everywhere cost a KL of about {total:.2g}, more than {most_kl:.2g}. Choose a larger "
            "--max-kl.",
            parameter="max_kl",
        )
    return BitPlan({**chosen, **kept}, total, used / weights)


def _best_step(product: ProductSensitivity, now: int, sizes: Mapping[int, float]) -> tuple[float, str, int] | None:
    """Return the step to more bits that gains most per bit, first in a heap."""
    steps = [
        ((product.kl[bits] - product.kl[now]) / ((sizes[bits] - sizes[now]) * product.weights), product.name, bits)
        for bits in CANDIDATES
        if bits > now
    ]
    return min(steps, default=None)
