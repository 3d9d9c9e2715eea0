"""Compresses a model layer by layer: embeds the calibration tokens, rounds each layer, saves it, writes the folder.

One layer's weights and the hidden states of the calibration tokens are in memory at a time. Does not choose bits, and
does not measure the result.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from headrace.compress.block_grids import BLOCK_TYPES
from headrace.compress.compressed_folder import FORMATS, SPARSE, card_of, write_folder
from headrace.compress.disk_layout import DenseType, dense_type, parts_of, untouched_names, written_sources
from headrace.compress.gguf_output import (
    check_gguf,
    gguf_names,
    store_dense_part,
    store_part,
    write_gguf_model,
)
from headrace.compress.grids import ScaleType
from headrace.compress.layer_compression import CompressedLayer, LayerCompression
from headrace.compress.layer_pass import CHUNK_TOKENS, F32, LayerPass, Tokens, embed, is_norm, load_layer, load_tensor
from headrace.compress.pruning import STRUCTURED
from headrace.compress.recipe import KEPT, Recipe
from headrace.compress.stored_product import Stored, store_bitmask, store_codes, store_dense
from headrace.compress.work_folder import SUFFIX, Job, ProductReport, WorkFolder
from headrace.errors import RequestError
from headrace.models.families import TensorSources
from headrace.models.model_folder import ModelFolder
from headrace.models.spec import ModelSpec
from headrace.models.tensor_shapes import is_product, tensor_shapes

_WIDTHS: Final = {"bf16": 2, "f16": 2, "f32": 4}
OVERHEAD: Final = 64 << 20  # bytes beside arrays that grow with the model


class LayerProgress(NamedTuple):
    doing: str  # for a person: "layer 3 of 30, attn.qkv"
    done: int  # steps since this process began
    total: int


Watch = Callable[[LayerProgress], None]


class CompressedModel(NamedTuple):
    """A compressed model whose folder, or GGUF file, is complete but not in its place yet."""

    folder: Path
    products: list[ProductReport]
    resumed: int  # layers that an earlier process had finished
    work: WorkFolder

    def publish(self, out: Path) -> None:
        """Move the folder to its place and remove the work."""
        os.replace(self.folder, out)
        if (card := card_of(self.folder)).exists():  # of a file; a folder has its card in it
            os.replace(card, card_of(out))
        self.work.remove()


def products_of(folder: ModelFolder) -> list[str]:
    """Return the products of a model's layers, which are what compression rounds."""
    return [name for name in folder.shapes if name.startswith("layers.") and is_product(name)]


def check_model(folder: ModelFolder, recipe: Recipe, *, command: str = "compress") -> None:
    """Raise RequestError for what cannot be compressed, or not with this recipe. Reads no weights."""
    instead = "Serve it with --weights int8 or int4 instead."
    if folder.spec.kind != "decoder":
        raise RequestError(
            f"{folder.spec.architecture} is an encoder. `headrace {command}` takes decoders. {instead}",
            parameter="model",
        )
    if folder.path.suffix == ".gguf":
        raise RequestError(
            f"{folder.path.name} is a GGUF file. Pass the folder in Hugging Face layout that it was made from.",
            parameter="model",
        )
    if recipe.gguf:
        check_gguf(folder)
    if not _computes(folder.spec):
        raise RequestError(
            f"`headrace {command}` cannot compute the layers of {folder.spec.architecture} yet. {instead}",
            parameter="model",
        )
    if any(
        part.index is not None and part.name.endswith(".weight") for parts in folder.sources.values() for part in parts
    ):
        raise RequestError(
            f"{folder.spec.architecture} keeps all experts of a layer in one tensor, which `headrace {command}` "
            f"cannot write yet. {instead}",
            parameter="model",
        )
    if any(part.pairs for parts in folder.sources.values() for part in parts):
        raise RequestError(
            f"{folder.spec.architecture} keeps the rows of queries and keys in pairs, which `headrace {command}` "
            f"cannot write yet. {instead}",
            parameter="model",
        )
    for name in products_of(folder):
        inputs = folder.shapes[name][1]
        group = _multiple(recipe, name, inputs)
        if recipe.sparsity == STRUCTURED and name in recipe.pruned and inputs % 4:
            raise RequestError(
                f"{name} has {inputs} inputs, which is no multiple of 4. Leave it out with --keep '{name}=16'.",
                parameter="sparsity",
            )
        if recipe.bits[name] < KEPT and group and inputs % group:
            raise RequestError(
                f"{name} has {inputs} inputs, which is no multiple of the group {group}. "
                f"{'Choose another --block-type' if recipe.gguf else 'Pass --group 64, 32 or channel'}, or keep it: "
                f"--keep '{name}=16'.",
                parameter="group",
            )


