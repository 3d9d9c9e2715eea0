"""Reads the text part of Gemma 4: full layers with heads of another size than sliding ones, an input of each layer's
own, last layers without keys and values of their own, and in some sizes experts beside the dense MLP."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.models.config_json import (
    MAX_EXPERTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_VOCAB,
    ConfigJson,
)
from headrace.models.families.decoder import (
    LLAMA_NAMES,
    OUT_NORM_NAMES,
    TensorNames,
    decoder_spec,
    find_prefix,
    layer_count,
    layer_windows,
    named_sources,
    sliding_window,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.rope import PROPORTIONAL, read_ropes_by_kind
from headrace.models.spec import ExpertSpec, LayerInputSpec, LayerSpec, ModelSpec

architectures: tuple[str, ...] = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
)
ignored: tuple[str, ...] = (
    # The image and audio parts are not loaded.
    "vision_config",
    "audio_config",
    "vision_soft_tokens_per_image",
    # Of experts, where there are none.
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
    # Of the layers' inputs, and of full layers, where others switch them off.
    "vocab_size_per_layer_input",
    "num_global_key_value_heads",
    "global_head_dim",
)

_NAMES: Final[TensorNames] = {
    **LLAMA_NAMES,
    **OUT_NORM_NAMES,
    "scale": ("layer_scalar",),
    "inputs.embed": ("embed_tokens_per_layer",),
    # The same name is the model's product and a layer's.
    "inputs.in": ("per_layer_model_projection",),
    "inputs.norm": ("per_layer_projection_norm",),
    "inputs.out": ("per_layer_projection",),
    "mlp.router": ("router.proj",),
    "mlp.router_norm": ("router.scale",),
    "mlp.expert_scales": ("router.per_expert_scale",),
    "mlp.experts_norm": ("pre_feedforward_layernorm_2",),
    "mlp.experts_out_norm": ("post_feedforward_layernorm_2",),
    "mlp.dense_out_norm": ("post_feedforward_layernorm_1",),
    "mlp.experts.gate_up": ("experts.gate_up_proj",),
    "mlp.experts.down": ("experts.down_proj",),
}
_LAYER_INPUTS: Final = {"inputs.in": "per_layer_input_gate", "inputs.norm": "post_per_layer_input_norm"}
_PREFIXES: Final = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")
_ROPES: Final = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_DEFAULTS: Final[dict[str, object]] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "rope_parameters": _ROPES,
}


class _Heads(msgspec.Struct, frozen=True):
    """Sizes of the heads of a layer."""

    size: int
    kv: int


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    unified = "Unified" in architecture
    if architecture.endswith("ForConditionalGeneration"):
        config = config.sub("text_config").with_defaults(
            {"tie_word_embeddings": config.flag("tie_word_embeddings", default=True)}
        )
        config.refuse("quantization_config", "it belongs beside text_config, not into it")
    config.refuse("attention_bias", "projections must have no biases", unless=(False,))
    # With images alone, text still sees what is before it.
    config.refuse("use_bidirectional_attention", "a token must see those before it", unless=("vision",))
    # The unified models have no inputs of each layer's own and no experts, whatever their configs say.
    config = config.with_defaults({**_DEFAULTS, "sliding_window": 1024 if unified else 512})
    sliding, full = _heads(config)
    experts = None if unified else _experts(config)
    plain = decoder_spec(
        config.with_value("per_layer_config", None),
        family="gemma4",
        architecture=architecture,
        layers=_layers(config, sliding, full, experts=experts is not None),
        ropes=read_ropes_by_kind(
            config, full.size, theta=1_000_000.0, local_theta=10_000.0, local_size=sliding.size, kinds=PROPORTIONAL
        ),
        head_size=sliding.size,
        norm_eps=1e-6,
        experts=experts,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )
    inputs = None if unified else _inputs(config)
    return msgspec.structs.replace(
        plain,
        out_norm=True,
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        logit_softcap=config.optional_positive("final_logit_softcapping") or 0.0,
        embedding_scale=plain.hidden_size**0.5,
        layer_scale=True,
        layer_inputs=inputs,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, _PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    found = dict(named_sources(spec, _NAMES, names, prefix=prefix, head=f"{head}lm_head"))
    for index, layer in enumerate(spec.layers):
        stem = f"{prefix}layers.{index}"
        if spec.layer_inputs is not None:
            for name, source in _LAYER_INPUTS.items():
                found[f"layers.{index}.{name}"] = (TensorPart(f"{stem}.{source}.weight"),)
        qkv = f"layers.{index}.attn.qkv"
        if layer.shares is not None:
            found[qkv] = found[qkv][:1]
        elif layer.keys_as_values:
            found[qkv] = (*found[qkv][:2], found[qkv][1])
        for expert in range(spec.experts.count if spec.experts is not None else 0):
            for leaf, source in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                part = TensorPart(f"{stem}.experts.{source}", expert)
                found[f"layers.{index}.mlp.experts.{expert}.{leaf}"] = (part,)
    return found


def _inputs(config: ConfigJson) -> LayerInputSpec | None:
    size = config.optional_size("hidden_size_per_layer_input", minimum=0, maximum=MAX_HIDDEN, default=256)
    if not size:
        return None
    every = config.size("vocab_size", maximum=MAX_VOCAB)
    vocab = config.size("vocab_size_per_layer_input", minimum=every, maximum=MAX_VOCAB, default=262_144)
    return LayerInputSpec(size=size, vocab=vocab)


def _experts(config: ConfigJson) -> ExpertSpec | None:
    if not config.flag("enable_moe_block", default=False):
        return None
    count = config.size("num_experts", maximum=MAX_EXPERTS)
    return ExpertSpec(
        count=count,
        top_k=config.size("top_k_experts", maximum=count),
        intermediate_size=config.size("moe_intermediate_size", maximum=MAX_INTERMEDIATE),
        normalise=True,
        beside=True,
    )


def _windows(config: ConfigJson) -> tuple[int, ...]:
    """Return each layer's window in tokens; the last layer has none."""
    count = layer_count(config)
    windows = layer_windows(config, sliding_window(config), tuple((index + 1) % 6 != 0 for index in range(count)))
    return (*windows[:-1], 0)


