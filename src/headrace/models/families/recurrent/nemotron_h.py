"""Reads Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, an MLP of a squared ReLU,
or a mixture of such MLPs with one that every token goes to."""

from __future__ import annotations

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
from headrace.models.families.decoder import ACTIVATIONS, TensorNames, expert_groups, find_prefix, named_sources
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.recurrent.recurrent_layers import (
    MAMBA_KEYS,
    MAMBA_NAMES,
    flat_convolutions,
    mamba_layers,
)
from headrace.models.spec import ExpertSpec, LayerSpec, ModelSpec, RecurrentSpec

architectures: tuple[str, ...] = ("NemotronHForCausalLM",)
ignored: tuple[str, ...] = (
    # How weights began, how the reference cuts and rounds its work, and what its attention does not use.
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "chunk_size",
    "expand",
    "use_mamba_kernels",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "norm_eps",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "partial_rotary_factor",
    # Sizes of kinds of layers that a model may lack.
    "intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "ssm_state_size",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "conv_kernel",
    "time_step_limit",
    "use_conv_bias",
    "use_bias",
    # The layers that predict further tokens are not used.
    "num_nextn_predict_layers",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
)

_NAMES: TensorNames = {
    "embed": ("embeddings",),
    "norm": ("norm_f",),
    "attn.norm": ("norm",),
    "attn.qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "attn.o": ("mixer.o_proj",),
    **{name: (f"mixer.{stem}",) for name, stem in MAMBA_NAMES.items()},
    "mlp.norm": ("norm",),
    "mlp.up": ("mixer.up_proj",),
    "mlp.down": ("mixer.down_proj",),
    "mlp.router": ("mixer.gate",),
    "mlp.router_bias": ("mixer.gate.e_score_correction_bias",),
    "mlp.experts.up": ("mixer.experts.{expert}.up_proj",),
    "mlp.experts.down": ("mixer.experts.{expert}.down_proj",),
    "mlp.shared.up": ("mixer.shared_experts.up_proj",),
    "mlp.shared.down": ("mixer.shared_experts.down_proj",),
}
_MAMBA_KEYS: Final = MAMBA_KEYS._replace(heads="mamba_num_heads", state_size="ssm_state_size")
_RECURRENT: Final = LayerSpec(mixer="recurrent", mlp=False, rope=None)
_ATTENTION: Final = LayerSpec(mlp=False, rope=None)
_MLP: Final = LayerSpec(mixer="none", rope=None)
_MIXTURE: Final = LayerSpec(mixer="none", rope=None, experts=True)
# As a letter of `hybrid_override_pattern`, and as names of a list.
_LETTERS: Final = {"M": _RECURRENT, "*": _ATTENTION, "-": _MLP, "E": _MIXTURE}
_KINDS: Final = {
    "mamba": _RECURRENT,
    "linear_attention": _RECURRENT,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mlp": _MLP,
    "moe": _MIXTURE,
}


def spec(config: ConfigJson) -> ModelSpec:
    config = config.renamed({"attention_head_dim": "head_dim"})
    config.refuse("sliding_window", "all layers of attention must see the whole context")
    config.refuse("mamba_hidden_act", "recurrent layers have no other activation", unless=("silu", "swish"))
    config.refuse("mamba_proj_bias", "'use_bias' says whether projections have biases", unless=(False,))
    config.refuse("attention_bias", "projections must have no biases", unless=(False,))
    config.refuse("moe_latent_size", "experts must read the hidden states themselves")
    config.refuse("n_shared_experts", "a mixture has one expert that every token goes to", unless=(1,))
    layers = _layers(config)
    heads = config.size("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.optional_size("num_key_value_heads", maximum=heads, default=8) or heads
    if heads % kv_heads:
        raise config.mismatch("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    size = config.size("head_dim", maximum=MAX_HEAD_SIZE, default=128)
    dense = any(layer.mlp and not layer.experts for layer in layers)
    mlp_bias = config.flag("mlp_bias", default=False)
    experts = _experts(config) if any(layer.experts for layer in layers) else None
    if experts is not None:
        config.refuse("mlp_bias", "experts must have no biases", unless=(False,))
    eps = config.positive("layer_norm_epsilon", maximum=1.0, default=1e-5)
    return ModelSpec(
        family="nemotron_h",
        architecture=architecture_of(config),
        vocab_size=config.size("vocab_size", maximum=MAX_VOCAB),
        hidden_size=config.size("hidden_size", maximum=MAX_HIDDEN),
        intermediate_size=config.size("intermediate_size", maximum=MAX_INTERMEDIATE) if dense else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        layers=layers,
        context=config.size("max_position_embeddings", maximum=MAX_CONTEXT),
        norm_eps=eps,
        activation=config.choice("mlp_hidden_act", ACTIVATIONS, default="relu2"),
        gated=False,
        mlp_bias=mlp_bias,
        attention_scale=size**-0.5,
        tied=config.flag("tie_word_embeddings", default=False),
        experts=experts,
        recurrent=_recurrent(config, eps) if any(layer.recurs for layer in layers) else None,
    )


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, ("backbone.", "model.", ""), "embeddings.weight")
    return flat_convolutions(named_sources(spec, _NAMES, names, prefix=prefix))


def _layers(config: ConfigJson) -> tuple[LayerSpec, ...]:
    """Return the layers of the list or the pattern that names them; a config of an older release has the pattern."""
    count = config.optional_size("num_hidden_layers", maximum=MAX_LAYERS)
    pattern = config.text("hybrid_override_pattern", default="") if config.has("hybrid_override_pattern") else ""
    if not set(pattern) <= _LETTERS.keys() or len(pattern) > MAX_LAYERS:
        raise config.mismatch("hybrid_override_pattern", f"at most {MAX_LAYERS} of the letters M, *, - and E")
    layers = tuple(_LETTERS[letter] for letter in pattern)
    for key in ("layers_block_type", "layer_types"):
        if config.has(key):
            names = config.names_of(key, tuple(_KINDS), most=MAX_LAYERS)
            layers = tuple(_KINDS[name] for name in names)
            break
    if not layers:
        raise config.error("layers_block_type", "The key is missing, and so is hybrid_override_pattern.")
    if count is not None and count != len(layers):
        raise config.mismatch("num_hidden_layers", f"the number of layers that are listed ({len(layers)})")
    return layers


def _experts(config: ConfigJson) -> ExpertSpec:
    count = config.size("n_routed_experts", maximum=MAX_EXPERTS, default=8)
    top_k = config.size("num_experts_per_tok", maximum=count, default=2)
    groups, top_groups = expert_groups(config, count, top_k, default=(1, 1))
    return ExpertSpec(
        count=count,
        top_k=top_k,
        intermediate_size=config.size("moe_intermediate_size", maximum=MAX_INTERMEDIATE, default=7688),
        normalise=config.flag("norm_topk_prob", default=True),
        scoring="sigmoid",
        correction=True,
        scale=config.positive("routed_scaling_factor", default=1.0),
        shared_size=config.size("moe_shared_expert_intermediate_size", maximum=MAX_INTERMEDIATE, default=7688),
        groups=groups,
        top_groups=top_groups,
        group_best=2,
    )


def _recurrent(config: ConfigJson, eps: float) -> RecurrentSpec:
    # Bounds of steps as the published models mean them. transformers applies `time_step_min` in a prompt alone.
    size = config.size("mamba_head_dim", maximum=MAX_HEAD_SIZE, default=64)
    return mamba_layers(config, _MAMBA_KEYS, size, eps)