def _multiple(recipe: Recipe, name: str, inputs: int) -> int:
    """Return what a row must be a multiple of."""
    spec = recipe.grid(min(recipe.bits[name], 8), inputs)
    return BLOCK_TYPES[spec.block_type].block if spec.block_type else spec.group


def _computes(spec: ModelSpec) -> bool:
    """Return whether `LayerPass` computes the layers of a model."""
    if spec.recurrent is not None or spec.attention_gate or spec.layer_inputs is not None:
        return False
    if spec.layer_scale or spec.value_norm or not spec.same_layers:
        return False
    experts = spec.experts
    if experts is not None and (
        experts.shared_size
        or experts.scoring != "softmax"
        or experts.correction
        or experts.bias
        or experts.groups > 1
        or experts.margin
    ):
        return False
    positions = spec.alibi or spec.learned_positions
    if spec.qk_norm in ("each_head", "unit") or any(layer.chunk or layer.grows for layer in spec.layers):
        return False
    return not (spec.parallel or spec.sinks or spec.latent or positions)


def compress_model(
    folder: ModelFolder,
    out: Path,
    sequences: Sequence[Sequence[int]],
    recipe: Recipe,
    *,
    format: str = "compressed-tensors",
    restart: bool = False,
    watch: Watch = lambda _: None,
) -> CompressedModel:
    """Compress a model into the folder `out` + ".partial"; continue the work there if it has the same options.

    `sequences` are the calibration tokens. Publish the result to move it to `out`.
    """
    if format not in FORMATS:
        raise RequestError(f"Unknown format '{format}'. Expected {', '.join(FORMATS)}.", parameter="format")
    check_model(folder, recipe)
    if out.exists():
        raise RequestError(f"{out} exists. Choose another name, or remove it first.", parameter="out")
    tokens = Tokens.join(sequences)
    work_path = out.with_name(out.name + SUFFIX)
    job = Job(model_digest(folder), recipe, hashlib.sha256(tokens.ids.tobytes()).hexdigest(), format)
    work = WorkFolder.open(work_path, job, restart=restart)
    resumed = work.layers
    count = len(folder.spec.layers)
    written = gguf_names(folder) if format == "gguf" else written_sources(folder)
    hidden = work.hidden() if 0 < resumed < count else embed(folder, tokens)
    for index in range(resumed, count):
        steps = len([name for name in folder.shapes if name.startswith(f"layers.{index}.") and is_product(name)])
        finished = 0

        def show(doing: str, index: int = index, steps: int = steps) -> None:
            nonlocal finished
            done = (index - resumed) * steps + finished
            watch(LayerProgress(f"layer {index + 1} of {count}, {doing}", done, (count - resumed) * steps))
            finished += doing != "scales"

        compressed = _compress_layer(folder, written, index, hidden, tokens, recipe, show)
        stored = _store_layer(folder, written, index, compressed, recipe, sparse=format == SPARSE)
        last = index + 1 == count
        work.finish_layer(stored, None if last else hidden, _reports(compressed, index))
    products = work.progress.products
    model = work_path / out.name
    if format == "gguf":
        write_gguf_model(folder, model, work.shards(), recipe)
    else:
        write_folder(folder, model, work.shards(), recipe, format, written)
    return CompressedModel(model, products, resumed, work)


def kept_bytes(folder: ModelFolder, bits: Mapping[str, int]) -> int:
    """Return the bytes of the tensors that are written as they are; `bits` may keep some products too (16)."""
    inside = [
        name
        for name in folder.shapes
        if name.startswith("layers.") and (not is_product(name) or bits.get(name, 0) == KEPT)
    ]
    total = sum(math.prod(folder.shapes[name]) * _WIDTHS[dense_type(folder, name)] for name in inside)
    for name in untouched_names(folder):
        kind = "bf16" if folder.weights.layout(name) is not None else folder.weights.dense(name).dtype
        total += math.prod(folder.weights.shape(name)) * _WIDTHS[kind]
    return total


