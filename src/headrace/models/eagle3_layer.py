"""Reads and writes EAGLE-3 layers, in the layouts of their authors, SGLang and SpecForge, and of vLLM and speculators.

    fc.weight                       [hidden, 3 x the model's hidden]: hidden states of three of the model's layers
    midlayer.* or layers.0.*        a Llama layer whose q, k and v read [embedding, hidden state], each through a norm
                                    of its own: input_layernorm and hidden_norm
    norm.weight, lm_head.weight     the head, over the tokens that `d2t` names: each as its distance from its place
    embed_tokens.weight             optional; without it, the embedding is the model's
    input_norm.*, fc_norm.N.*       optional norms before fc, of all three states at once or of each

`t2d` says the same as `d2t` and is not read. Does not compute anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.draft_tensors import (
    Floats,
    layer_config,
    layer_sources,
    read_floats,
    read_layer,
    read_tokens,
    split_layer,
    write_tensors,
)
from headrace.models.formats.model_weights import SINGLE_FILE
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec
from headrace.models.tensor_shapes import tensor_shapes

_CONFIG_FILE: Final = "config.json"
_ARCHITECTURES: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_LAYER: Final = "midlayer"
_MOST_SIZE: Final = 1 << 20
_MOST_STATES: Final = 8
_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_IGNORED: Final = frozenset({"t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight"})
# Flags of other programs, with the value that is read and what the other one means.
_FLAGS: Final = {
    "use_aux_hidden_state": (True, "the layer reads one hidden state"),
    "use_input_layernorm_in_first_layer": (True, "the embedding has no norm"),
    "use_last_layernorm": (True, "the head has no norm"),
    "use_mtp_layernorm": (False, "the layer has other norms"),
}


class Eagle3Layer(msgspec.Struct, frozen=True):
    """A layer that reads a token's embedding beside a hidden state, and predicts the next token with a head of its own.

    The state is made of those of several of the model's layers, or is the layer's own after a draft.
    """

    spec: ModelSpec  # one paired layer; its vocabulary is that of `tokens`
    reads: tuple[int, ...]  # layers of the model: what they begin with is what `join` reads, side by side
    join: Floats  # [hidden, states x the model's hidden]
    tensors: dict[str, Floats]  # of the layer, by canonical names
    token_norm: Floats  # weights of the RMS norms
    state_norm: Floats | None  # of known and own states before the layer; None: it is the norm of the attention alone
    norm: Floats  # before the head
    head: Floats | None  # [tokens, hidden]; None: the model's
    tokens: NDArray[np.int32] | None = None  # that it chooses from; None: all
    embedding: Floats | None = None  # [the model's vocabulary, hidden]; None: the model's
    join_norms: tuple[Floats, ...] = ()  # before `join`: one of all states at once, or one of each
    returns_normed: bool = False  # its own states are those after `norm`

    @property
    def has_own_ends(self) -> bool:
        return self.embedding is not None and self.head is not None


def chosen_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose input a new layer reads: a low, a middle and a high one."""
    return _usual_layers(layers) if layers >= 8 else (min(1, layers - 1), layers // 2, layers - 1)


def _usual_layers(layers: int) -> tuple[int, ...]:
    return 2, layers // 2, layers - 3


def is_eagle3(config: ConfigJson, file: SafetensorsFile) -> bool:
    names = {name.removeprefix("model.") for name in file.tensors}
    return (
        any(name in _ARCHITECTURES for name in config.strings("architectures"))
        or any(name.startswith(f"{_LAYER}.") for name in names)
        or "layers.0.hidden_norm.weight" in names
    )


def eagle3_config(target: ModelSpec, *, base: str, vocabulary: int) -> dict[str, object]:
    """Return the config of a new layer for a model, with heads and sizes like the model's own."""
    reads = chosen_layers(len(target.layers))
    return {
        "architectures": [_ARCHITECTURES[0]],
        "draft_vocab_size": vocabulary,
        _IDS: list(reads),
        # SGLang counts the layers whose output they are.
        "eagle_config": {_IDS: [each - 1 for each in reads], "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        **layer_config(target, base=base),
    }


def eagle3_spec(config: ConfigJson, target: ModelSpec, vocabulary: int) -> ModelSpec:
    """Return the spec of a layer that chooses among `vocabulary` tokens."""
    config.refuse("num_hidden_layers", "EAGLE-3 drafters of one layer are read", unless=(None, 1))
    config.refuse("hidden_act", "the activation must be silu", unless=(None, "silu"))
    config.refuse("use_sliding_window", "the attention must see the whole text", unless=(None, False))
    if any(kind != "full_attention" for kind in config.strings("layer_types")):
        raise config.mismatch("layer_types", "full_attention")
    heads = config.size("num_attention_heads", maximum=_MOST_SIZE)
    kv_heads = config.size("num_key_value_heads", maximum=heads, default=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"Must divide num_attention_heads, {heads}.")
    hidden = config.size("hidden_size", maximum=_MOST_SIZE, default=target.hidden_size)
    head_size = config.optional_size("head_dim", maximum=_MOST_SIZE) or max(1, hidden // heads)
    return ModelSpec(
        family="llama",
        architecture="EAGLE-3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size", maximum=_MOST_SIZE),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        layers=(LayerSpec(paired=True),),
        context=target.context,
        norm_eps=config.positive("rms_norm_eps", default=1e-6),
        final_norm=False,  # its own states are those before the norm
        ropes=(read_rope(config, head_size, default_original=target.context),),
        attention_scale=head_size**-0.5,
        tied=True,  # its embedding is the head, and never read
    )


def eagle3_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the layer's canonical tensors, without the head."""
    return {name: shape for name, shape in tensor_shapes(spec).items() if name != "embed"}


def write_eagle3(out: Path, layer: Eagle3Layer, config: Mapping[str, object]) -> None:
    """Write a layer that reads the model's embedding into an existing folder. `config` is that of `eagle3_config`."""
    assert layer.head is not None
    tensors: dict[str, NDArray[Any]] = {
        "fc.weight": layer.join,
        "norm.weight": layer.norm,
        "lm_head.weight": layer.head,
        f"{_LAYER}.input_layernorm.weight": layer.token_norm,
        **split_layer(layer.spec, layer.tensors, _sources(layer.spec, _LAYER)),
    }
    if layer.tokens is not None:
        tensors["d2t"] = layer.tokens.astype(np.int64) - np.arange(len(layer.tokens))
    write_tensors(out / SINGLE_FILE, tensors)
    (out / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_eagle3(config: ConfigJson, file: SafetensorsFile, target: ModelSpec) -> Eagle3Layer:
    """Read a layer for a model. Raise ModelError for what is wrong, belongs to another model or is not supported."""
    if target.streams is not None:
        raise ModelError(
            "This model's layers have several streams of hidden states, which an EAGLE-3 layer cannot read.",
            path=file.path.parent,
        )
    layer_config = config.optional_sub("transformer_layer_config") or config
    own = config.optional_sub("eagle_config") or ConfigJson({}, path=config.path, prefix="eagle_config.")
    for name, (read, meaning) in _FLAGS.items():
        own.refuse(name, meaning, unless=(None, read))
    stem = "model." if any(name.startswith("model.") for name in file.tensors) else ""
    layer = _LAYER if any(name.startswith(f"{stem}{_LAYER}.") for name in file.tensors) else "layers.0"
    begin = f"{stem}{layer}"
    read = _Reader(file, stem)
    tokens = read_tokens(file, read.name("d2t"), target, offsets=True)
    spec = eagle3_spec(layer_config, target, target.vocab_size if tokens is None else len(tokens))
    has = file.tensors.keys()
    normed = _flag(config, own, "norm_before_residual", required=layer_config is not config)
    spec = msgspec.structs.replace(
        spec,
        layers=(LayerSpec(paired=True, attn_norm=not normed),),
        qkv_bias=f"{begin}.self_attn.q_proj.bias" in has,
        o_bias=f"{begin}.self_attn.o_proj.bias" in has,
        qk_norm="head" if f"{begin}.self_attn.q_norm.weight" in has else "none",
    )
    reads = _read_layers(config, own, target)
    hidden, width = spec.hidden_size, len(reads) * target.hidden_size
    join_norms: tuple[Floats, ...] = ()
    if _flag(config, own, "norm_before_fc"):
        join_norms = (read.floats("input_norm.weight", (width,)),)
    elif _flag(config, own, "fc_norm"):
        names = [f"fc_norm.{place}.weight" for place in range(len(reads))]
        join_norms = tuple(read.floats(name, (target.hidden_size,)) for name in names)
    sources = _sources(spec, begin)
    found = Eagle3Layer(
        spec,
        reads,
        read.floats("fc.weight", (hidden, width)),
        read_layer(file, spec, eagle3_shapes(spec), sources),
        token_norm=read.floats(f"{layer}.input_layernorm.weight", (hidden,)),
        state_norm=read.floats(f"{layer}.hidden_norm.weight", (hidden,)) if normed else None,
        norm=read.floats("norm.weight", (hidden,)),
        head=read.optional("lm_head.weight", (spec.vocab_size, hidden)),
        tokens=tokens,
        embedding=read.optional("embed_tokens.weight", (target.vocab_size, hidden)),
        join_norms=join_norms,
        returns_normed=_flag(config, own, "norm_output"),
    )
    read.check_rest(part for parts in sources.values() for part in parts)
    if hidden != target.hidden_size and not found.has_own_ends:
        raise ModelError(
            f"The layer's hidden size is {hidden}, the model's {target.hidden_size}, so it needs tensors of its own: "
            "embed_tokens.weight and lm_head.weight.",
            path=file.path,
        )
    return found


class _Reader:
    """Reads a file's tensors and remembers which."""

    def __init__(self, file: SafetensorsFile, stem: str) -> None:
        self._file = file
        self._stem = stem
        self._read: set[str] = {self.name("d2t")}

    def name(self, name: str) -> str:
        """Return how a tensor is called in this file, which may put the module's name before."""
        whole = self._stem + name
        return whole if whole in self._file.tensors else name

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        whole = self.name(name)
        self._read.add(whole)
        return read_floats(self._file, whole, shape)

    def optional(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        return self.floats(name, shape) if self.name(name) in self._file.tensors else None

    def check_rest(self, of_layer: Iterable[str]) -> None:
        """Raise ModelError for a tensor that was not read. `of_layer` are those that were read elsewhere."""
        known = self._read | set(of_layer)
        for name in self._file.tensors:
            plain = name.removeprefix(self._stem)
            if name not in known and plain not in _IGNORED and not plain.endswith(".rotary_emb.inv_freq"):
                raise ModelError(
                    "Is not a tensor of an EAGLE-3 layer that Headrace reads.", path=self._file.path, tensor=name
                )


def _sources(spec: ModelSpec, begin: str) -> dict[str, tuple[str, ...]]:
    found = layer_sources(spec, begin)
    if spec.layers[0].attn_norm:
        found["layers.0.attn.norm"] = (f"{begin}.hidden_norm.weight",)
    return found


def _flag(config: ConfigJson, own: ConfigJson, name: str, *, required: bool = False) -> bool:
    """Return a flag of the config or of its section `eagle_config`."""
    section = own if own.has(name) and not config.has(name) else config
    return section.flag(name) if required or section.has(name) else False


def _read_layers(config: ConfigJson, own: ConfigJson, target: ModelSpec) -> tuple[int, ...]:
    """Return the layers whose input is read. vLLM's numbers are these, at the top level of a config. SGLang's, in its
    section `eagle_config`, are the layers before."""
    most = len(target.layers) - 1
    ids = config.optional_sizes(_IDS, minimum=0, maximum=most, max_items=_MOST_STATES)
    if ids:
        return ids
    if ids := own.optional_sizes(_IDS, minimum=-1, maximum=most - 1, max_items=_MOST_STATES):
        return tuple(each + 1 for each in ids)
    if most < 4:
        raise config.error(_IDS, f"The key is missing, and a model of {most + 1} layers has no usual ones.")
    return _usual_layers(most + 1)
