"""Writes a compressed model as one GGUF file: names, rows and metadata as llama.cpp has them.

The file is opened again before it counts: a model or tokenizer that reads back as another is rejected, so nothing that
GGUF has no form for is lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.compress.block_grids import pack_blocks
from headrace.compress.disk_layout import DenseType, dense_type
from headrace.compress.gguf_vocabulary import vocabulary
from headrace.compress.grids import Grid, GridSpec, fit, round_to_nearest
from headrace.compress.layer_pass import F32, is_norm
from headrace.compress.recipe import Recipe
from headrace.compress.stored_product import Stored, to_disk_type
from headrace.errors import RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families.family import TensorSources
from headrace.models.formats.gguf_blocks import BLOCKS
from headrace.models.formats.gguf_writer import NewTensor, Value, write_gguf
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.gguf.gguf_architectures import ARCHITECTURES, KEYS
from headrace.models.gguf.gguf_model import gguf_sources
from headrace.models.gguf.gguf_rope import LONG_ROPE, ROPE_DIVISORS
from headrace.models.model_folder import ModelFolder, open_model
from headrace.models.spec import ModelSpec, RopeSpec

_DENSE: Final = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
_CONTEXT_BEFORE: Final = "original_max_position_embeddings"
_FILE_TYPES: Final = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 15, "Q6_K": 18}  # general.file_type
# Fields of a spec that may differ when the file is read again: names, and what converters fold into weights.
_FREE: Final = ("family", "architecture", "norm_offset", "ropes", "context")
_SAMPLE: Final = "The old mill's wheel turns 365 days a year.\n\n\tNaïve café, 中文字 😀 — it's 3.14!  <end>"


def gguf_architecture(spec: ModelSpec) -> str:
    """Return the name of a model's architecture in GGUF. Raise RequestError if Headrace writes no files of it."""
    same = "LlamaForCausalLM" if spec.architecture == "MistralForCausalLM" else spec.architecture
    written = {name: each for name, each in ARCHITECTURES.items() if each.written}
    for name, known in written.items():
        if known.name == same:
            return name
    known = ", ".join(each.name for each in written.values())
    raise RequestError(
        f"Headrace writes no GGUF files of {spec.architecture}. Write a folder instead. GGUF files are written of "
        f"{known} and MistralForCausalLM.",
        parameter="out",
    )


def check_gguf(folder: ModelFolder) -> None:
    """Raise RequestError for a model that no GGUF file of ours can hold. Reads the tokenizer, and no weights."""
    gguf_architecture(folder.spec)
    vocabulary(folder)
    _shape(folder)


def store_part(folder: ModelFolder, part: str, rows: slice, codes: NDArray[np.uint8], grid: Grid) -> Stored:
    """Return the blocks of rows of a product, as they are in the file. Their type follows the name."""
    order = _row_order(folder.spec, part, rows)
    blocks = grid.rows(order).blocks
    if blocks is None:
        raise ValueError(f"{part} has no blocks of GGUF")
    data = pack_blocks(codes[order], grid.spec.block_type, blocks)
    return {f"{part}:{grid.spec.block_type}": ("U8", data)}


def store_dense_part(folder: ModelFolder, name: str, rows: slice, part: str, values: F32) -> Stored:
    """Return rows of a tensor that is not rounded: vectors are f32 in GGUF, matrices keep their type."""
    kind: DenseType = dense_type(folder, name) if values.ndim > 1 else "f32"
    data = to_disk_type(values[_row_order(folder.spec, part, rows)], kind)
    return {f"{part}:{_DENSE[kind]}": (_DENSE[kind], data)}


def write_gguf_model(folder: ModelFolder, out: Path, layers: Sequence[SafetensorsFile], recipe: Recipe) -> None:
    """Write the file from finished layers, and the tensors outside of them: vectors in f32, embedding and head in 8 or
    6 bits."""
    tensors: dict[str, NewTensor] = {}
    for name in ("embed", "head", "norm", "norm.bias"):
        if name in folder.shapes:
            tensors |= _outer(folder, name, recipe)
    keys, factors = _metadata(folder, recipe)
    for name, values in factors.items():
        tensors[name] = NewTensor("F32", values.shape, lambda values=values: [values])
    for layer in layers:
        for stored in layer.tensors:
            name, kind = stored.rsplit(":", 1)
            tensors[name] = NewTensor(kind, _shape_of(layer, stored, kind), _reading(layer, stored))
    write_gguf(out, keys, tensors)
    _check_read_back(folder, open_model(out))