def _heads(config: ConfigJson) -> tuple[_Heads, _Heads]:
    """Return the heads of sliding layers and of full ones, which a config gives by kind or layer by layer."""
    usual = _read_heads(config)
    if (layers := config.optional_sub("per_layer_config")) is None:
        size = config.size("global_head_dim", maximum=MAX_HEAD_SIZE, default=512)
        kv = usual.kv
        if config.flag("attention_k_eq_v", default=False):
            kv = config.optional_size("num_global_key_value_heads", maximum=MAX_HEADS) or kv
        return usual, _Heads(size, kv)
    defaults = {"head_dim": usual.size, "num_key_value_heads": usual.kv}
    each = [layers.optional_sub(str(index)) for index in range(layer_count(config))]
    heads = [usual if own is None else _read_heads(own.with_defaults(defaults)) for own in each]
    windows = _windows(config)
    sliding = {own for own, window in zip(heads, windows, strict=True) if window} or {usual}
    full = {own for own, window in zip(heads, windows, strict=True) if not window}
    if len(sliding) > 1 or len(full) > 1:
        raise config.error("per_layer_config", "Layers of one kind must have heads of one size and number.")
    return sliding.pop(), full.pop()


def _read_heads(config: ConfigJson) -> _Heads:
    return _Heads(config.size("head_dim", maximum=MAX_HEAD_SIZE), config.size("num_key_value_heads", maximum=MAX_HEADS))


def _layers(config: ConfigJson, sliding: _Heads, full: _Heads, *, experts: bool) -> tuple[LayerSpec, ...]:
    windows = _windows(config)
    count = len(windows)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    if heads % full.kv:
        raise config.mismatch("num_global_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    own = count - config.size("num_kv_shared_layers", minimum=0, maximum=count - 1, default=0)
    wide = config.flag("use_double_wide_mlp", default=False)
    equal = config.flag("attention_k_eq_v", default=False)
    inner = config.size("intermediate_size", maximum=MAX_INTERMEDIATE)

    def owner(index: int) -> int | None:
        if index < own:
            return None
        alike = [other for other in range(own) if bool(windows[other]) == bool(windows[index])]
        if not alike:
            raise config.error("num_kv_shared_layers", f"No layer before {own} is of the kind of layer {index}.")
        return alike[-1]

    return tuple(
        LayerSpec(
            window=window,
            rope=1 if window else 0,
            shares=owner(index),
            head_size=0 if window or full.size == sliding.size else full.size,
            kv_heads=0 if window or full.kv == sliding.kv else full.kv,
            inner=2 * inner if wide and index >= own else 0,
            keys_as_values=equal and not window and index < own,
            experts=experts,
        )
        for index, window in enumerate(windows)
    )
