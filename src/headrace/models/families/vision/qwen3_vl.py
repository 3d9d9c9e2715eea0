"""Reads Qwen3-VL and Qwen3-VL-MoE: a Qwen3 whose ropes turn by places in images, and whose first layers add features
from the middle of the image part's tower (deepstack).
"""

from __future__ import annotations

import math

import msgspec

from headrace.models.config_json import MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_VOCAB, ConfigJson
from headrace.models.families import qwen
from headrace.models.families.decoder import (
    ACTIVATIONS,
    TensorNames,
    decoder_spec,
    expert_spec,
    find_prefix,
    head_size,
    layer_count,
    named_sources,
)
from headrace.models.families.family import TensorPart, TensorSources, architecture_of
from headrace.models.families.vision.qwen_vl import FRAMES, PREFIXES, TOWERS, patch_rope, placed_rope, text_part
from headrace.models.families.vision.vision_tower import MAX_SIDE, TowerSpec, TowerTensor
from headrace.models.spec import LayerSpec, ModelSpec

_DENSE, _MIXED = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
architectures: tuple[str, ...] = (_DENSE, _MIXED)
ignored: tuple[str, ...] = qwen.ignored

_MOST_STACKED = 16  # layers of the tower whose outcome is used
_NAMES: TensorNames = {
    "norm": ("merger.norm",),
    "attn.norm": ("norm1",),
    "attn.qkv": ("attn.qkv",),
    "attn.o": ("attn.proj",),
    "mlp.norm": ("norm2",),
    "mlp.up": ("mlp.linear_fc1",),
    "mlp.down": ("mlp.linear_fc2",),
}


def spec(config: ConfigJson) -> ModelSpec:
    read_tower(config)
    vision = config.sub("vision_config")
    stacked = _stacked(vision)
    architecture = architecture_of(config)
    text = text_part(config)
    mixed = architecture == _MIXED
    size = head_size(text, default=None if mixed else 128)
    layers = qwen.expert_layers(text) if mixed else (LayerSpec(),) * layer_count(text)
    if len(stacked) >= len(layers):
        raise vision.error(
            "deepstack_visual_indexes", f"Expected fewer than the {len(layers)} layers of the text part."
        )
    plain = decoder_spec(
        text,
        family="qwen_vl",
        architecture=architecture,
        layers=layers,
        ropes=(placed_rope(text, size, theta=500_000.0, sections=(24, 20, 20), interleaved=True),),
        head_size=size,
        norm_eps=1e-6,
        experts=expert_spec(text, size_key="moe_intermediate_size", normalise=True) if mixed else None,
    )
    text.refuse("norm_topk_prob", "the weights of chosen experts sum to one", unless=(None, True))
    bias = text.flag("attention_bias", default=False)
    return msgspec.structs.replace(plain, qk_norm="head", qkv_bias=bias, o_bias=bias, feature_layers=len(stacked))


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    found = dict(named_sources(spec, qwen.QWEN_NAMES, names, prefix=prefix, head=f"{head}lm_head"))
    for name, parts in found.items():
        if ".experts." in name and parts[0].name not in names:
            _, layer, _, _, expert, leaf = name.split(".")
            whole = f"{prefix}layers.{layer}.mlp.experts.{leaf}_proj"
            found[name] = (TensorPart(whole, int(expert), either_way=True),)  # published files have [inputs, outputs]
    return found


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    vision = config.sub("vision_config")
    patch_size = vision.size("patch_size", maximum=MAX_SIDE, default=16)
    scale = vision.size("spatial_merge_size", maximum=64, default=2)
    vision.refuse("temporal_patch_size", "an image must be two equal frames", unless=(None, FRAMES))
    vision.refuse("in_channels", "images have three channels", unless=(None, 3))
    hidden = vision.size("hidden_size", maximum=MAX_HIDDEN, default=1152)
    text_width = text_part(config).size("hidden_size", maximum=MAX_HIDDEN)
    width = vision.size("out_hidden_size", maximum=MAX_HIDDEN, default=3584)
    if width != text_width:
        raise vision.error("out_hidden_size", f"Features have {width} values, and the text part takes {text_width}.")
    places = vision.size("num_position_embeddings", maximum=MAX_SIDE**2, default=2304)
    if math.isqrt(places) ** 2 != places:
        raise vision.mismatch("num_position_embeddings", "the square of a number")
    stacked = _stacked(vision)
    image_token = config.size("image_token_id", maximum=MAX_VOCAB, minimum=0, default=151_655)
    merged = hidden * scale**2

    def extra(name: str, stem: str, shape: tuple[int, ...]) -> TowerTensor:
        return TowerTensor(name, tuple(f"{prefix}{stem}" for prefix in TOWERS), shape)

    def merger(name: str, stem: str) -> tuple[TowerTensor, ...]:
        return (
            extra(f"{name}merge", f"{stem}.linear_fc1.weight", (merged, merged)),
            extra(f"{name}merge.bias", f"{stem}.linear_fc1.bias", (merged,)),
            extra(f"{name}projection", f"{stem}.linear_fc2.weight", (width, merged)),
            extra(f"{name}projection.bias", f"{stem}.linear_fc2.bias", (width,)),
        )

    def stacked_merger(place: int) -> tuple[TowerTensor, ...]:
        name, stem = f"stacked.{place}.", f"deepstack_merger_list.{place}"
        return (
            extra(f"{name}norm", f"{stem}.norm.weight", (merged,)),
            extra(f"{name}norm.bias", f"{stem}.norm.bias", (merged,)),
            *merger(name, stem),
        )

    return TowerSpec(
        encoder=_encoder(vision, f"{architecture_of(config)}, image part", hidden, stacked),
        connector="merge",
        patch_size=patch_size,
        scale=scale,
        width=width * (1 + len(stacked)),
        image_token=image_token,
        mark_token=image_token,
        names=_NAMES,
        prefixes=TOWERS,
        layer="blocks",
        probe="patch_embed.proj.weight",
        extras=(
            extra("patch", "patch_embed.proj.weight", (hidden, 3, FRAMES, patch_size, patch_size)),
            extra("patch.bias", "patch_embed.proj.bias", (hidden,)),
            extra("positions", "pos_embed.weight", (places, hidden)),
            *merger("", "merger"),
            *(tensor for place in range(len(stacked)) for tensor in stacked_merger(place)),
        ),
    )