def gguf_names(folder: ModelFolder) -> TensorSources:
    return gguf_sources(folder.spec, gguf_architecture(folder.spec))


def _reading(layer: SafetensorsFile, stored: str) -> Any:
    return lambda: [layer.stored(stored).data]


def _shape_of(layer: SafetensorsFile, stored: str, kind: str) -> tuple[int, ...]:
    shape = layer.tensors[stored].shape
    if layer.tensors[stored].dtype != "U8":
        return shape
    return shape[0], shape[1] // BLOCKS[kind].bytes * BLOCKS[kind].weights


def _row_order(spec: ModelSpec, part: str, rows: slice) -> NDArray[np.intp]:
    """Return the rows of a tensor in the order of the file: some architectures have queries and keys in pairs."""
    found: NDArray[np.intp] = np.arange(int(rows.start), int(rows.stop), dtype=np.intp)
    heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads}.get(part.rsplit(".", 2)[-2])
    if heads is None or not ARCHITECTURES[gguf_architecture(spec)].pairs:
        return found
    return found.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _outer(folder: ModelFolder, name: str, recipe: Recipe) -> dict[str, NewTensor]:
    target = {"embed": "token_embd.weight", "head": "output.weight", "norm": "output_norm.weight"}.get(
        name, "output_norm.bias"
    )
    shape = folder.shapes[name]
    if len(shape) == 1:
        return {target: NewTensor("F32", shape, lambda: [_offset(folder, name, folder.tensor(name).to_f32())])}
    few = all(bits < 8 for bits in recipe.bits.values())
    kind = "Q6_K" if few and shape[1] % 256 == 0 else "Q8_0" if shape[1] % 32 == 0 else ""
    if not kind:
        stored = dense_type(folder, name)
        return {target: NewTensor(_DENSE[stored], shape, lambda: [folder.tensor(name).data])}

    def blocks() -> Iterable[NDArray[Any]]:
        values, step = folder.tensor(name), 1 << 12
        for start in range(0, shape[0], step):
            rows = values.data[start : start + step]
            part = type(values)(name, values.dtype, rows.shape, rows, values.path).to_f32()
            grid = fit(part, GridSpec.of_blocks(kind))
            if grid.blocks is not None:
                yield pack_blocks(round_to_nearest(part, grid), kind, grid.blocks)

    return {target: NewTensor(kind, shape, blocks)}


def _offset(folder: ModelFolder, name: str, values: F32) -> F32:
    return values + np.float32(folder.spec.norm_offset) if is_norm(name) else values


def _metadata(folder: ModelFolder, recipe: Recipe) -> tuple[dict[str, Value], dict[str, F32]]:
    """Return the keys of a file, and the tensors of its rope."""
    types = [recipe.grid(bits, folder.shapes[name][1]).block_type for name, bits in recipe.bits.items() if bits < 16]
    keys: dict[str, Value] = {
        "general.architecture": gguf_architecture(folder.spec),
        "general.type": "model",
        "general.name": folder.path.name,
        "general.quantization_version": 2,
        "general.alignment": 32,
    }
    if types:
        keys["general.file_type"] = _FILE_TYPES[max(sorted(set(types)), key=types.count)]
    shape, factors = _shape(folder)
    return keys | shape | vocabulary(folder), factors


def _shape(folder: ModelFolder) -> tuple[dict[str, Value], dict[str, F32]]:
    spec, name = folder.spec, gguf_architecture(folder.spec)
    if spec.experts is not None or len({layer.window for layer in spec.layers if layer.window}) > 1:
        raise RequestError(f"Headrace writes no GGUF files of this {spec.architecture}.", parameter="out")
    config = ConfigJson.read(folder.path / "config.json").values()
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = cast("dict[str, object]", nested)
    ours: dict[str, Value] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": float(spec.norm_eps),
    }
    window = max(layer.window for layer in spec.layers)
    if window:
        ours["sliding_window"] = window
    for cap, value in (
        ("attn_logit_softcapping", spec.attention_softcap),
        ("final_logit_softcapping", spec.logit_softcap),
    ):
        if value:
            ours[cap] = float(value)
    table = {**KEYS, "num_hidden_layers": "block_count", **ARCHITECTURES[name].keys}
    keys: dict[str, Value] = {f"{name}.{table[key]}": value for key, value in ours.items() if key in table}
    keys[f"{name}.attention.value_length"] = spec.head_size
    keys[f"{name}.vocab_size"] = spec.vocab_size
    keys[f"{name}.rope.dimension_count"] = 2 * len(spec.ropes[0].inv_freq)
    rope, factors = _rope(spec, config)
    return keys | {f"{name}.{key}": value for key, value in rope.items()}, factors


