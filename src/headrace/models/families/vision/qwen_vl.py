"""Reads Qwen2-VL and Qwen2.5-VL: a Qwen2 whose ropes turn by places in images, and a tower for images of any size.

The tower of Qwen2.5-VL has windows in most layers, RMS norms and gates; that of Qwen2-VL has neither.
"""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_VOCAB, ConfigJson
from headrace.models.families import qwen
from headrace.models.families.decoder import (
    ACTIVATIONS,
    LLAMA_NAMES,
    TensorNames,
    decoder_spec,
    find_prefix,
    head_size,
    named_sources,
)
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.vision.vision_tower import MAX_SIDE, TowerSpec, TowerTensor
from headrace.models.rope import KINDS, inverse_powers, read_rope
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec

_QWEN2, _QWEN25 = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
architectures: tuple[str, ...] = (_QWEN2, _QWEN25)
ignored: tuple[str, ...] = (
    *qwen.ignored,
    # Of videos, which Headrace does not read, and of the image part's own copies of other keys.
    "tokens_per_second",
    "spatial_patch_size",
)

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
TOWERS = ("visual.", "model.visual.")
_NAMES: TensorNames = {
    "norm": ("merger.ln_q",),
    "attn.norm": ("norm1",),
    "attn.qkv": ("attn.qkv",),
    "attn.o": ("attn.proj",),
    "mlp.norm": ("norm2",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.down_proj",),
}
FRAMES = 2  # of a video that one patch spans; an image is two equal frames


def spec(config: ConfigJson) -> ModelSpec:
    read_tower(config)
    architecture = architecture_of(config)
    text = text_part(config)
    size = head_size(text)
    plain = decoder_spec(
        text,
        family="qwen_vl",
        architecture=architecture,
        layers=qwen.dense_layers(text),
        ropes=(placed_rope(text, size),),
        head_size=size,
        norm_eps=1e-5,
    )
    return msgspec.structs.replace(plain, qkv_bias=True)


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, PREFIXES, "embed_tokens.weight")
    head = find_prefix(names, ("", "language_model."), "lm_head.weight")
    return named_sources(spec, LLAMA_NAMES, names, prefix=prefix, head=f"{head}lm_head")


def text_part(config: ConfigJson) -> ConfigJson:
    """Return the keys of the text part. Older files have them beside vision_config."""
    if not config.has("text_config"):
        return config
    tied = config.flag("tie_word_embeddings", default=False)
    text = config.sub("text_config").with_defaults({"tie_word_embeddings": tied})
    text.refuse("quantization_config", "it belongs beside text_config, not into it")
    return text


def placed_rope(
    text: ConfigJson,
    size: int,
    *,
    theta: float = 1_000_000.0,
    sections: tuple[int, ...] = (16, 24, 24),
    interleaved: bool = False,
) -> RopeSpec:
    """Return a rope whose pairs turn by time, by row and by column: so many each, as `sections` says by default. They
    follow each other, or take turns."""
    rope = read_rope(text, size, default_theta=theta, kinds={**KINDS, "mrope": "default"})
    key = "rope_scaling" if text.optional_sub("rope_scaling") is not None else "rope_parameters"
    parameters = text.optional_sub(key)
    pairs = len(rope.inv_freq)
    if parameters is not None:
        sections = parameters.optional_sizes("mrope_section", minimum=0, maximum=pairs, max_items=3) or sections
    if len(sections) != 3 or sum(sections) != pairs:
        raise (parameters or text).error(
            "mrope_section", f"Expected three numbers with the sum {pairs}, half of a head's dims."
        )
    if parameters is not None:
        order = "take turns" if interleaved else "follow each other"
        parameters.refuse("mrope_interleaved", f"pairs must {order}", unless=(None, interleaved))
    return msgspec.structs.replace(rope, axes=rope_axes(sections, interleaved=interleaved))


