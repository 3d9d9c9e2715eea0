"""Reads the image part of a Gemma 3: a SigLIP tower whose features are averaged to a fixed number of tokens."""

from __future__ import annotations

import math

from headrace.models.config_json import MAX_HIDDEN, MAX_VOCAB, ConfigJson
from headrace.models.families.family import architecture_of
from headrace.models.families.vision.vision_tower import (
    MAX_SIDE,
    SIGLIP_NAMES,
    TowerSpec,
    TowerTensor,
    siglip_encoder,
    siglip_tensors,
)

ARCHITECTURE = "Gemma3ForConditionalGeneration"
# Keys of the image part that change nothing here: the tower's own head is not used.
IGNORED: tuple[str, ...] = ("vision_use_head", "projection_dim", "num_image_tokens", "num_positions")

_DEFAULTS = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
}
_TOWERS = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_PROJECTORS = ("multi_modal_projector.", "model.multi_modal_projector.")


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    vision = config.sub("vision_config")
    vision.refuse("model_type", "the image part must be a SigLIP", unless=(None, "siglip_vision_model"))
    encoder, image_size, patch_size = siglip_encoder(vision, architecture_of(config), defaults=_DEFAULTS)
    side = image_size // patch_size
    tokens = config.size("mm_tokens_per_image", maximum=MAX_SIDE, default=256)
    root = math.isqrt(tokens)
    if root * root != tokens or side % root:
        raise config.mismatch("mm_tokens_per_image", f"the square of a divisor of the {side} patches of a side")
    width = config.sub("text_config").size("hidden_size", maximum=MAX_HIDDEN, default=2304)
    hidden = encoder.hidden_size
    return TowerSpec(
        encoder=encoder,
        connector="pool",
        image_size=image_size,
        patch_size=patch_size,
        scale=side // root,
        width=width,
        image_token=_token(config, ("image_token_index", "image_token_id"), 262_144),
        mark_token=_token(config, ("boi_token_index",), 255_999),
        end_token=_token(config, ("eoi_token_index",), 256_000),
        names=SIGLIP_NAMES,
        prefixes=_TOWERS,
        layer="encoder.layers",
        probe="embeddings.patch_embedding.weight",
        extras=(
            *siglip_tensors(_TOWERS, encoder, patch_size),
            TowerTensor("norm", tuple(f"{prefix}mm_soft_emb_norm.weight" for prefix in _PROJECTORS), (hidden,)),
            TowerTensor(
                "projection", tuple(f"{prefix}mm_input_projection_weight" for prefix in _PROJECTORS), (hidden, width)
            ),
        ),
    )


def _token(config: ConfigJson, keys: tuple[str, ...], default: int) -> int:
    key = next((key for key in keys if config.has(key)), keys[0])
    return config.size(key, maximum=MAX_VOCAB, minimum=0, default=default)
