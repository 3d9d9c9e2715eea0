"""Describes the image part of a model: a vision tower as an encoder's ModelSpec, and how its features become tokens.

Reads config.json only. How an image becomes pixels is in `models/vision`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from headrace.models.config_json import MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, ConfigJson
from headrace.models.families.decoder import ACTIVATIONS, TensorNames, layer_count
from headrace.models.spec import LayerSpec, ModelSpec

MAX_SIDE: Final = 4096  # pixels of a tile

# `embed` is the table of positions: a tower has no token embeddings, and a row begins with a patch and its position.
SIGLIP_NAMES: Final[TensorNames] = {
    "embed": ("embeddings.position_embedding",),
    "norm": ("post_layernorm",),
    "attn.norm": ("layer_norm1",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o": ("self_attn.out_proj",),
    "mlp.norm": ("layer_norm2",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}

# What becomes of a tower's features: squares of them side by side and projected (Idefics3), their means normalised and
# projected (Gemma 3), squares side by side through two products (Qwen-VL), the same with line ends in the prompt after
# each row (Pixtral), or each of them through two products, without a tile's class (CLIP in LLaVA).
Connector = Literal["shuffle", "pool", "merge", "lines", "project"]


class TowerTensor(msgspec.Struct, frozen=True):
    """A tensor of the image part that the encoder's spec does not have."""

    name: str  # ours
    files: tuple[str, ...]  # names that the files may use
    shape: tuple[int, ...]
    added: float = 0.0  # to what is meant, in the files

    @property
    def is_product(self) -> bool:
        """Whether it takes the precision of the tower's products: a product of features, after the tower."""
        return self.name.rpartition(".")[2] in ("merge", "projection", "square")


class TowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tower over the patches of an image, and the connector of its features with the text part."""

    encoder: ModelSpec
    connector: Connector
    channels: int = 3
    image_size: int = 0  # pixels of a tile's side; 0: images have any size
    patch_size: int
    scale: int  # so many features of a side become one
    width: int  # of a feature: the text part's hidden size
    window: int = 0  # patches of a side that see each other in layers with spans; 0: there are none
    image_token: int  # of the vocabulary: features take its place
    mark_token: int  # what the chat template writes for an image
    end_token: int | None = None  # comes after an image, if the template does not write it
    keeps_class: bool = False  # a tile's features begin with that of the tile as a whole
    tilings: tuple[tuple[int, int], ...] = ()  # heights and widths in pixels that an image may be laid out in
    merge_eps: float = 1e-5  # of the norm before squares of patches become one
    opening: Literal["gelu", "gelu_tanh", "silu"] = "gelu"  # between the two products of "lines" and "project"

    names: TensorNames
    prefixes: tuple[str, ...]  # of the tower's names in the files
    layer: str  # before the number of a layer
    probe: str  # a name by which the prefix is found
    extras: tuple[TowerTensor, ...]

    @property
    def side(self) -> int:
        """Patches of a tile's side."""
        return self.image_size // self.patch_size

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.scale) ** 2 + self.keeps_class


def siglip_encoder(vision: ConfigJson, architecture: str, *, defaults: dict[str, int]) -> tuple[ModelSpec, int, int]:
    """Read a SigLIP tower. Return its spec, the pixels of a tile's side and those of a patch's."""
    vision = vision.with_defaults(defaults)
    image_size = vision.size("image_size", maximum=MAX_SIDE)
    patch_size = vision.size("patch_size", maximum=MAX_SIDE)
    hidden = vision.size("hidden_size", maximum=MAX_HIDDEN)
    heads = vision.size("num_attention_heads", maximum=MAX_HEADS)
    vision.size("num_channels", minimum=3, maximum=3, default=3)
    if image_size % patch_size:
        raise vision.mismatch("patch_size", f"a divisor of image_size ({image_size})")
    if hidden % heads:
        raise vision.mismatch("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    side = image_size // patch_size
    encoder = ModelSpec(
        family="siglip",
        architecture=f"{architecture}, image part",
        kind="encoder",
        causal=False,
        vocab_size=side * side,
        hidden_size=hidden,
        intermediate_size=vision.size("intermediate_size", maximum=MAX_INTERMEDIATE),
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        layers=(LayerSpec(rope=None),) * layer_count(vision),
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
    return encoder, image_size, patch_size


def siglip_tensors(prefixes: tuple[str, ...], encoder: ModelSpec, patch_size: int) -> tuple[TowerTensor, ...]:
    """Return the patch embedding and the table of positions."""
    hidden = encoder.hidden_size

    def named(stem: str) -> tuple[str, ...]:
        return tuple(f"{prefix}embeddings.{stem}" for prefix in prefixes)

    return (
        TowerTensor("patch", named("patch_embedding.weight"), (hidden, 3, patch_size, patch_size)),
        TowerTensor("patch.bias", named("patch_embedding.bias"), (hidden,)),
        TowerTensor("positions", named("position_embedding.weight"), (encoder.vocab_size, hidden)),
    )
