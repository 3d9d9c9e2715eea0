"""Gives a model fewer heads, feed-forward neurons or experts, layer by layer, and writes it as a folder.

What costs least on the calibration tokens goes, the same number in every layer, because a config has one number. The
products behind it are fitted to the outputs of the layer before, by least squares. Rounds nothing, and trains nothing:
`headrace adapt --distil-from` heals the result.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.compress.compressed_folder import copy_other_files
from headrace.compress.compression import check_model
from headrace.compress.disk_layout import dense_type, untouched_names
from headrace.compress.input_statistics import SAMPLES
from headrace.compress.layer_pass import F32, LayerPass, MlpRows, Tokens, embed, is_norm, load_layer
from headrace.compress.recipe import Recipe
from headrace.compress.reshape.head_pooling import pool_heads
from headrace.compress.reshape.output_fit import fit_product, fitted
from headrace.compress.stored_product import NAMES, Stored, store_dense, to_disk_type
from headrace.compress.work_folder import as_pieces
from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import family_of, family_sources, model_spec
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.json_file import read_json
from headrace.models.formats.model_weights import SINGLE_FILE
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.model_folder import ModelFolder
from headrace.models.spec import ModelSpec
from headrace.models.tensor_shapes import tensor_shapes

_CONFIG_LIMIT: Final = 16 << 20
_SUFFIX: Final = ".partial"

Kept = NDArray[np.intp]


class Shape(NamedTuple):
    """The sizes of the result; None keeps the model's."""

    kv_heads: int | None = None  # key and value heads are averaged into this many
    heads: int | None = None  # query heads that stay, in whole groups with their key and value head
    neurons: int | None = None  # of each feed-forward layer
    experts: int | None = None  # of each mixture
    expert_neurons: int | None = None  # of each expert


class LayerReport(NamedTuple):
    layer: int
    error: float  # of the layer's outputs, relative to what it adds to its inputs


