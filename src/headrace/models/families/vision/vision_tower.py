"""Describes the image part of a model: a vision tower as an encoder's ModelSpec, and how its features become tokens.

Reads config.json only. How an image becomes pixels is in `image_layout` and `pixels`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.models.config_json import MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_VOCAB, ConfigJson
from headrace.models.families.decoder import ACTIVATIONS, TensorNames, layer_count
from headrace.models.families.family import architecture_of
from headrace.models.spec import LayerSpec, ModelSpec

MAX_SIDE: Final = 4096  # pixels of a tile
ARCHITECTURES: Final = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")

# `embed` is the table of positions: a tower has no token embeddings, and a row begins with a patch and its position.
TOWER_NAMES: Final[TensorNames] = {
    "embed": ("embeddings.position_embedding",),
    "norm": ("post_layernorm",),
    "attn.norm": ("layer_norm1",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o": ("self_attn.out_proj",),
    "mlp.norm": ("layer_norm2",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}


class TowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A SigLIP tower over the patches of a square tile, and the projection of its features."""

    encoder: ModelSpec
    channels: int
    image_size: int  # pixels of a tile's side
    patch_size: int
    scale: int  # so many features of a side become one by a pixel shuffle
    width: int  # of a feature: the text part's hidden size
    image_token: int  # of the vocabulary

    @property
    def side(self) -> int:
        """Patches of a tile's side."""
        return self.image_size // self.patch_size

    @property
    def patch_values(self) -> int:
        return self.channels * self.patch_size**2

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.scale) ** 2

    @property
    def shuffled_size(self) -> int:
        """Inputs of the projection."""
        return self.encoder.hidden_size * self.scale**2


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    vision = config.sub("vision_config")
    image_size = vision.size("image_size", maximum=MAX_SIDE, default=224)
    patch_size = vision.size("patch_size", maximum=MAX_SIDE, default=32)
    hidden = vision.size("hidden_size", maximum=MAX_HIDDEN, default=1152)
    heads = vision.size("num_attention_heads", maximum=MAX_HEADS, default=16)
    if image_size % patch_size:
        raise vision.mismatch("patch_size", f"a divisor of image_size ({image_size})")
    if hidden % heads:
        raise vision.mismatch("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    side = image_size // patch_size
    scale = config.size("scale_factor", maximum=64, default=2)
    if side % scale:
        raise config.mismatch("scale_factor", f"a divisor of the {side} patches of a side")
    encoder = ModelSpec(
        family="siglip",
        architecture=f"{architecture_of(config)}, image part",
        kind="encoder",
        causal=False,
        vocab_size=side * side,
        hidden_size=hidden,
        intermediate_size=vision.size("intermediate_size", maximum=MAX_INTERMEDIATE, default=3072),
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        layers=(LayerSpec(rope=None),) * layer_count(vision.with_defaults({"num_hidden_layers": 12})),
        context=side * side,
        norm="layer",
        norm_eps=vision.positive("layer_norm_eps", maximum=1.0, default=1e-6),
        activation=vision.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=(hidden // heads) ** -0.5,
    )
    return TowerSpec(
        encoder=encoder,
        channels=vision.size("num_channels", minimum=3, maximum=3, default=3),
        image_size=image_size,
        patch_size=patch_size,
        scale=scale,
        width=config.sub("text_config").size("hidden_size", maximum=MAX_HIDDEN, default=4096),
        image_token=config.size("image_token_id", maximum=MAX_VOCAB, minimum=0, default=128_257),
    )
