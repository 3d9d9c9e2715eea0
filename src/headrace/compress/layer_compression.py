"""Makes one layer smaller: measures its inputs, moves factors between tensors, and rounds product after product.

Each product sees the inputs that the already rounded products before it give, in this layer and in those before. Moves
no factor into a tensor that the layer does not have: a model that normalises only outputs keeps its inputs' sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.compress.gptq import round_with_correction
from headrace.compress.grids import Grid, dequantise, fit, round_to_nearest, rounded
from headrace.compress.input_statistics import InputStatistics
from headrace.compress.layer_pass import F32, LayerPass, Tokens
from headrace.compress.pruning import prune
from headrace.compress.recipe import KEPT, Recipe
from headrace.compress.scaling import Sets, search_factors, smooth_factors


class RoundedProduct(NamedTuple):
    codes: NDArray[np.uint8]
    grid: Grid
    error: float  # of the outputs on samples of the inputs, relative to their size; 0 without samples


class CompressedLayer(NamedTuple):
    products: dict[str, RoundedProduct]  # by their names within the layer
    changed: dict[str, F32]  # other tensors, whose values factors have changed
    factors: dict[str, float]  # AWQ's exponent of each product, or 1 where smoothing moved a factor
    errors: dict[str, float]  # of products that only get zeros, as of rounded ones


class LayerCompression:
    """One layer on its way. `hidden` has the hidden states before it, and after `run` those behind it."""

    def __init__(
        self,
        layer: LayerPass,
        hidden: F32,
        tokens: Tokens,
        recipe: Recipe,
        bits: Mapping[str, int],
        stored: Mapping[str, Literal["bf16", "f16", "f32"]],
        watch: Callable[[str], None] = lambda _: None,
        *,
        pruned: Collection[str] = (),
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`bits`, `stored` and `pruned` go by names within the layer: the bits of products, the types of other tensors
        on disk, and the products that get zeros. `parts` has the rows of the tensors that a product becomes."""
        self._layer = layer
        self._hidden = hidden
        self._tokens = tokens
        self._recipe = recipe
        self._bits = bits
        self._stored = stored
        self._watch = watch
        self._pruned = pruned
        self._parts = parts or {}
        self._errors: dict[str, float] = {}
        self._products: dict[str, RoundedProduct] = {}
        self._changed: dict[str, F32] = {}
        self._factors: dict[str, float] = {}

    def run(self) -> CompressedLayer:
        if self._recipe.scaling != "none" and self._rounds("attn.qkv", "attn.o", *self._mlp_products()):
            self.move_factors()
        layer, recipe = self._layer, self._recipe
        attended = np.empty((len(self._hidden), layer.spec.q_size), dtype=np.float32)
        if recipe.calibrates:
            self._round("attn.qkv", (layer.attention_inputs(self._hidden[rows]) for rows, _ in self._tokens.chunks()))
        else:
            self._round_plainly(("attn.qkv", "attn.o", *self._mlp_products()))
        for rows, offsets in self._tokens.chunks():
            attended[rows] = layer.attend(layer.attention_inputs(self._hidden[rows]), offsets)
        if recipe.calibrates:
            self._round("attn.o", (attended[rows] for rows, _ in self._tokens.chunks()))
        for rows, _ in self._tokens.chunks():
            self._hidden[rows] = layer.after_attention(self._hidden[rows], attended[rows])
        del attended
        if recipe.calibrates:
            self._round_mlps(layer.up, lambda _, inputs: inputs)
            self._round_mlps("down", layer.open_mlp)
        for rows, _ in self._tokens.chunks():
            inputs = layer.mlp_inputs(self._hidden[rows])
            self._hidden[rows] = layer.after_mlp(self._hidden[rows], inputs)
        return CompressedLayer(self._products, self._changed, self._factors, self._errors)

    def _mlps(self) -> list[str]:
        experts = self._layer.spec.experts
        if not self._layer.layer.experts or experts is None:
            return ["mlp"]
        return [f"mlp.experts.{expert}" for expert in range(experts.count)]

    def _mlp_products(self) -> Iterator[str]:
        for mlp in self._mlps():
            yield from (f"{mlp}.{self._layer.up}", f"{mlp}.down")

    def _rounds(self, *names: str) -> bool:
        return any(self._bits[name] < KEPT for name in names)

    def _treats(self, *names: str) -> bool:
        """Return whether products are rounded or get zeros."""
        return any(self._bits[name] < KEPT or name in self._pruned for name in names)

    # Rounding.

    def _round_plainly(self, names: Iterable[str]) -> None:
        """Round without calibration."""
        for name in names:
            self._round(name, ())

    def _round(self, name: str, inputs: Iterable[F32]) -> None:
        if self._treats(name):
            self._round_one(name, self._statistics(name, inputs))

    def _round_mlps(self, product: str, inputs_of: Callable[[str, F32], F32]) -> None:
        names = {mlp: f"{mlp}.{product}" for mlp in self._mlps()}
        if not self._treats(*names.values()):
            return
        found = {mlp: self._empty(name) for mlp, name in names.items() if self._treats(name)}
        for rows, _ in self._tokens.chunks():
            inputs = self._layer.mlp_inputs(self._hidden[rows])
            for route in self._layer.routes(inputs):
                if route.mlp in found:
                    found[route.mlp].add(inputs_of(route.mlp, inputs[route.rows]))
        for mlp, statistics in found.items():
            self._round_one(names[mlp], statistics)

    def _round_one(self, name: str, statistics: InputStatistics) -> None:
        self._watch(name)
        recipe, original = self._recipe, self._layer.tensors[name]
        weights = original
        if name in self._pruned:
            weights = prune(original, statistics, recipe.pruner, recipe.sparsity, damping=recipe.damping)
            self._factors.setdefault(name, 0.0)
        if not self._rounds(name):
            values = rounded(weights, self._stored[name])
            self._layer.tensors[name] = self._changed[name] = values
            self._errors[name] = relative_error(original, values, statistics.samples)
            return
        importance = statistics.mean_square if statistics.rows else None
        grid = fit(
            weights,
            recipe.grid(self._bits[name], weights.shape[1]),
            importance=importance,
            clip=recipe.clip,
            parts=self._parts.get(name, ()),
        )
        if recipe.rounding == "gptq" and statistics.rows and statistics.hessian is not None:
            codes = round_with_correction(
                weights,
                grid,
                statistics.hessian,
                act_order=recipe.act_order,
                damping=recipe.damping,
                zeros=name in self._pruned,
            )
        else:
            codes = round_to_nearest(weights, grid)
        values = dequantise(codes, grid)
        self._products[name] = RoundedProduct(codes, grid, relative_error(original, values, statistics.samples))
        self._layer.tensors[name] = values

    def _statistics(self, name: str, inputs: Iterable[F32]) -> InputStatistics:
        found = self._empty(name)
        for rows in inputs:
            found.add(rows)
        return found

    def _empty(self, name: str, *, plain: bool = False) -> InputStatistics:
        width = self._layer.tensors[name].shape[1]
        return InputStatistics(width, total=len(self._tokens.ids), hessian=self._recipe.needs_hessian and not plain)

    # Factors.

    def move_factors(self) -> None:
        """Measure the layer as it is, then move a factor from every product's weights into what makes its inputs."""
        layer, spec = self._layer, self._layer.spec
        self._watch("scales")
        mlps = self._mlps()
        before, inner = self._empty("attn.qkv", plain=True), self._empty("attn.o", plain=True)
        after = self._empty(f"{mlps[0]}.{layer.up}", plain=True)
        opened = {mlp: self._empty(f"{mlp}.down", plain=True) for mlp in mlps}
        for rows, offsets in self._tokens.chunks():
            inputs = layer.attention_inputs(self._hidden[rows])
            before.add(inputs)
            attended = layer.attend(inputs, offsets)
            inner.add(attended)
            inputs = layer.mlp_inputs(layer.after_attention(self._hidden[rows], attended))
            after.add(inputs)
            for route in layer.routes(inputs):
                opened[route.mlp].add(layer.open_mlp(route.mlp, inputs[route.rows]))
        if spec.pre_norm:
            self._into_norm("attn.norm", ["attn.qkv"], before)
            self._into_norm("mlp.norm", [f"{mlp}.{layer.up}" for mlp in mlps], after)
        self._into_values(inner)
        for mlp in mlps if spec.gated else ():
            self._into_up(mlp, opened[mlp])

    def _choose(self, names: list[str], statistics: InputStatistics, sets: Sets | None = None) -> F32 | None:
        names = [name for name in names if self._rounds(name)]
        if not names or not statistics.rows:
            return None
        weights = [self._layer.tensors[name] for name in names]
        if self._recipe.scaling == "smoothquant":
            factors, exponent = smooth_factors(weights, statistics, strength=self._recipe.strength, sets=sets), 1.0
        else:
            grid = self._recipe.grid(min(self._bits[name] for name in names), weights[0].shape[1])
            factors, exponent = search_factors(weights, grid, statistics, sets=sets)
        self._factors.update(dict.fromkeys(names, exponent))
        return factors if exponent else None

    def _into_norm(self, norm: str, products: list[str], statistics: InputStatistics) -> None:
        factors = self._choose(products, statistics)
        if factors is None:
            return
        tensors, offset = self._layer.tensors, np.float32(self._layer.spec.norm_offset)
        weight = tensors[norm]
        bias = tensors.get(f"{norm}.bias")
        divided = rounded(weight / factors - offset, self._stored[norm]) + offset
        # A norm is stored with few bits: what its rounding changes goes into the weights too.
        exact = np.divide(weight, divided, out=factors.copy(), where=(divided != 0) & (bias is None))
        tensors[norm] = self._changed[norm] = divided
        if bias is not None:
            tensors[f"{norm}.bias"] = self._changed[f"{norm}.bias"] = rounded(
                bias / factors, self._stored[f"{norm}.bias"]
            )
        for name in [*products, "mlp.router"] if norm == "mlp.norm" else products:
            if name not in tensors:
                continue
            tensors[name] = tensors[name] * exact
            if name == "mlp.router" or not self._rounds(name):
                tensors[name] = self._changed[name] = rounded(tensors[name], self._stored[name])

    def _into_values(self, statistics: InputStatistics) -> None:
        """Move factors from `o` into the rows of `qkv` that make values. Query heads of one value head share them."""
        spec = self._layer.spec
        sets = (spec.kv_heads, spec.heads // spec.kv_heads, spec.head_size)
        factors = self._choose(["attn.o"], statistics, sets)
        if factors is not None:
            rows = slice(spec.q_size + spec.kv_size, None)
            self._divide_rows("attn.qkv", rows, factors.reshape(sets)[:, 0].reshape(-1))
            self._multiply_columns("attn.o", factors)

    def _into_up(self, mlp: str, statistics: InputStatistics) -> None:
        """Move factors from `down` into the rows of `up`, by which the gate is multiplied."""
        factors = self._choose([f"{mlp}.down"], statistics)
        if factors is not None:
            self._divide_rows(f"{mlp}.{self._layer.up}", slice(len(factors), None), factors)
            self._multiply_columns(f"{mlp}.down", factors)

    def _divide_rows(self, name: str, rows: slice, factors: F32) -> None:
        tensors = self._layer.tensors
        tensors[name] = tensors[name].copy()
        tensors[name][rows] /= factors[:, None]
        bias = tensors.get(f"{name}.bias")
        if bias is not None:
            bias = bias.copy()
            bias[rows] /= factors
            bias = rounded(bias, self._stored[f"{name}.bias"])
            tensors[f"{name}.bias"] = self._changed[f"{name}.bias"] = bias
        if not self._rounds(name):
            tensors[name] = self._changed[name] = rounded(tensors[name], self._stored[name])

    def _multiply_columns(self, name: str, factors: F32) -> None:
        self._layer.tensors[name] = self._layer.tensors[name] * factors


def relative_error(weights: F32, values: F32, rows: F32) -> float:
    """Return the square error of a product's outputs over their square."""
    if not len(rows):
        return 0.0
    outputs = np.square(rows @ weights.T).sum(dtype=np.float64)
    return float(np.square(rows @ (weights - values).T).sum(dtype=np.float64) / max(float(outputs), 1e-30))