def target_spec(spec: ModelSpec, shape: Shape) -> ModelSpec:
    """Return the spec of the result. Raise RequestError for sizes that it cannot have."""
    kv_heads = _at_most(shape.kv_heads, spec.kv_heads, "kv_heads")
    if spec.kv_heads % kv_heads:
        raise RequestError(
            f"'kv_heads' must divide the {spec.kv_heads} key and value heads of the model, not {kv_heads}.",
            parameter="kv_heads",
        )
    group = spec.heads // kv_heads
    heads = _at_most(shape.heads, spec.heads, "heads")
    if heads % group:
        raise RequestError(
            f"'heads' must be a multiple of {group}, the query heads of a key and value head, not {heads}: whole "
            "groups go.",
            parameter="heads",
        )
    neurons = _at_most(shape.neurons, spec.intermediate_size, "neurons")
    changed = msgspec.structs.replace(spec, heads=heads, kv_heads=heads // group, intermediate_size=neurons)
    if shape.experts is not None:
        if spec.experts is None:
            raise RequestError(f"{spec.architecture} has no experts.", parameter="experts")
        count = _at_most(shape.experts, spec.experts.count, "experts")
        if count < spec.experts.top_k:
            raise RequestError(
                f"'experts' must be at least {spec.experts.top_k}, those of a token, not {count}.", parameter="experts"
            )
        changed = msgspec.structs.replace(changed, experts=msgspec.structs.replace(spec.experts, count=count))
    if shape.expert_neurons is not None:
        changed = _with_smaller_experts(changed, shape.expert_neurons)
    if changed == spec:
        raise RequestError(
            "Pass --kv-heads, --heads, --neurons, --experts or --expert-neurons: nothing would change.",
            parameter="heads",
        )
    if spec.qk_norm == "full" and changed.heads != spec.heads:
        raise RequestError(f"{spec.architecture} normalises all heads together, so none can go.", parameter="heads")
    if spec.qk_norm == "full" and changed.kv_heads != spec.kv_heads:
        raise RequestError(f"{spec.architecture} normalises all key heads together.", parameter="kv_heads")
    return changed


def _with_smaller_experts(spec: ModelSpec, neurons: int) -> ModelSpec:
    if spec.experts is None:
        raise RequestError(
            f"{spec.architecture} has no experts. --neurons is for its feed-forward layers.", parameter="expert_neurons"
        )
    size = _at_most(neurons, spec.experts.intermediate_size, "expert_neurons")
    return msgspec.structs.replace(spec, experts=msgspec.structs.replace(spec.experts, intermediate_size=size))


def reshape_model(
    folder: ModelFolder,
    out: Path,
    sequences: Sequence[Sequence[int]],
    shape: Shape,
    watch: Callable[[int, int], None] = lambda _, __: None,
) -> list[LayerReport]:
    """Write the model with other sizes to the folder `out`, which must not exist."""
    check_model(folder, Recipe(bits={name: 16 for name in folder.shapes}), command="reshape")
    if out.exists():
        raise RequestError(f"{out} exists. Choose another name, or remove it first.", parameter="out")
    spec = target_spec(folder.spec, shape)
    config = _changed_config(folder, spec)
    tokens = Tokens.join(sequences)
    hidden = embed(folder, tokens)
    sources = family_sources(family_of(ConfigJson.read(folder.path / "config.json")), spec, folder.weights.names)
    shapes = tensor_shapes(spec)
    tensors: Stored = {}
    reports: list[LayerReport] = []
    for index in range(len(spec.layers)):
        watch(index, len(spec.layers))
        layer = _Reshaped(LayerPass(folder.spec, index, load_layer(folder, index)), spec, shape)
        reports.append(LayerReport(index, layer.run(hidden, tokens)))
        for name, values in layer.tensors.items():
            full = f"layers.{index}.{name}"
            stored = values - np.float32(spec.norm_offset) if is_norm(name) else values
            begin = 0
            for part, rows in zip(
                sources[full], _part_rows(spec, full, shapes[full][0], len(sources[full])), strict=True
            ):
                tensors |= store_dense(part.name, stored[begin : begin + rows], dense_type(folder, full))
                begin += rows
    watch(len(spec.layers), len(spec.layers))
    for name in untouched_names(folder):
        kind = "bf16" if folder.weights.layout(name) is not None else folder.weights.dense(name).dtype
        tensors[name] = (NAMES[kind], to_disk_type(folder.weights.dense(name).to_f32(), kind))
    made = out.with_name(out.name + _SUFFIX)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    write_safetensors(made / SINGLE_FILE, as_pieces(dict(sorted(tensors.items()))), {"format": "pt"})
    copy_other_files(folder.path, made)
    with new_file(made / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
    os.replace(made, out)
    return reports


class _Reshaped:
    """One layer on its way to its new sizes. `tensors` are those of the result."""

    def __init__(self, layer: LayerPass, spec: ModelSpec, shape: Shape) -> None:
        self._old = layer
        self._spec = spec
        self._shape = shape
        self.tensors = dict(layer.tensors)

    def run(self, hidden: F32, tokens: Tokens) -> float:
        """Replace the hidden states by those behind the new layer. Return the error of its outputs."""
        expected = np.concatenate([self._old.forward(hidden[rows], ends) for rows, ends in tokens.chunks()])
        pooled = self._shape.kv_heads is not None and self._shape.kv_heads != self._old.spec.kv_heads
        between = self._old.spec
        if pooled:
            inputs = self._old.attention_inputs(hidden[:: max(1, len(hidden) // (4 * SAMPLES))])
            between = msgspec.structs.replace(between, kv_heads=self._shape.kv_heads or between.kv_heads)
            self.tensors |= pool_heads(self._old, inputs, between.kv_heads)
        if between.heads != self._spec.heads:
            self._drop_heads(LayerPass(between, 0, self.tensors), hidden, tokens)
        new = self._layer()
        if pooled or between.heads != self._spec.heads:
            pairs = (
                (new.attend(new.attention_inputs(hidden[rows]), ends), self._old_attended(hidden[rows], ends))
                for rows, ends in tokens.chunks()
            )
            self.tensors["attn.o"] = fit_product(self.tensors["attn.o"], self._old.tensors["attn.o"], pairs)
        after = np.concatenate(
            [
                new.after_attention(hidden[rows], new.attend(new.attention_inputs(hidden[rows]), ends))
                for rows, ends in tokens.chunks()
            ]
        )
        if self._old.layer.experts:
            self._drop_experts(new, after)
            self._narrow_experts(after)
        elif self._spec.intermediate_size != self._old.spec.intermediate_size:
            self._drop_neurons(new, after)
        final = self._layer()
        change = float(np.square(expected - hidden).sum(dtype=np.float64))
        for rows, _ in tokens.chunks():
            hidden[rows] = final.after_mlp(after[rows], final.mlp_inputs(after[rows]))
        return float(np.square(hidden - expected).sum(dtype=np.float64)) / max(change, 1e-30)

    def _layer(self) -> LayerPass:
        layer = LayerPass(self._spec, 0, self.tensors)
        layer.layer = self._old.layer
        return layer

    def _old_attended(self, hidden: F32, offsets: Sequence[int]) -> F32:
        return self._old.attend(self._old.attention_inputs(hidden), offsets)

    def _drop_heads(self, between: LayerPass, hidden: F32, tokens: Tokens) -> None:
        """Keep the groups of heads whose part of the attention's output is largest."""
        between.layer = self._old.layer
        spec, width = between.spec, between.spec.q_size // between.spec.kv_heads
        o = self.tensors["attn.o"].reshape(-1, spec.kv_heads, width).swapaxes(0, 1)
        sizes = np.zeros(spec.kv_heads)
        for rows, ends in tokens.chunks():
            attended = between.attend(between.attention_inputs(hidden[rows]), ends).reshape(-1, spec.kv_heads, width)
            for group in range(spec.kv_heads):
                sizes[group] += np.square(attended[:, group] @ o[group].T).sum(dtype=np.float64)
        groups = _largest(sizes, self._spec.kv_heads)
        queries = _columns(groups, width)
        keys = _columns(groups, spec.head_size)
        kept = np.concatenate([queries, spec.q_size + keys, spec.q_size + spec.kv_size + keys])
        for name in ("attn.qkv", "attn.qkv.bias"):
            if name in self.tensors:
                self.tensors[name] = self.tensors[name][kept]
        self.tensors["attn.o"] = self.tensors["attn.o"][:, queries]

    def _drop_neurons(self, layer: LayerPass, hidden: F32) -> None:
        self._narrow(layer, MlpRows("mlp", slice(None), None), hidden, self._spec.intermediate_size)

    def _narrow_experts(self, hidden: F32) -> None:
        old, new = self._old.spec.experts, self._spec.experts
        if old is None or new is None or old.intermediate_size == new.intermediate_size:
            return
        layer = self._layer()
        for route in layer.routes(layer.mlp_inputs(hidden)):
            self._narrow(layer, route, hidden[route.rows], new.intermediate_size)

    def _narrow(self, layer: LayerPass, route: MlpRows, hidden: F32, count: int) -> None:
        """Keep the neurons whose part of the output is largest, and fit `down` to the output of all. `hidden` are the
        rows of the route."""
        mlp = route.mlp
        down = self.tensors[f"{mlp}.down"]
        size = down.shape[1]
        gram = np.zeros((size, size), dtype=np.float32)
        for start in range(0, len(hidden), 4096):
            opened = layer.open_mlp(mlp, layer.mlp_inputs(hidden[start : start + 4096]))
            if route.shares is not None:
                opened = opened * route.shares[start : start + 4096, None]
            gram += opened.T @ opened
        seen = np.diag(gram) if gram.any() else np.ones(size)  # of an expert without tokens the weights decide
        kept = _largest(seen * np.square(down).sum(axis=0), count)
        rows = np.concatenate([kept, size + kept]) if self._spec.gated else kept
        for name in (f"{mlp}.{layer.up}", f"{mlp}.{layer.up}.bias"):
            if name in self.tensors:
                self.tensors[name] = self.tensors[name][rows]
        self.tensors[f"{mlp}.down"] = fitted(down[:, kept], gram[np.ix_(kept, kept)], gram[kept] @ down.T)

    def _drop_experts(self, layer: LayerPass, hidden: F32) -> None:
        """Keep the experts that get the largest shares of the tokens."""
        experts, count = self._old.spec.experts, self._spec.experts
        if experts is None or count is None or experts.count == count.count:
            return
        routes = LayerPass(self._old.spec, 0, self.tensors)
        routes.layer = self._old.layer
        found = routes.routes(layer.mlp_inputs(hidden))
        sizes = np.array([0.0 if route.shares is None else float(route.shares.sum()) for route in found])
        kept = _largest(sizes, count.count)
        others = {name: values for name, values in self.tensors.items() if not name.startswith("mlp.experts.")}
        for place, expert in enumerate(kept):
            start = f"mlp.experts.{expert}."
            for name, values in self.tensors.items():
                if name.startswith(start):
                    others[f"mlp.experts.{place}.{name.removeprefix(start)}"] = values
        others["mlp.router"] = others["mlp.router"][kept]
        self.tensors = others


def _largest(sizes: NDArray[np.floating], count: int) -> Kept:
    return np.sort(np.argsort(-sizes, kind="stable")[:count])


def _columns(groups: Kept, width: int) -> Kept:
    return (groups[:, None] * width + np.arange(width)).reshape(-1)


def _part_rows(spec: ModelSpec, name: str, rows: int, parts: int) -> tuple[int, ...]:
    if parts == len(spec.qkv_parts) and name.endswith((".attn.qkv", ".attn.qkv.bias")):
        return spec.qkv_parts
    return (rows // parts,) * parts


def _changed_config(folder: ModelFolder, spec: ModelSpec) -> dict[str, object]:
    """Return the config of the result. Raise RequestError if the family's config cannot say it."""
    config = dict(read_json(folder.path / "config.json", limit=_CONFIG_LIMIT))
    config.pop("quantization_config", None)
    old = folder.spec
    config |= {"num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads}
    if spec.head_size * spec.heads != spec.hidden_size or "head_dim" in config:
        config["head_dim"] = spec.head_size
    if spec.intermediate_size != old.intermediate_size:
        config["intermediate_size"] = spec.intermediate_size
    if spec.experts is not None and spec.experts != old.experts:
        key = next((key for key in ("num_local_experts", "num_experts") if key in config), "num_experts")
        config[key] = spec.experts.count
        size = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
        if old.experts is None or spec.experts.intermediate_size != old.experts.intermediate_size:
            config[size] = spec.experts.intermediate_size
    try:
        said = model_spec(ConfigJson(config, path=folder.path / "config.json"))
    except ModelError as error:
        said = None
        reason = str(error)
    else:
        reason = "its config has no place for these sizes"
    if said is None or msgspec.structs.replace(said, tied=spec.tied) != spec:
        raise RequestError(f"{spec.architecture} cannot have these sizes: {reason}.", parameter="heads")
    return config


def _at_most(given: int | None, most: int, name: str) -> int:
    if given is None:
        return most
    if not 1 <= given <= most:
        raise RequestError(f"'{name}' must be 1 to {most}, what the model has, not {given}.", parameter=name)
    return given