def _rope(spec: ModelSpec, config: Mapping[str, object]) -> tuple[dict[str, Value], dict[str, F32]]:
    both = cast("dict[str, Any]", config.get("rope_parameters") or config.get("rope_scaling") or {})
    full = cast("dict[str, Any]", both.get("full_attention") or both)
    keys: dict[str, Value] = {}
    first: RopeSpec = spec.ropes[0]  # pyright: ignore[reportGeneralTypeIssues] - of any number
    theta = full.get("rope_theta", config.get("rope_theta", _default_theta(spec)))
    keys["rope.freq_base"] = float(theta)
    if len(spec.ropes) > 1:
        local = cast("dict[str, Any]", both.get("sliding_attention") or {})
        keys["rope.freq_base_swa"] = float(local.get("rope_theta", config.get("rope_local_base_freq", 10_000.0)))
    kind = str(full.get("rope_type", full.get("type", "default")))
    factors: dict[str, F32] = {}
    inverse = np.array(first.inv_freq, dtype=np.float32)
    if kind == "llama3":
        plain = float(theta) ** (-np.arange(0, spec.head_size, 2, dtype=np.float64) / spec.head_size)
        factors[ROPE_DIVISORS] = (plain / inverse).astype(np.float32)
    elif kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}
    elif kind == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(full["factor"])}
        before = full.get(_CONTEXT_BEFORE, config.get(_CONTEXT_BEFORE, spec.context))
        keys["rope.scaling.original_context_length"] = int(before)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if ours in full:
                keys[f"rope.scaling.{theirs}"] = float(full[ours])
    elif kind == "longrope":
        before = full.get(_CONTEXT_BEFORE, config.get(_CONTEXT_BEFORE, spec.context))
        keys["rope.scaling.original_context_length"] = int(before)
        keys["rope.scaling.attn_factor"] = float(first.scale)
        for tensor, which in zip(LONG_ROPE, ("short_factor", "long_factor"), strict=True):
            factors[tensor] = np.array(full[which], dtype=np.float32)
    elif kind != "default":
        raise RequestError(f"Headrace writes no rope of the kind {kind} into GGUF files.", parameter="out")
    return keys, factors


def _default_theta(spec: ModelSpec) -> float:
    """Return the base of the first rope, from its second frequency."""
    inverse = spec.ropes[0].inv_freq
    return round(inverse[1] ** -len(inverse), 3) if len(inverse) > 1 else 10_000.0


def _check_read_back(folder: ModelFolder, made: ModelFolder) -> None:
    expected, found = folder.spec, made.spec
    fields = [name for name in msgspec.structs.fields(ModelSpec) if name.name not in _FREE]
    different = [each.name for each in fields if not _same(getattr(expected, each.name), getattr(found, each.name))]
    if not different and not _same_ropes(expected, found):
        different = ["ropes"]
    if different:
        raise RequestError(
            f"A GGUF file has no form for this {expected.architecture}: what it reads back as differs in "
            f"{', '.join(different)}. Write a folder instead.",
            parameter="out",
        )
    text = _SAMPLE
    one, other = folder.tokenizer.encode(text), made.tokenizer.encode(text)
    reason = folder.tokenizer.difference(made.tokenizer)
    if one != other or reason is not None:
        raise RequestError(
            "A GGUF file has no form for the model's tokenizer: a text reads back as other tokens"
            f"{'' if reason is None else f' ({reason})'}. Write a folder instead.",
            parameter="out",
        )


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), 1e-12)
    return one == other


def _same_ropes(one: ModelSpec, other: ModelSpec) -> bool:
    return len(one.ropes) == len(other.ropes) and all(
        np.allclose(mine.inv_freq, theirs.inv_freq, rtol=1e-5)
        and np.allclose(mine.long_inv_freq or (), theirs.long_inv_freq or (), rtol=1e-5)
        and abs(mine.scale - theirs.scale) < 1e-5
        and abs(mine.long_scale - theirs.long_scale) < 1e-5
        for mine, theirs in zip(one.ropes, other.ropes, strict=True)
    )
