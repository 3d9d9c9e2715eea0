"""Shares what decoder families have in common: reading sizes from a config, naming tensors, bounding the whole model.

Families change the base spec and the table of Llama's tensor names. This module knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.models.config_json import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
    ConfigJson,
)
from headrace.models.families.family import TensorPart, TensorSources
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec, PlainActivation, RopeSpec
from headrace.models.tensor_shapes import tensor_shapes

MAX_PARAMETERS: Final = 1 << 42
MAX_EXPERT_TENSORS: Final = 1 << 18  # experts times layers

ACTIVATIONS: Final[Mapping[str, PlainActivation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "quick_gelu": "quick_gelu",
}

# Canonical name within a layer (or of the model) -> names in the files, whose rows are joined; "{expert}" is a number.
TensorNames = Mapping[str, tuple[str, ...]]

LLAMA_NAMES: Final[TensorNames] = {
    "embed": ("embed_tokens",),
    "norm": ("norm",),
    "attn.norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.sinks": ("self_attn.sinks",),
    "attn.o": ("self_attn.o_proj",),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
# The layer's own norms when the sublayers' outputs are normalised (Gemma, OLMo-2).
OUT_NORM_NAMES: Final[TensorNames] = {
    "attn.out_norm": ("post_attention_layernorm",),
    "mlp.norm": ("pre_feedforward_layernorm",),
    "mlp.out_norm": ("post_feedforward_layernorm",),
}

# A mixture's names as most families have them.
EXPERT_NAMES: Final[TensorNames] = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{expert}.down_proj",),
}


# Tensors whose names in the files have no ".weight" after them.
_WHOLE_NAMES: Final = (
    *(".router_bias", ".sinks", ".step_bias", ".decay", ".skip", ".scale"),
    *("_scale", "_scales", ".mlp.router_norm"),
)


def mixtral_names(block: str, router: str) -> TensorNames:
    """Return the names of a mixture as Mixtral's files have them."""
    return {
        **LLAMA_NAMES,
        "mlp.router": (f"{block}.{router}",),
        "mlp.experts.gate_up": (f"{block}.experts.{{expert}}.w1", f"{block}.experts.{{expert}}.w3"),
        "mlp.experts.down": (f"{block}.experts.{{expert}}.w2",),
    }


def layer_count(config: ConfigJson) -> int:
    return config.size("num_hidden_layers", maximum=MAX_LAYERS)


def head_size(config: ConfigJson, *, default: int | None = None) -> int:
    """`head_dim`, or what is left of the hidden size for each head."""
    given = config.optional_size("head_dim", maximum=MAX_HEAD_SIZE, default=default)
    if given is not None:
        return given
    hidden = config.size("hidden_size", maximum=MAX_HIDDEN)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    if hidden % heads or hidden // heads > MAX_HEAD_SIZE:
        raise config.mismatch(
            "num_attention_heads", f"a divisor of hidden_size ({hidden}) into heads of at most 4096 dims"
        )
    return hidden // heads


def four_times_hidden(config: ConfigJson) -> ConfigJson:
    """Return a config whose MLP is four times as wide as its hidden states if it does not say."""
    if config.has("intermediate_size"):
        return config
    return config.with_value("intermediate_size", 4 * config.size("hidden_size", maximum=MAX_HIDDEN))


def layer_windows(config: ConfigJson, window: int | None, default: tuple[bool, ...]) -> tuple[int, ...]:
    """Return each layer's window in tokens (0: unlimited), from `layer_types` or else `default` (True: sliding)."""
    types = config.optional_names("layer_types", ("full_attention", "sliding_attention"), len(default))
    slides = default if types is None else tuple(kind == "sliding_attention" for kind in types)
    if any(slides) and window is None:
        raise config.error("layer_types", "Some layers have a sliding window, but sliding_window is not set.")
    return tuple(window if sliding and window is not None else 0 for sliding in slides)


def rope_layers(config: ConfigJson, count: int) -> tuple[bool, ...]:
    """Return which layers have a rope. Despite its name, `no_rope_layers` holds 1 for layers with one."""
    given = config.optional_sizes("no_rope_layers", minimum=0, maximum=1, max_items=count)
    if not given:
        interval = config.size("no_rope_layer_interval", maximum=1 << 20, default=4)
        return tuple((index + 1) % interval != 0 for index in range(count))
    if len(given) != count:
        raise config.mismatch("no_rope_layers", f"a list of {count} integers")
    return tuple(flag == 1 for flag in given)