def memory_needed(spec: ModelSpec, tokens: int, longest: int, recipe: Recipe) -> int:
    """Return a bound of the bytes of arrays that `compress_model` holds: see the terms."""
    every = tensor_shapes(spec)
    layers = [
        [shape for name, shape in every.items() if name.startswith(f"layers.{index}.")]
        for index in range(len(spec.layers))
    ]
    sizes = [sum(int(np.prod(shape)) for shape in shapes) for shapes in layers]
    products = [shape for shapes in layers for shape in shapes if len(shape) == 2]
    largest = max(rows * columns for rows, columns in products)
    widest = max(columns for _, columns in products)
    tallest = max(rows for rows, _ in products)
    chunk = min(tokens, max(CHUNK_TOKENS, longest))
    states = 4 * tokens * (spec.hidden_size + spec.q_size)  # hidden states, and the attention's outputs
    layer = (4 + 4 + 2) * max(sizes)  # in f32, with a copy while factors move; codes, and as stored
    rows = 4 * chunk * (3 * spec.hidden_size + 2 * tallest + 2 * widest)
    scores = 3 * 4 * (spec.heads // spec.kv_heads + 1) * longest * longest
    rounding = 4 * 4 * largest
    factors = 4 * 8 * widest * widest + 2 * 4 * widest * widest if recipe.needs_hessian else 0
    experts = spec.experts.count if spec.experts else 1
    hessians = experts * 4 * widest * widest if recipe.needs_hessian else 0
    return states + layer + rows + scores + rounding + factors + hessians + OVERHEAD


def scale_type(folder: ModelFolder) -> ScaleType:
    """Return the type of a model's scales: that of its weights, so that every reader keeps them exactly."""
    return "bf16" if dense_type(folder, products_of(folder)[0]) == "bf16" else "f16"


def _compress_layer(
    folder: ModelFolder,
    written: TensorSources,
    index: int,
    hidden: F32,
    tokens: Tokens,
    recipe: Recipe,
    show: Callable[[str], None],
) -> CompressedLayer:
    prefix = f"layers.{index}."
    tensors = load_layer(folder, index)
    bits = {name: recipe.bits[prefix + name] for name in tensors if is_product(prefix + name)}
    stored: dict[str, DenseType] = {name: dense_type(folder, prefix + name) for name in tensors}
    layer = LayerPass(folder.spec, index, tensors)
    pruned = {name.removeprefix(prefix) for name in recipe.pruned if name.startswith(prefix)}
    parts = {
        name: [each.rows.stop - each.rows.start for each in parts_of(folder, written, prefix + name)] for name in bits
    }
    return LayerCompression(layer, hidden, tokens, recipe, bits, stored, show, pruned=pruned, parts=parts).run()


def _store_layer(
    folder: ModelFolder,
    written: TensorSources,
    index: int,
    compressed: CompressedLayer,
    recipe: Recipe,
    *,
    sparse: bool,
) -> Stored:
    prefix = f"layers.{index}."
    found: Stored = {}
    for name in (each for each in folder.shapes if each.startswith(prefix)):
        short = name.removeprefix(prefix)
        product = compressed.products.get(short)
        if product is not None:
            for part in parts_of(folder, written, name):
                if recipe.gguf:
                    found |= store_part(folder, part.name, part.rows, product.codes, product.grid)
                    continue
                codes, grid = product.codes[part.rows], product.grid.rows(part.rows)
                found |= store_codes(part.name, codes, grid, plain_int8=recipe.quantises_activations)
            continue
        changed = compressed.changed.get(short)
        if recipe.gguf:
            values = load_tensor(folder, name) if changed is None else changed
            for part in parts_of(folder, written, name):
                found |= store_dense_part(folder, name, part.rows, part.name, values)
            continue
        if changed is not None and is_norm(name):
            changed = changed - np.float32(folder.spec.norm_offset)
        values = folder.tensor(name).to_f32() if changed is None else changed
        for part in parts_of(folder, written, name):
            kind = dense_type(folder, name)
            if sparse and changed is not None and name in recipe.pruned:
                found |= store_bitmask(part.name, values[part.rows], kind, two_of_four=recipe.sparsity == STRUCTURED)
            else:
                found |= store_dense(part.name, values[part.rows], kind)
    return found


def _reports(compressed: CompressedLayer, index: int) -> list[ProductReport]:
    return [
        ProductReport(
            f"layers.{index}.{name}", product.grid.spec.bits, product.error, compressed.factors.get(name, 0.0)
        )
        for name, product in compressed.products.items()
    ] + [ProductReport(f"layers.{index}.{name}", KEPT, error) for name, error in compressed.errors.items()]


def model_digest(folder: ModelFolder) -> str:
    """Return a digest of what the weight files are, without reading them."""
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.weights.files]
    return hashlib.sha256(msgspec.json.encode((facts, folder.spec))).hexdigest()