def rope_axes(sections: tuple[int, ...], *, interleaved: bool) -> tuple[int, ...]:
    """Return by pair whether it turns by time, by row or by column, of which there are so many each."""
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    pairs = sum(sections)
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    vision = config.sub("vision_config")
    newer = architecture_of(config) == _QWEN25
    patch_size = vision.size("patch_size", maximum=MAX_SIDE, default=14)
    scale = vision.size("spatial_merge_size", maximum=64, default=2)
    vision.refuse("temporal_patch_size", "an image must be two equal frames", unless=(None, FRAMES))
    for key in ("in_channels", "in_chans"):
        vision.refuse(key, "images have three channels", unless=(None, 3))
    window = 0
    layers = (LayerSpec(),) * vision.size("depth", maximum=MAX_LAYERS, default=32)
    if newer:
        pixels = vision.size("window_size", maximum=MAX_SIDE, default=112)
        window = pixels // scale // patch_size * scale
        if window < scale:
            raise vision.mismatch("window_size", f"at least one square of {scale} patches ({scale * patch_size})")
        given = vision.optional_sizes("fullatt_block_indexes", minimum=0, maximum=MAX_LAYERS, max_items=MAX_LAYERS)
        full = frozenset((7, 15, 23, 31) if given is None else given)
        layers = tuple(LayerSpec(spans=index not in full) for index in range(len(layers)))
    hidden = (
        vision.size("hidden_size", maximum=MAX_HIDDEN, default=3584)
        if newer
        else vision.size("embed_dim", maximum=MAX_HIDDEN, default=1280)
    )
    text_width = text_part(config).size("hidden_size", maximum=MAX_HIDDEN)
    width = vision.size("out_hidden_size" if newer else "hidden_size", maximum=MAX_HIDDEN, default=3584)
    if width != text_width:
        raise vision.error("hidden_size", f"Features have {width} values, and the text part takes {text_width}.")
    encoder = _encoder(vision, f"{architecture_of(config)}, image part", hidden, layers, gated=newer)
    image_token = config.size("image_token_id", maximum=MAX_VOCAB, minimum=0, default=151_655)
    merged = hidden * scale**2

    def extra(name: str, stem: str, shape: tuple[int, ...]) -> TowerTensor:
        return TowerTensor(name, tuple(f"{prefix}{stem}" for prefix in TOWERS), shape)

    return TowerSpec(
        encoder=encoder,
        connector="merge",
        patch_size=patch_size,
        scale=scale,
        width=width,
        window=window,
        image_token=image_token,
        mark_token=image_token,
        names=_NAMES if newer else {**_NAMES, "mlp.down": ("mlp.fc2",)},
        prefixes=TOWERS,
        layer="blocks",
        probe="patch_embed.proj.weight",
        extras=(
            extra("patch", "patch_embed.proj.weight", (hidden, 3, FRAMES, patch_size, patch_size)),
            extra("merge", "merger.mlp.0.weight", (merged, merged)),
            extra("merge.bias", "merger.mlp.0.bias", (merged,)),
            extra("projection", "merger.mlp.2.weight", (width, merged)),
            extra("projection.bias", "merger.mlp.2.bias", (width,)),
        ),
    )


def _encoder(
    vision: ConfigJson, architecture: str, hidden: int, layers: tuple[LayerSpec, ...], *, gated: bool
) -> ModelSpec:
    heads = vision.size("num_heads", maximum=MAX_HEADS, default=16)
    if hidden % heads or hidden // heads % 4:
        raise vision.mismatch("num_heads", f"a divisor of {hidden} into heads whose dims are a multiple of four")
    size = hidden // heads
    inner = (
        vision.size("intermediate_size", maximum=MAX_INTERMEDIATE, default=3420)
        if gated
        else int(hidden * vision.positive("mlp_ratio", maximum=64.0, default=4.0))
    )
    return ModelSpec(
        family="qwen_vision",
        architecture=architecture,
        kind="encoder",
        causal=False,
        vocab_size=1,
        has_embedding=False,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=layers,
        context=1 << 16,
        norm="rms" if gated else "layer",
        norm_eps=1e-6,
        activation=vision.choice("hidden_act", ACTIVATIONS, default="silu" if gated else "quick_gelu"),
        gated=gated,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        ropes=(patch_rope(vision, size),),
        attention_scale=size**-0.5,
    )


def patch_rope(vision: ConfigJson, size: int) -> RopeSpec:
    """Return the rope of patches: half of a head's pairs turn by the row, the other half by the column."""
    parameters = vision.optional_sub("rope_parameters")
    theta = 10_000.0
    if parameters is not None:
        parameters.refuse("rope_type", "patches turn by their rows and columns", unless=(None, "axial", "default"))
        theta = parameters.positive("rope_theta", default=theta)
    quarter = inverse_powers(theta, size // 2)
    return RopeSpec(inv_freq=quarter * 2, axes=(0,) * len(quarter) + (1,) * len(quarter))
