"""A decoder in torch, built from any ModelSpec that `check_trainable` accepts, with the arithmetic of the core in f32.

Does not know data, optimisers or files that are written.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as functional
from torch import Tensor

import headrace._core as _core
from headrace.adapt.attention import attend
from headrace.adapt.mixture import can_mix, is_routing, mixture
from headrace.adapt.modules import trained_modules
from headrace.adapt.products import LowRank, Product
from headrace.adapt.recipe import AdaptRecipe
from headrace.compress.layer_pass import load_tensor, rope_tables
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder
from headrace.models.packing import pack_matrix
from headrace.models.precision import parse_precision
from headrace.models.spec import LayerSpec, ModelSpec, NormKind
from headrace.models.tensor_shapes import is_product

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "squared_relu": lambda values: functional.relu(values).square(),
    "quick_gelu": lambda values: values * (1.702 * values).sigmoid(),
}


def check_trainable(spec: ModelSpec) -> None:
    """Raise RequestError for a model that `headrace adapt` cannot train."""
    if spec.kind != "decoder":
        raise RequestError(f"{spec.architecture} is no decoder. `headrace adapt` trains decoders.", parameter="model")
    unlike = (
        spec.recurrent
        or spec.attention_gate
        or spec.parallel
        or spec.sinks
        or spec.latent
        or spec.qk_norm == "each_head"
        or spec.embedding_norm
    )
    layers = any(layer.shares is not None or layer.gate_cutoff is not None for layer in spec.layers)
    unlike = unlike or spec.layer_inputs or spec.layer_scale or spec.value_norm or layers or not spec.same_layers
    positions = spec.alibi or spec.learned_positions or any(layer.grows for layer in spec.layers)
    if unlike or positions or spec.head_bias or spec.activation not in ACTIVATIONS or not can_mix(spec.experts):
        raise RequestError(
            f"`headrace adapt` cannot train {spec.architecture} yet: it takes decoders like Llama.",
            parameter="model",
        )


class Decoder:
    """Tensors by their canonical names. Those that are trained are in `trained`."""

    def __init__(self, folder: ModelFolder, recipe: AdaptRecipe | None = None, *, threads: int = 1) -> None:
        """Without a recipe nothing is trained: a teacher."""
        check_trainable(folder.spec)
        self.spec = folder.spec
        self.trained: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._pool = _core.Pool(threads)
        self.products: dict[str, Product] = {}
        full = recipe is not None and recipe.full
        for name in folder.shapes:
            if not (is_product(name) and name.startswith("layers.")):
                self._tensors[name] = self._load(folder, name, full and not is_routing(name))
        for name, shape in folder.shapes.items():
            if is_product(name) and name.startswith("layers."):
                self.products[name] = self._product(folder, name, shape[0], recipe)
        if recipe is not None and not full:
            self._add_adapters(folder, recipe)

    def hidden(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the final hidden states [places, hidden] of places in the flat rows of tokens [rows, length]."""
        states = functional.embedding(tokens, self._tensors["embed"]) * self.spec.embedding_scale
        last = len(self.spec.layers) - 1
        for index, layer in enumerate(self.spec.layers):
            states = self._layer(index, layer, states, places if index == last else None)
        return self._norm("norm", states) if self.spec.final_norm else states

    def logits(self, states: Tensor) -> Tensor:
        logits = functional.linear(states, self._tensors["embed" if self.spec.tied else "head"])
        cap = self.spec.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forget_rounding(self) -> None:
        for product in self.products.values():
            product.forget_rounding()

    def weight(self, name: str) -> Tensor:
        """Return a canonical tensor as it is used, with its adapter."""
        with torch.no_grad():
            weight = self.products[name].merged() if name in self.products else self._tensors[name]
            return weight.detach()

    def _load(self, folder: ModelFolder, name: str, full: bool) -> Tensor:
        # A copy: weights of f32 files are views of a mapped file.
        tensor = torch.from_numpy(load_tensor(folder, name).copy())
        if full:
            self.trained[name] = tensor.requires_grad_()
        return tensor

    def _product(self, folder: ModelFolder, name: str, outputs: int, recipe: AdaptRecipe | None) -> Product:
        bias = self._tensors.get(f"{name}.bias")
        rounded = None if recipe is None or recipe.rounded == "none" else parse_precision(recipe.rounded)
        weight: Tensor | _core.Packed
        if recipe is not None and recipe.base != "f32":
            precision = parse_precision(recipe.base)
            weight = pack_matrix(folder.tensor(name).to_f32(), precision, self._pool)
        else:
            weight = self._load(folder, name, recipe is not None and recipe.full)
        return Product(weight, bias, outputs=outputs, rounding=rounded, pool=self._pool)

    def _add_adapters(self, folder: ModelFolder, recipe: AdaptRecipe) -> None:
        for place, module in enumerate(trained_modules(folder, recipe.targets)):
            product = self.products[module.tensor]
            inputs = folder.shapes[module.tensor][1]
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + place)
            bound = 1 / math.sqrt(inputs)
            a = torch.empty(recipe.rank, inputs).uniform_(-bound, bound, generator=generator).requires_grad_()
            b = torch.zeros(module.rows.stop - module.rows.start, recipe.rank).requires_grad_()
            product.adapters.append(LowRank(module.rows, a, b, recipe.alpha / recipe.rank))
            self.trained[f"{module.name}.lora_A"] = a
            self.trained[f"{module.name}.lora_B"] = b

    def _layer(self, index: int, layer: LayerSpec, states: Tensor, places: Tensor | None) -> Tensor:
        name = f"layers.{index}"
        inputs = self._norm(f"{name}.attn.norm", states) if self.spec.pre_norm and layer.attn_norm else states
        mixed = self._attention(f"{name}.attn", layer, inputs)
        if places is not None:  # what the last layer does after its attention is done for these alone
            states, mixed = (each.flatten(0, 1).index_select(0, places) for each in (states, mixed))
        states = self._join(f"{name}.attn", states, self.products[f"{name}.attn.o"](mixed))
        inputs = self._norm(f"{name}.mlp.norm", states) if self.spec.pre_norm else states
        if layer.experts and self.spec.experts is not None:
            outputs = mixture(self.spec.experts, f"{name}.mlp", inputs, self._tensors, self._feed_forward)
        else:
            outputs = self._feed_forward(f"{name}.mlp", inputs)
        return self._join(f"{name}.mlp", states, outputs)

    def _attention(self, name: str, layer: LayerSpec, inputs: Tensor) -> Tensor:
        spec = self.spec
        rows, length, _ = inputs.shape
        q, k, v = self.products[f"{name}.qkv"](inputs).split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        if spec.qk_norm == "full":
            q, k = self._norm(f"{name}.q_norm", q, "rms"), self._norm(f"{name}.k_norm", k, "rms")
        q, k, v = (each.view(rows, length, -1, spec.head_size) for each in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self._norm(f"{name}.q_norm", q, "rms"), self._norm(f"{name}.k_norm", k, "rms")
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if layer.rope is not None:
            tables = rope_tables(spec.ropes[layer.rope], spec.rope_variant(length), length)
            cosine, sine = (torch.from_numpy(table[:, 0]) for table in tables)
            q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        mixed = attend(q, k, v, scale=spec.attention_scale, window=layer.window, softcap=spec.attention_softcap)
        return mixed.transpose(1, 2).reshape(rows, length, -1)

    def _feed_forward(self, name: str, inputs: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.spec.activation]
        if self.spec.gated:
            gate, up = self.products[f"{name}.gate_up"](inputs).chunk(2, dim=-1)
            inner = activate(gate) * up
        else:
            inner = activate(self.products[f"{name}.up"](inputs))
        return self.products[f"{name}.down"](inner)

    def _join(self, name: str, states: Tensor, outputs: Tensor) -> Tensor:
        if self.spec.out_norm:
            outputs = self._norm(f"{name}.out_norm", outputs)
        joined = states + outputs
        return self._norm(f"{name}.residual_norm", joined) if self.spec.residual_norm else joined

    def _norm(self, name: str, states: Tensor, kind: NormKind | None = None) -> Tensor:
        weight, bias = self._tensors[name], self._tensors.get(f"{name}.bias")
        if (kind or self.spec.norm) == "layer":
            return functional.layer_norm(states, weight.shape, weight, bias, self.spec.norm_eps)
        return functional.rms_norm(states, weight.shape, weight, self.spec.norm_eps)


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the leading dims of [rows, heads, length, size] by tables [length, half of these dims]."""
    half = cosine.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