def sliding_window(config: ConfigJson, *, default: int | None = None) -> int | None:
    return config.optional_size("sliding_window", maximum=MAX_CONTEXT, default=default)


def gated_sliding_window(config: ConfigJson, *, default: int | None = None) -> int | None:
    """Return the window of a config whose `use_sliding_window` switches it on."""
    return sliding_window(config, default=default) if config.flag("use_sliding_window", default=False) else None


def decoder_spec(
    config: ConfigJson,
    *,
    family: str,
    architecture: str,
    layers: tuple[LayerSpec, ...],
    ropes: tuple[RopeSpec, ...],
    head_size: int,
    norm_eps: float,
    experts: ExpertSpec | None = None,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    default_tied: bool = False,
) -> ModelSpec:
    """Build the spec of a plain Llama; families replace the fields that differ."""
    config.refuse("clip_qkv", "Headrace does not clip projections")
    config.refuse("per_layer_config", "all layers must have the same size")
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.optional_size("num_key_value_heads", maximum=MAX_HEADS, default=heads) or heads
    if heads % kv_heads:
        raise config.mismatch("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    dense = any(not layer.experts for layer in layers) or (experts is not None and experts.beside)
    return ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=config.size("hidden_size", maximum=MAX_HIDDEN),
        intermediate_size=config.size("intermediate_size", maximum=MAX_INTERMEDIATE) if dense else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        layers=layers,
        context=config.size("max_position_embeddings", maximum=MAX_CONTEXT),
        norm_eps=config.positive("rms_norm_eps", maximum=1.0, default=norm_eps),
        activation=config.choice(activation_key, ACTIVATIONS, default=default_activation),
        ropes=ropes,
        attention_scale=head_size**-0.5,
        tied=config.flag("tie_word_embeddings", default=default_tied),
        experts=experts,
    )


def expert_spec(config: ConfigJson, *, size_key: str, normalise: bool) -> ExpertSpec:
    key = (
        "num_local_experts" if config.has("num_local_experts") else "num_experts"
    )  # the two keys have the same meaning
    count = config.size(key, maximum=MAX_EXPERTS)
    return ExpertSpec(
        count=count,
        top_k=config.size("num_experts_per_tok", maximum=count),
        intermediate_size=config.size(size_key, maximum=MAX_INTERMEDIATE),
        normalise=normalise,
    )


