"""Turns the metadata of a GGUF file into a ModelSpec, and names the tensors of the file.

The keys of a file are given their names in config.json, so that the families read them; messages keep the file's names.
Keys that Headrace does not know are rejected, because they may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson, shorten
from headrace.models.families import gemma, llama, olmo, phi, qwen
from headrace.models.families.decoder import TensorNames, check_size, named_sources
from headrace.models.families.family import Family, TensorSources
from headrace.models.formats.gguf_file import GgufFile, GgufValue
from headrace.models.spec import ModelSpec, RopeSpec

_EMBED: Final = "token_embd.weight"
_HEAD: Final = "output.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"
LONG_ROPE: Final = ("rope_factors_short.weight", "rope_factors_long.weight")

# Names in config.json -> names in a file, after its architecture's.
KEYS: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_REQUIRED: Final = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "context_length",
    "attention.layer_norm_rms_epsilon",
)
# Read by other means, or without an effect on the numbers.
_OTHERS: Final = frozenset(
    """
    vocab_size attention.value_length rope.dimension_count rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor tensor_data_layout attention.causal
    """.split()
)
_WINDOW: Final = {"sliding_window": "attention.sliding_window"}

_NAMES: Final[TensorNames] = {
    "embed": ("token_embd",),
    "norm": ("output_norm",),
    "attn.norm": ("attn_norm",),
    "attn.qkv": ("attn_q", "attn_k", "attn_v"),
    "attn.q_norm": ("attn_q_norm",),
    "attn.k_norm": ("attn_k_norm",),
    "attn.o": ("attn_output",),
    "attn.out_norm": ("post_attention_norm",),
    "mlp.norm": ("ffn_norm",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"),
    "mlp.down": ("ffn_down",),
    "mlp.out_norm": ("post_ffw_norm",),
}
_FUSED_NAMES: Final[TensorNames] = {**_NAMES, "attn.qkv": ("attn_qkv",), "mlp.gate_up": ("ffn_up",)}


class Architecture(msgspec.Struct, frozen=True):
    """How a file of one architecture becomes a config of one of our families."""

    family: Family
    name: str  # the Hugging Face class
    keys: Mapping[str, str] = {}  # beside the common ones
    fused: bool = False  # q, k and v are one tensor, and gate and up are one
    interleaved: bool = False  # rows of q and k are in the order of a rope that rotates neighbours
    partial_rope: bool = False


_SOFTCAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(llama, "LlamaForCausalLM", _WINDOW, interleaved=True),
    "qwen2": Architecture(qwen, "Qwen2ForCausalLM"),
    "qwen3": Architecture(qwen, "Qwen3ForCausalLM"),
    "gemma2": Architecture(gemma, "Gemma2ForCausalLM", {**_WINDOW, **_SOFTCAPS}),
    "gemma3": Architecture(
        gemma,
        "Gemma3ForCausalLM",
        {**_WINDOW, **_SOFTCAPS, "rope_local_base_freq": "rope.freq_base_swa"},
    ),
    "phi3": Architecture(
        phi,
        "Phi3ForCausalLM",
        {**_WINDOW, "original_max_position_embeddings": "rope.scaling.original_context_length"},
        fused=True,
        partial_rope=True,
    ),
    "smollm3": Architecture(llama, "SmolLM3ForCausalLM", interleaved=True),
    "olmo2": Architecture(olmo, "Olmo2ForCausalLM"),
}
# Layers of the 27B models, which scale their scores by other numbers than their head size.
_LARGE_GEMMA: Final = {"gemma2": 46, "gemma3": 62}


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raise ModelError for one that Headrace does not read, or a file without a
    model."""
    kind = _plain(file.metadata.get("general.type", "model"))
    if kind != "model":
        raise _error(file, "general.type", f"The file holds {shorten(kind)}, not a model.")
    parts = _plain(file.metadata.get("split.count", 1))
    if parts not in (0, 1):
        raise _error(
            file,
            "split.count",
            f"The model is split into {shorten(parts)} files. Join them with `llama-gguf-split --merge`.",
        )
    name = _plain(file.metadata.get("general.architecture"))
    if not isinstance(name, str) or name not in ARCHITECTURES:
        found = "The key is missing." if name is None else f"Unknown architecture {shorten(name)}."
        raise _error(file, "general.architecture", f"{found} Headrace reads GGUF files of {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]


def read_spec(file: GgufFile) -> ModelSpec:
    """Return the spec of the model in a file, with its sizes and keys checked."""
    architecture = architecture_of(file)
    config = _config(file, architecture)
    spec = architecture.family.spec(config)
    _check_rope_dims(file, spec, architecture)
    first = "blk.0.attn_qkv" if architecture.fused else "blk.0.attn_q"
    spec = replace(
        spec,
        norm_offset=0.0,  # converters add it to the weights
        qkv_bias=f"{first}.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        ropes=_divided_ropes(file, spec),
    )
    return check_size(spec, config)


def read_config(file: GgufFile) -> dict[str, object]:
    """Return what the metadata says of the model, under the names that config.json has."""
    return _config(file, architecture_of(file)).values()


def tensor_sources(file: GgufFile, spec: ModelSpec) -> TensorSources:
    """Map the spec's tensors to those of the file. Raise ModelError for a tensor of the file that has no place."""
    names = _FUSED_NAMES if architecture_of(file).fused else _NAMES
    sources = named_sources(spec, names, frozenset(file.tensors), prefix="", layer="blk", head="output")
    used = {part.name for parts in sources.values() for part in parts}
    for name in file.tensors:
        if name not in used and name not in (ROPE_DIVISORS, *LONG_ROPE):
            raise ModelError(
                "Headrace does not know this tensor, and it may change what the model computes.",
                path=file.path,
                tensor=name[:200],
            )
    return sources


def gguf_sources(spec: ModelSpec, name: str) -> TensorSources:
    """Return the names that a model's tensors have in files of an architecture."""
    names = _FUSED_NAMES if ARCHITECTURES[name].fused else _NAMES
    return named_sources(spec, names, frozenset(), prefix="", layer="blk", head="output")


def interleaved_heads(file: GgufFile, spec: ModelSpec) -> dict[str, int]:
    """Return the tensors whose rows are in another order than ours, with their number of heads."""
    if not architecture_of(file).interleaved:
        return {}
    return {
        f"blk.{layer}.{name}.{end}": heads
        for layer in range(len(spec.layers))
        for name, heads in (("attn_q", spec.heads), ("attn_k", spec.kv_heads))
        for end in ("weight", "bias")
    }


def _config(file: GgufFile, architecture: Architecture) -> ConfigJson:
    name = str(file.metadata["general.architecture"])
    start = f"{name}."
    own = {key.removeprefix(start): _plain(value) for key, value in file.metadata.items() if key.startswith(start)}
    table = {**KEYS, **architecture.keys}
    _check_keys(file, name, own, frozenset(table.values()))
    for key in _REQUIRED:
        if key not in own:
            raise _error(file, f"{name}.{key}", "The key is missing.")
    spelled = {ours: f"{name}.{theirs}" for ours, theirs in table.items()}
    values: dict[str, object] = {ours: _single(own[theirs]) for ours, theirs in table.items() if theirs in own}
    if values.get("sliding_window") == 0:  # there is none
        del values["sliding_window"]
    embed = file.tensors.get(_EMBED)
    if embed is None:
        raise ModelError("The file has no such tensor.", path=file.path, tensor=_EMBED)
    values["architectures"] = [architecture.name]
    values["vocab_size"] = embed.shape[0]
    values["tie_word_embeddings"] = _HEAD not in file.tensors
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if "head_dim" not in values and isinstance(heads, int) and isinstance(hidden, int) and 0 < heads <= hidden:
        if hidden % heads:
            raise _error(file, spelled["num_attention_heads"], f"{heads} heads do not divide {hidden} dims.")
        values["head_dim"] = hidden // heads
    if (length := own.get("attention.value_length")) not in (None, values.get("head_dim")):
        raise _error(
            file,
            f"{name}.attention.value_length",
            f"Expected {shorten(values.get('head_dim'))}, found {shorten(length)}.",
        )
    if name == "llama" and "sliding_window" in values:
        values["architectures"] = ["MistralForCausalLM"]
    elif architecture.name == "LlamaForCausalLM":
        values.pop("sliding_window", None)
    if name in _LARGE_GEMMA:
        values["query_pre_attn_scalar"] = values.get("head_dim")
        if values.get("num_hidden_layers") == _LARGE_GEMMA[name] and isinstance(heads, int) and isinstance(hidden, int):
            values["query_pre_attn_scalar"] = hidden / max(heads, 1)
    _add_rope(file, name, own, values, spelled, partial=architecture.partial_rope)
    return ConfigJson(values, path=file.path, spelled=spelled)


def _check_keys(file: GgufFile, name: str, own: Mapping[str, object], known: frozenset[str]) -> None:
    for key, value in own.items():
        if key in known or key in _OTHERS or key.startswith(("vision.", "mm.")):
            continue
        if value:
            raise _error(
                file,
                f"{name}.{key}",
                f"Headrace does not know this key, and it may change what the model computes. Found {shorten(value)}.",
            )


def _plain(value: GgufValue | None) -> object:
    """Return arrays as lists, which compare with anything."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _single(value: object) -> object:
    """Return the one value of an array that has the same for all layers; anything else as it is."""
    if not isinstance(value, list):
        return value
    items = cast("list[object]", value)
    return items[0] if items and all(item == items[0] for item in items) else items


def _add_rope(
    file: GgufFile,
    name: str,
    own: Mapping[str, object],
    values: dict[str, object],
    spelled: dict[str, str],
    *,
    partial: bool,
) -> None:
    dims, size = own.get("rope.dimension_count"), values.get("head_dim")
    if partial and isinstance(dims, int) and isinstance(size, int) and 0 < dims < size:
        values["partial_rotary_factor"] = (dims + 0.5) / size  # the families round down
        spelled["partial_rotary_factor"] = f"{name}.rope.dimension_count"
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    rope: dict[str, object] = {"factor": factor}
    spelled["rope_scaling.factor"] = f"{name}.rope.scaling.factor"
    if any(tensor in file.tensors for tensor in LONG_ROPE):
        short, long = (_factors(file, tensor) for tensor in LONG_ROPE)
        rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        spelled["rope_scaling.short_factor"], spelled["rope_scaling.long_factor"] = LONG_ROPE
        if "rope.scaling.attn_factor" in own:
            rope["attention_factor"] = own["rope.scaling.attn_factor"]
            spelled["rope_scaling.attention_factor"] = f"{name}.rope.scaling.attn_factor"
    elif own.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise _error(file, f"{name}.rope.scaling.attn_factor", "Headrace supports it only beside tables of factors.")
    elif kind == "yarn":
        rope["rope_type"] = "yarn"
        for ours, theirs in (
            ("original_max_position_embeddings", "original_context_length"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if f"rope.scaling.{theirs}" in own:
                rope[ours] = own[f"rope.scaling.{theirs}"]
                spelled[f"rope_scaling.{ours}"] = f"{name}.rope.scaling.{theirs}"
        if own.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise _error(file, f"{name}.rope.scaling.yarn_ext_factor", "Expected 1.")
    elif kind == "linear" or (kind == "none" and "rope.scale_linear" in own):
        rope["rope_type"] = "linear"
        if factor in (0, 1):
            return
    elif kind in ("none", "longrope"):
        return
    else:
        raise _error(file, f"{name}.rope.scaling.type", f"Rope {shorten(kind)} is not supported.")
    values["rope_scaling"] = rope


def _factors(file: GgufFile, name: str) -> list[float]:
    table = _vector(file, name)
    return [float(value) for value in table]


def _vector(file: GgufFile, name: str) -> NDArray[np.float32]:
    entry = file.tensors.get(name)
    if entry is None:
        raise ModelError("The file has no such tensor.", path=file.path, tensor=name)
    if entry.type != "F32" or len(entry.shape) != 1:
        raise ModelError("Expected a vector of F32.", path=file.path, tensor=name)
    values: NDArray[np.float32] = file.rows(name).view("<f4").reshape(-1)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise ModelError("Expected numbers above zero.", path=file.path, tensor=name)
    return values


def _check_rope_dims(file: GgufFile, spec: ModelSpec, architecture: Architecture) -> None:
    name = f"{file.metadata['general.architecture']}.rope.dimension_count"
    dims = _plain(file.metadata.get(name))
    if dims is None:
        return
    expected = 2 * len(spec.ropes[0].inv_freq)
    if dims != expected:
        kind = "an even number up to" if architecture.partial_rope else "the size of a head,"
        raise _error(file, name, f"Expected {kind} {spec.head_size}, found {shorten(dims)}.")


def _divided_ropes(file: GgufFile, spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """Return the ropes with every frequency divided by the file's factor for it, which is how files store a llama3
    rope."""
    if ROPE_DIVISORS not in file.tensors:
        return spec.ropes
    factors = _vector(file, ROPE_DIVISORS)
    if len(spec.ropes) != 1 or spec.ropes[0].long_inv_freq is not None:
        raise ModelError("The architecture has no such factors.", path=file.path, tensor=ROPE_DIVISORS)
    inv_freq = np.array(spec.ropes[0].inv_freq, dtype=np.float32)
    if len(factors) != len(inv_freq):
        raise ModelError(f"Has {len(factors)} factors. Expected {len(inv_freq)}.", path=file.path, tensor=ROPE_DIVISORS)
    divided: NDArray[np.float32] = inv_freq / factors
    if not np.isfinite(divided).all():
        raise ModelError("A frequency is not finite.", path=file.path, tensor=ROPE_DIVISORS)
    return (replace(spec.ropes[0], inv_freq=tuple(float(value) for value in divided)),)


def _error(file: GgufFile, key: str, reason: str) -> ModelError:
    return ModelError(f"Key {key[:120]!r}: {reason}", path=file.path)
