"""Reads LLaVA-1.5, LLaVA-NeXT, Pixtral and Mistral 3 (Mistral Small 3.1 and later, Ministral 3).

Their text part is a Llama, Mistral or Qwen2; the tower of their image part is that of CLIP or that of Pixtral.
"""

from __future__ import annotations

from typing import Final, Literal, cast

import msgspec

from headrace.models.config_json import (
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
    ConfigJson,
)
from headrace.models.families import llama, qwen
from headrace.models.families.decoder import ACTIVATIONS, LLAMA_NAMES, TensorNames, find_prefix, named_sources
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.vision.vision_tower import MAX_SIDE, Connector, TowerSpec, TowerTensor
from headrace.models.rope import inverse_powers
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec

_LLAVA, _NEXT, _MISTRAL3 = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
architectures: tuple[str, ...] = (_LLAVA, _NEXT, _MISTRAL3)
ignored: tuple[str, ...] = (
    *llama.ignored,
    *qwen.ignored,
    "is_composition",
    "image_seq_length",  # follows from the tower
    "use_image_newline_parameter",
    "vocab_size",  # of the text part, again; CLIP's own is of its texts
    # Of the image part: images of any size have places, and CLIP's own head is not used.
    "image_size",
    "projection_dim",
)

_TEXTS: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
# Configs omit keys whose values equal those of the class.
_TEXT_DEFAULTS: Final[dict[str, dict[str, object]]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "ministral3": {"rms_norm_eps": 1e-5},
}
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
_TOWERS = ("model.vision_tower.", "vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model.")
_PROJECTORS = ("model.multi_modal_projector.", "multi_modal_projector.")
_OPENINGS: Final[dict[str, Literal["gelu", "gelu_tanh", "silu"]]] = {
    name: kind for name, kind in ACTIVATIONS.items() if kind in ("gelu", "gelu_tanh", "silu")
}
_CLIP_NAMES: TensorNames = {
    "embed_norm": ("pre_layrnorm",),
    "attn.norm": ("layer_norm1",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o": ("self_attn.out_proj",),
    "mlp.norm": ("layer_norm2",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}
_PIXTRAL_NAMES: TensorNames = {
    "embed_norm": ("ln_pre",),
    "attn.norm": ("attention_norm",),
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.o": ("attention.o_proj",),
    "mlp.norm": ("ffn_norm",),
    "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": ("feed_forward.down_proj",),
}
_TILINGS: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_MOST_TILINGS: Final = 64
_CLIP_DEFAULTS: dict[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_PIXTRAL_DEFAULTS: dict[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


def spec(config: ConfigJson) -> ModelSpec:
    architecture = architecture_of(config)
    if architecture != _MISTRAL3 or config.has("vision_config"):
        read_tower(config)
    text = _text(config)
    kind = text.text("model_type", default="llama")
    family = qwen if kind == "qwen2" else llama
    plain = family.spec(text.with_value("architectures", [_TEXTS[kind]]))
    return msgspec.structs.replace(plain, architecture=architecture)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, _PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    return named_sources(spec, LLAMA_NAMES, names, prefix=prefix, head=f"{head}lm_head")


def _text(config: ConfigJson) -> ConfigJson:
    """Return the keys of the text part, with what its class has for those that are missing."""
    mistral3 = architecture_of(config) == _MISTRAL3
    text = config.sub("text_config")
    if mistral3:
        text.refuse("model_type", "the text part must be a Mistral", unless=(None, "mistral", "ministral3"))
    text.refuse("model_type", f"the text part must be one of {', '.join(_TEXTS)}", unless=(None, *_TEXTS))
    text.refuse("quantization_config", "it belongs beside text_config, not into it")
    kind = text.text("model_type", default="mistral" if mistral3 else "llama")
    tied = config.flag("tie_word_embeddings", default=mistral3)
    if not mistral3 and not tied:
        tied = text.flag("tie_word_embeddings", default=False)
    return text.with_defaults({**_TEXT_DEFAULTS.get(kind, {}), "model_type": kind, "tie_word_embeddings": tied})


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    vision = config.sub("vision_config")
    pixtral = vision.text("model_type", default="pixtral") == "pixtral"
    if not pixtral:
        vision.refuse("model_type", "the image part must be that of CLIP or Pixtral", unless=("clip_vision_model",))
    return _pixtral(config, vision) if pixtral else _clip(config, vision)


def _clip(config: ConfigJson, vision: ConfigJson) -> TowerSpec:
    architecture = architecture_of(config)
    if architecture == _MISTRAL3:
        raise vision.mismatch("model_type", "the image part of Pixtral")
    vision = vision.with_defaults(_CLIP_DEFAULTS)
    image_size, patch_size = (vision.size(key, maximum=MAX_SIDE) for key in ("image_size", "patch_size"))
    if image_size % patch_size:
        raise vision.mismatch("patch_size", f"a divisor of image_size ({image_size})")
    hidden, heads = _hidden(vision)
    rows = (image_size // patch_size) ** 2 + 1
    plain = _encoder(vision, f"{architecture}, image part", hidden, heads, _depth(config, vision), rows)
    encoder = msgspec.structs.replace(
        plain,
        family="clip",
        norm="layer",
        norm_eps=vision.positive("layer_norm_eps", maximum=1.0, default=1e-5),
        activation=vision.choice("hidden_act", ACTIVATIONS, default="quick_gelu"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
    keeps_class = config.text("vision_feature_select_strategy", default="default") == "full"
    tilings: tuple[tuple[int, int], ...] = ()
    if architecture == _NEXT:
        config.refuse("vision_feature_select_strategy", "tiles must have no class", unless=(None, "default"))
        tilings = _tilings(config, image_size)
    else:
        config.refuse(
            "vision_feature_select_strategy", "'default' and 'full' are known", unless=(None, "default", "full")
        )
    own = (
        _extra("patch", _TOWERS, "embeddings.patch_embedding.weight", (hidden, 3, patch_size, patch_size)),
        _extra("class", _TOWERS, "embeddings.class_embedding", (hidden,)),
        _extra("positions", _TOWERS, "embeddings.position_embedding.weight", (rows, hidden)),
    )
    found = _tower(config, encoder, "project", own, _CLIP_NAMES, "encoder.layers", "embeddings.class_embedding")
    if architecture == _NEXT:
        line_end = TowerTensor("line_end", ("model.image_newline", "image_newline"), (found.width,))
        found = msgspec.structs.replace(found, extras=(*found.extras, line_end))
    return msgspec.structs.replace(
        found, image_size=image_size, patch_size=patch_size, keeps_class=keeps_class, tilings=tilings
    )


def _pixtral(config: ConfigJson, vision: ConfigJson) -> TowerSpec:
    architecture = architecture_of(config)
    if architecture == _NEXT:
        raise vision.error("model_type", "Expected the image part of CLIP.")
    mistral3 = architecture == _MISTRAL3
    vision = vision.with_defaults(_PIXTRAL_DEFAULTS)
    patch_size = vision.size("patch_size", maximum=MAX_SIDE, default=14 if mistral3 else 16)
    scale = config.size("spatial_merge_size", maximum=64, default=2) if mistral3 else 1
    if not mistral3:
        strategy = config.text("vision_feature_select_strategy", default="full")
        if strategy != "full":
            raise config.mismatch("vision_feature_select_strategy", "'full': the tower of Pixtral has no class")
    hidden, heads = _hidden(vision)
    size = hidden // heads
    if size % 4:
        raise vision.mismatch("num_attention_heads", f"a divisor of {hidden} into heads with a multiple of four dims")
    given = vision.optional_size("head_dim", maximum=MAX_HEAD_SIZE, default=size)
    if given != size:
        raise vision.mismatch("head_dim", f"{size}, which is hidden_size / num_attention_heads")
    plain = _encoder(vision, f"{architecture}, image part", hidden, heads, _depth(config, vision), 1 << 16)
    encoder = msgspec.structs.replace(
        plain,
        family="pixtral",
        norm="rms",
        norm_eps=1e-5,
        activation=vision.choice("hidden_act", ACTIVATIONS, default="gelu"),
        layers=tuple(LayerSpec() for _ in plain.layers),
        ropes=(_patch_rope(vision, size),),
    )
    own = [_extra("patch", _TOWERS, "patch_conv.weight", (hidden, 3, patch_size, patch_size))]
    if mistral3:
        merged = (hidden, hidden * scale**2)
        own.append(_extra("merge_norm", _PROJECTORS, "norm.weight", (hidden,)))
        own.append(_extra("square", _PROJECTORS, "patch_merger.merging_layer.weight", merged))
    found = _tower(config, encoder, "lines", tuple(own), _PIXTRAL_NAMES, "transformer.layers", "patch_conv.weight")
    eps = _text(config).positive("rms_norm_eps", maximum=1.0, default=1e-6)
    return msgspec.structs.replace(found, patch_size=patch_size, scale=scale, merge_eps=eps)


def _tower(
    config: ConfigJson,
    encoder: ModelSpec,
    connector: Connector,
    own: tuple[TowerTensor, ...],
    names: TensorNames,
    layer: str,
    probe: str,
) -> TowerSpec:
    """Return a tower with the two products of its projector, whose sizes of tiles and patches are not set yet."""
    mistral3 = architecture_of(config) == _MISTRAL3
    width = _text(config).size("hidden_size", maximum=MAX_HIDDEN)
    bias = config.flag("multimodal_projector_bias", default=not mistral3)
    key = next((key for key in ("image_token_index", "image_token_id") if config.has(key)), "image_token_index")
    image_token = config.size(key, maximum=MAX_VOCAB, minimum=0, default=10 if mistral3 else 32_000)
    products = [
        _extra("merge", _PROJECTORS, "linear_1.weight", (width, encoder.hidden_size)),
        _extra("projection", _PROJECTORS, "linear_2.weight", (width, width)),
    ]
    if bias:
        products.append(_extra("merge.bias", _PROJECTORS, "linear_1.bias", (width,)))
        products.append(_extra("projection.bias", _PROJECTORS, "linear_2.bias", (width,)))
    return TowerSpec(
        encoder=encoder,
        connector=connector,
        patch_size=1,
        scale=1,
        width=width,
        image_token=image_token,
        mark_token=image_token,
        opening=config.choice("projector_hidden_act", _OPENINGS, default="gelu"),
        names=names,
        prefixes=_TOWERS,
        layer=layer,
        probe=probe,
        extras=(*own, *products),
    )


def _extra(name: str, prefixes: tuple[str, ...], stem: str, shape: tuple[int, ...]) -> TowerTensor:
    return TowerTensor(name, tuple(f"{prefix}{stem}" for prefix in prefixes), shape)


def _hidden(vision: ConfigJson) -> tuple[int, int]:
    """Return the width of the tower and its heads."""
    hidden = vision.size("hidden_size", maximum=MAX_HIDDEN)
    heads = vision.size("num_attention_heads", maximum=MAX_HEADS)
    vision.size("num_channels", minimum=3, maximum=3, default=3)
    if hidden % heads:
        raise vision.mismatch("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    return hidden, heads


def _depth(config: ConfigJson, vision: ConfigJson) -> int:
    """Return the layers whose outcome becomes features: those up to `vision_feature_layer`."""
    layers = vision.size("num_hidden_layers", maximum=MAX_LAYERS)
    default = -1 if architecture_of(config) == _MISTRAL3 else -2
    given = config.values().get("vision_feature_layer", default)
    config.has("vision_feature_layer")
    if not isinstance(given, int) or isinstance(given, bool):
        raise config.mismatch("vision_feature_layer", "the number of one layer")
    depth = given if given >= 0 else layers + 1 + given
    if not 1 <= depth <= layers:
        raise config.mismatch("vision_feature_layer", f"a layer of the {layers} that the image part has")
    return depth


def _encoder(vision: ConfigJson, architecture: str, hidden: int, heads: int, depth: int, context: int) -> ModelSpec:
    return ModelSpec(
        family="clip",
        architecture=architecture,
        kind="encoder",
        causal=False,
        vocab_size=1,
        has_embedding=False,
        hidden_size=hidden,
        intermediate_size=vision.size("intermediate_size", maximum=MAX_INTERMEDIATE),
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        layers=(LayerSpec(rope=None),) * depth,
        context=context,
        norm_eps=1e-5,
        embedding_norm=True,
        final_norm=False,
        attention_scale=(hidden // heads) ** -0.5,
    )


def _patch_rope(vision: ConfigJson, size: int) -> RopeSpec:
    """Return the rope of patches: pairs turn by the row and by the column in turns, those of rows come first."""
    theta = vision.positive("rope_theta", default=10_000.0)
    parameters = vision.optional_sub("rope_parameters")
    if parameters is not None:
        parameters.refuse("rope_type", "patches turn by their rows and columns", unless=(None, "axial", "default"))
        theta = parameters.positive("rope_theta", default=theta)
    pairs = inverse_powers(theta, size)
    axes = (0,) * len(pairs[::2]) + (1,) * len(pairs[1::2])
    return RopeSpec(inv_freq=pairs[::2] + pairs[1::2], axes=axes)


def _tilings(config: ConfigJson, image_size: int) -> tuple[tuple[int, int], ...]:
    given = config.values().get("image_grid_pinpoints")
    if not config.has("image_grid_pinpoints"):
        given = [list(each) for each in _TILINGS]
    expected = f"at most {_MOST_TILINGS} pairs of multiples of image_size ({image_size}), at most {MAX_SIDE}"
    if not isinstance(given, list) or not 1 <= len(cast("list[object]", given)) <= _MOST_TILINGS:
        raise config.mismatch("image_grid_pinpoints", expected)
    found: list[tuple[int, int]] = []
    for pair in cast("list[object]", given):
        sides = cast("list[object]", pair) if isinstance(pair, list) else []
        whole = [side for side in sides if isinstance(side, int) and 0 < side <= MAX_SIDE and side % image_size == 0]
        if len(sides) != 2 or len(whole) != 2:
            raise config.mismatch("image_grid_pinpoints", expected)
        found.append((whole[0], whole[1]))
    return tuple(found)
