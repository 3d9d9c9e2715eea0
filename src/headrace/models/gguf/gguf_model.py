"""Turns the metadata of a GGUF file into a ModelSpec, and finds the spec's tensors in the file.

The keys of a file are given their names in config.json, so that the families read them; messages keep the file's names.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from headrace.errors import ModelError
from headrace.models.config_json import shorten
from headrace.models.families import family_of
from headrace.models.families.decoder import check_size
from headrace.models.families.family import TensorSources
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.gguf.gguf_architectures import ARCHITECTURES, KEYS, LAYER_EPS, Architecture
from headrace.models.gguf.gguf_embedders import as_embedder, pooled_sources
from headrace.models.gguf.gguf_keys import GgufKeys, key_error, plain, renamed
from headrace.models.gguf.gguf_names import file_sources
from headrace.models.gguf.gguf_rope import LONG_ROPE, ROPE_DIVISORS, add_rope, check_rope_dims, divided_ropes
from headrace.models.spec import ModelSpec

_EMBED: Final = "token_embd.weight"
_HEAD: Final = "output.weight"
_NORM_BIASES: Final = ("attn_norm.bias", "attn_output_norm.bias")
_REQUIRED: Final = ("embedding_length", "block_count", "context_length")


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raise ModelError for one that Headrace does not read, or a file without a
    model."""
    kind = plain(file.metadata.get("general.type", "model"))
    if kind != "model":
        raise key_error(file, "general.type", f"The file holds {shorten(kind)}, not a model.")
    name = plain(file.metadata.get("general.architecture"))
    if not isinstance(name, str) or name not in ARCHITECTURES:
        found = "The key is missing." if name is None else f"Unknown architecture {shorten(name)}."
        known = ", ".join(ARCHITECTURES)
        raise key_error(file, "general.architecture", f"{found} Headrace reads GGUF files of {known}.")
    return ARCHITECTURES[name]


def read_spec(file: GgufFile) -> ModelSpec:
    """Return the spec of the model in a file, with its sizes and keys checked."""
    architecture = architecture_of(file)
    keys = _translated(file, architecture)
    config = keys.config()
    spec = family_of(config).spec(config)
    if architecture.finish is not None:
        spec = architecture.finish(keys, spec)
    check_rope_dims(keys, spec)
    spec = as_embedder(keys, spec)
    keys.refuse_unread()
    spec = replace(
        spec,
        norm_offset=0.0,  # converters add it to the weights
        norm_bias=_has_any(file, spec, *_NORM_BIASES) if spec.norm == "layer" else spec.norm_bias,
        qkv_bias=_has_any(file, spec, "attn_q.bias", "attn_qkv.bias"),
        o_bias=_has_any(file, spec, "attn_output.bias"),
        mlp_bias=_has_any(file, spec, "ffn_down.bias"),
        head_bias=spec.kind == "decoder" and "output.bias" in file.tensors,
        ropes=divided_ropes(file, spec),
    )
    return check_size(spec, config)


def read_config(file: GgufFile) -> dict[str, object]:
    """Return what the metadata says of the model, under the names that config.json has."""
    return _translated(file, architecture_of(file)).config().values()