def expert_groups(config: ConfigJson, count: int, top_k: int, *, default: tuple[int, int]) -> tuple[int, int]:
    """Return in how many groups the experts are, and of how many of those a token's experts are."""
    groups = config.optional_size("n_group", maximum=count, default=default[0]) or 1
    top = config.optional_size("topk_group", maximum=groups, default=min(default[1], groups)) or groups
    if count % groups:
        raise config.mismatch("n_group", f"a divisor of the experts ({count})")
    if top * (count // groups) < top_k:
        raise config.mismatch("topk_group", f"enough groups for {top_k} experts of a token")
    return groups, top


def parameter_bound(spec: ModelSpec) -> int:
    """Return an upper bound of the weights without listing tensors, since a hostile config makes that list long."""
    experts = spec.experts
    shapes = [spec.head_shape(layer) for layer in spec.layers]
    attention = spec.hidden_size * 2 * max(spec.heads * size + kv_heads * size for kv_heads, size, _ in shapes)
    if (recurrent := spec.recurrent) is not None:
        attention += spec.hidden_size * (sum(recurrent.in_parts) + recurrent.inner)
    if (inputs := spec.layer_inputs) is not None:
        attention += inputs.size * (inputs.vocab + 3 * spec.hidden_size)  # of a layer
    if (streams := spec.streams) is not None:
        attention += 2 * (streams.count + streams.rank) * spec.hidden_size
    dense = 3 * spec.hidden_size * max(spec.inner_size(layer) for layer in spec.layers)
    experts_size = experts.intermediate_size * experts.count + experts.shared_size if experts else 0
    mixture = 3 * spec.hidden_size * experts_size
    return 2 * spec.vocab_size * spec.hidden_size + len(spec.layers) * (attention + dense + mixture)


def check_size(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return the spec, or raise ModelError if its sizes together exceed the bounds."""
    if parameter_bound(spec) > MAX_PARAMETERS:
        raise config.error("hidden_size", f"The sizes give more than {MAX_PARAMETERS} parameters.")
    if spec.experts and spec.experts.count * len(spec.layers) > MAX_EXPERT_TENSORS:
        raise config.error("num_hidden_layers", f"The layers together have more than {MAX_EXPERT_TENSORS} experts.")
    return spec


def find_prefix(names: frozenset[str], candidates: tuple[str, ...], probe: str) -> str:
    """Return the first prefix with which the probe is in the files, or else the first candidate."""
    return next((prefix for prefix in candidates if f"{prefix}{probe}" in names), candidates[0])


def decoder_prefix(names: frozenset[str]) -> str:
    """Return what is before the names of a decoder's tensors; models saved without a head have no prefix."""
    return find_prefix(names, ("model.", ""), "embed_tokens.weight")


def named_sources(
    spec: ModelSpec,
    table: TensorNames,
    names: frozenset[str],
    *,
    prefix: str,
    layer: str = "layers",
    head: str = "lm_head",
) -> TensorSources:
    """Map every tensor of the spec to its parts, from a table of names.

    A layer's names follow `prefix`, `layer` and its number. The head does not take the prefix.
    """

    def parts(name: str) -> tuple[TensorPart, ...]:
        name, end = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
        if name.endswith(_WHOLE_NAMES):
            _, number, leaf = name.split(".", 2)
            return (TensorPart(f"{prefix}{layer}.{number}.{table[leaf][0]}"),)
        if name == "head":
            return (TensorPart(f"{head}.{end}"),)
        where, expert = prefix, ""
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            where = f"{prefix}{layer}.{number}."
        if ".experts." in name:
            feed, _, expert, leaf = name.split(".")
            name = f"{feed}.experts.{leaf}"
        return tuple(TensorPart(f"{where}{stem.replace('{expert}', expert)}.{end}") for stem in table[name])

    sources = {name: parts(name) for name in tensor_shapes(spec) if not name.startswith("pooled.")}
    if spec.tied and sources["embed"][0].name not in names and f"{head}.weight" in names:
        sources["embed"] = (TensorPart(f"{head}.weight"),)  # some files store only the head of a tied pair
    return sources


def paired_sources(sources: TensorSources, spec: ModelSpec) -> TensorSources:
    """Return the sources of a model whose files have queries and keys in the pairs that the rope rotates."""
    pairs = (spec.head_size, 2 * len(spec.ropes[0].inv_freq))

    def paired(name: str, parts: tuple[TensorPart, ...]) -> tuple[TensorPart, ...]:
        if ".attn.qkv" not in name:
            return parts
        *rotated, values = parts
        return (*(TensorPart(part.name, pairs=pairs) for part in rotated), values)

    return {name: paired(name, parts) for name, parts in sources.items()}


def grouped_sources(sources: TensorSources, spec: ModelSpec) -> TensorSources:
    """Return the sources of a model whose files have queries, keys and values in one tensor, key head by key head."""
    group = (spec.heads // spec.kv_heads, spec.head_size)
    return {
        name: (TensorPart(parts[0].name, grouped=group),) if ".attn.qkv" in name else parts
        for name, parts in sources.items()
    }


def fuse_experts(
    sources: TensorSources, spec: ModelSpec, names: frozenset[str], blocks: tuple[str, ...]
) -> TensorSources:
    """Return the sources with experts taken from fused tensors, in layers whose files have those.

    `blocks` are the names that the files may use for a layer's mixture, such as "layers.{layer}.mlp".
    """
    if spec.experts is None:
        return sources
    fused = dict(sources)
    prefix = decoder_prefix(names)
    for index in range(len(spec.layers)):
        for block in blocks:
            stem = f"{prefix}{block.replace('{layer}', str(index))}.experts"
            if not spec.layers[index].experts or f"{stem}.gate_up_proj" not in names:
                continue
            for expert in range(spec.experts.count):
                fused[f"layers.{index}.mlp.experts.{expert}.gate_up"] = (TensorPart(f"{stem}.gate_up_proj", expert),)
                fused[f"layers.{index}.mlp.experts.{expert}.down"] = (TensorPart(f"{stem}.down_proj", expert),)
    return fused
