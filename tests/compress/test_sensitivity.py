"""What each product costs, and the bits that a target gives it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.compress.bit_plan import CANDIDATES, plan_bits
from headrace.compress.compression import products_of
from headrace.compress.grids import dequantise, fit, round_to_nearest
from headrace.compress.layer_pass import LayerPass, Tokens, embed, final_norm, head_logits, head_weight, load_layer
from headrace.compress.recipe import Recipe
from headrace.compress.sensitivity import PROBE_BITS, ProductSensitivity, measure_sensitivity
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder, open_model
from tests.models.tiny_models import Reference, prompt

Tiny = Callable[[str], Reference]
RECIPE = Recipe(method="rtn", group=32, scale_type="f32")


def log_probabilities(folder: ModelFolder, tokens: Tokens, rounded: str | None) -> np.ndarray:
    hidden = embed(folder, tokens)
    for index in range(len(folder.spec.layers)):
        tensors = load_layer(folder, index)
        if rounded is not None and rounded.startswith(f"layers.{index}."):
            name = rounded.split(".", 2)[2]
            grid = fit(tensors[name], RECIPE.grid(PROBE_BITS))
            tensors[name] = dequantise(round_to_nearest(tensors[name], grid), grid)
        hidden = LayerPass(folder.spec, index, tensors).forward(hidden, tokens.offsets)
    logits = head_logits(folder.spec, hidden, final_norm(folder), head_weight(folder)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_the_divergence_is_that_of_the_model_with_one_product_rounded(name: str, tiny: Tiny) -> None:
    folder = open_model(tiny(name).folder)
    prompts = [prompt(16, seed=each) for each in range(4)]
    found = measure_sensitivity(folder, prompts, RECIPE, CANDIDATES, tokens=64)
    assert [each.name for each in found] == products_of(folder)
    tokens = Tokens.join(prompts)
    expected = log_probabilities(folder, tokens, None)
    for each in (found[0], found[-1], max(found, key=lambda one: one.kl[PROBE_BITS])):
        rounded = log_probabilities(folder, tokens, each.name)
        divergence = float((np.exp(expected) * (expected - rounded)).sum(axis=1).mean())
        assert each.kl[PROBE_BITS] == pytest.approx(divergence, rel=0.02, abs=1e-6)
    costly = max(found, key=lambda one: one.kl[PROBE_BITS])
    assert costly.kl[2] > costly.kl[4] > costly.kl[8] > 0


def product(name: str, cost: float, weights: int = 1000) -> ProductSensitivity:
    return ProductSensitivity(name, weights, {bits: cost * 4.0**-bits for bits in CANDIDATES})


PRODUCTS = [product("a", 1.0), product("b", 100.0), product("c", 1.0), product("d", 0.01)]


def test_a_budget_goes_where_it_gains_most() -> None:
    plan = plan_bits(PRODUCTS, RECIPE, most_bits=4.6)
    assert plan.bits["b"] > max(plan.bits["a"], plan.bits["c"])
    assert min(plan.bits["a"], plan.bits["c"]) > plan.bits["d"]
    assert plan.bits_per_weight <= 4.6
    uniform = sum(each.kl[4] for each in PRODUCTS)
    assert plan.kl < uniform


def test_a_bound_of_the_divergence_takes_few_bits() -> None:
    plan = plan_bits(PRODUCTS, RECIPE, most_kl=0.1)
    assert plan.kl <= 0.1
    assert plan.bits["b"] > plan.bits["d"] == 2
    assert plan_bits(PRODUCTS, RECIPE, most_kl=0.01).bits_per_weight > plan.bits_per_weight


def test_fixed_products_keep_their_bits() -> None:
    plan = plan_bits(PRODUCTS, RECIPE, fixed={"d": 16}, most_bits=4.6)
    assert plan.bits["d"] == 16
    assert plan.bits_per_weight <= 4.6


def test_targets_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(RequestError, match=r"the least with these groups is 2\."):
        plan_bits(PRODUCTS, RECIPE, most_bits=2.0)
    with pytest.raises(RequestError, match=r"Choose a larger --max-kl"):
        plan_bits(PRODUCTS, RECIPE, most_kl=1e-9)