def tensor_sources(file: GgufFile, spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    """Map the spec's tensors to those of the file, whose experts have names of their own in `names`. Raise ModelError
    for a tensor of the file that has no place."""
    sources = spec_sources(file, spec, names) | pooled_sources(spec)
    used = {part.name for parts in sources.values() for part in parts}
    unused = (ROPE_DIVISORS, *LONG_ROPE)
    for name in names - used:
        if name not in unused and not _is_of_further_layer(name, spec) and not _is_shared(name, spec):
            raise ModelError(
                "Headrace does not know this tensor, and it may change what the model computes.",
                path=file.path_of(name),
                tensor=name[:200],
            )
    return sources


def spec_sources(file: GgufFile, spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    """Map the spec's tensors to those that a file of its architecture has, whatever else it holds."""
    architecture = architecture_of(file)
    return file_sources(spec, names, own=architecture.names, fused=architecture.fused, pairs=architecture.pairs)


def gguf_sources(spec: ModelSpec, name: str) -> TensorSources:
    """Return the names that a model's tensors have in files of an architecture. Rows are in the files' order."""
    architecture = ARCHITECTURES[name]
    return file_sources(spec, frozenset(), own=architecture.names, fused=architecture.fused)


def _is_of_further_layer(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor is of a layer that predicts further tokens: see prediction_module."""
    start, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return start == "blk" and number.isascii() and number.isdecimal() and int(number[:9]) >= len(spec.layers)


def _is_shared(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor is of keys and values in a layer that reads those of another."""
    start, _, rest = name.partition(".")
    number, _, leaf = rest.partition(".")
    return (
        start == "blk"
        and leaf in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        and number.isascii()
        and number.isdecimal()
        and int(number[:9]) < len(spec.layers)
        and spec.layers[int(number[:9])].shares is not None
    )


def _has_any(file: GgufFile, spec: ModelSpec, *leaves: str) -> bool:
    """Return whether a layer has one of these tensors."""
    return any(f"blk.{layer}.{leaf}" in file.tensors for layer in range(len(spec.layers)) for leaf in leaves)


def _translated(file: GgufFile, architecture: Architecture) -> GgufKeys:
    """Return the keys of a file with the values of config.json that they mean."""
    keys = GgufKeys(file, str(file.metadata["general.architecture"]))
    table = {**KEYS, **architecture.keys}
    rms = KEYS["rms_norm_eps"]
    eps = LAYER_EPS if LAYER_EPS in table.values() or keys.get(rms) is None is not keys.get(LAYER_EPS) else rms
    heads = () if keys.get("ssm.conv_kernel") is not None else (KEYS["num_attention_heads"],)
    keys.require(*_REQUIRED, *heads, eps)
    keys.values |= architecture.fixed
    keys.put("num_hidden_layers", keys.block_count(), "block_count")
    renamed(keys, table)
    if keys.values.get("sliding_window") == 0:  # there is none
        keys.values["sliding_window"] = None
    embed = file.tensors.get(_EMBED)
    if embed is None:
        raise ModelError("The file has no such tensor.", path=file.path, tensor=_EMBED)
    keys.values["architectures"] = [architecture.name]
    keys.values["vocab_size"] = embed.shape[0]
    keys.values["tie_word_embeddings"] = _HEAD not in file.tensors
    _add_head_size(keys)
    _add_kinds(keys)
    if architecture.adjust is not None:
        architecture.adjust(keys)
    add_rope(keys)
    return keys


def _add_head_size(keys: GgufKeys) -> None:
    heads, hidden = keys.values.get("num_attention_heads"), keys.values.get("hidden_size")
    if "head_dim" not in keys.values and isinstance(heads, int) and isinstance(hidden, int) and 0 < heads <= hidden:
        if hidden % heads:
            raise keys.error("attention.head_count", f"{heads} heads do not divide {hidden} dims.")
        keys.put("head_dim", hidden // heads, "attention.key_length")
    size, value_size = keys.values.get("head_dim"), keys.get("attention.value_length")
    if value_size not in (None, size) and keys.get("attention.kv_lora_rank") is None:
        raise keys.error("attention.value_length", f"Expected {shorten(size)}, found {shorten(value_size)}.")


def _add_kinds(keys: GgufKeys) -> None:
    """Say which layers have a window, if the file does."""
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        return
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 1:
        keys.put("sliding_window_pattern", pattern, "attention.sliding_window_pattern")
        return
    each = keys.layers("attention.sliding_window_pattern") or []
    kinds = ["sliding_attention" if slides else "full_attention" for slides in each]
    keys.put("layer_types", kinds, "attention.sliding_window_pattern")