def _stacked(vision: ConfigJson) -> tuple[int, ...]:
    """Return the layers of the tower whose outcome the first layers of the text part add."""
    depth = vision.size("depth", maximum=MAX_LAYERS, default=27)
    given = vision.optional_sizes("deepstack_visual_indexes", minimum=0, maximum=MAX_LAYERS, max_items=_MOST_STACKED)
    stacked = (8, 16, 24) if given is None else given
    if list(stacked) != sorted(set(stacked)) or any(layer >= depth - 1 for layer in stacked):
        raise vision.mismatch("deepstack_visual_indexes", f"ascending layers below the last one ({depth - 1})")
    return stacked


def _encoder(vision: ConfigJson, architecture: str, hidden: int, stacked: tuple[int, ...]) -> ModelSpec:
    heads = vision.size("num_heads", maximum=MAX_HEADS, default=16)
    if hidden % heads or hidden // heads % 4:
        raise vision.mismatch("num_heads", f"a divisor of {hidden} into heads whose dims are a multiple of four")
    size = hidden // heads
    depth = vision.size("depth", maximum=MAX_LAYERS, default=27)
    return ModelSpec(
        family="qwen_vision",
        architecture=architecture,
        kind="encoder",
        causal=False,
        vocab_size=1,
        has_embedding=False,
        hidden_size=hidden,
        intermediate_size=vision.size("intermediate_size", maximum=MAX_INTERMEDIATE, default=4304),
        heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=tuple(LayerSpec(kept=layer in stacked) for layer in range(depth)),
        context=1 << 16,
        norm="layer",
        norm_eps=1e-6,
        activation=vision.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        ropes=(patch_rope(vision, size),),
        attention_scale=size**-0.5,
    )
