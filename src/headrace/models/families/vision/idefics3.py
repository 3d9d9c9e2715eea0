"""Reads Idefics3 and SmolVLM: a Llama that also reads images. The image part is in `models/vision`."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import MAX_HIDDEN, MAX_VOCAB, ConfigJson
from headrace.models.families import llama
from headrace.models.families.decoder import LLAMA_NAMES, find_prefix, named_sources
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.vision.vision_tower import (
    SIGLIP_NAMES,
    TowerSpec,
    TowerTensor,
    siglip_encoder,
    siglip_tensors,
)
from headrace.models.spec import ModelSpec

architectures: tuple[str, ...] = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
ignored: tuple[str, ...] = (
    *llama.ignored,
    # Of the text part: how older code of these models was configured.
    "perceiver_config",
    "pixel_shuffle_factor",
    "neftune_noise_alpha",
    "use_reentrant_checkpointing",
    # Of the image part: how its images were prepared, which preprocessor_config.json says.
    "size",
    "max_image_size",
    "use_base_siglip",
    "vocab_size",
)

_DEFAULTS = {
    "image_size": 224,
    "patch_size": 32,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
}
_TOWERS = ("model.vision_model.", "vision_model.")
_PROJECTIONS = ("model.connector.modality_projection.", "connector.modality_projection.")


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    encoder, image_size, patch_size = siglip_encoder(
        config.sub("vision_config"), architecture_of(config), defaults=_DEFAULTS
    )
    side = image_size // patch_size
    scale = config.size("scale_factor", maximum=64, default=2)
    if side % scale:
        raise config.mismatch("scale_factor", f"a divisor of the {side} patches of a side")
    width = config.sub("text_config").size("hidden_size", maximum=MAX_HIDDEN, default=4096)
    image_token = config.size("image_token_id", maximum=MAX_VOCAB, minimum=0, default=128_257)
    projection = TowerTensor(
        "projection",
        tuple(f"{prefix}proj.weight" for prefix in _PROJECTIONS),
        (width, encoder.hidden_size * scale**2),
    )
    return TowerSpec(
        encoder=encoder,
        connector="shuffle",
        image_size=image_size,
        patch_size=patch_size,
        scale=scale,
        width=width,
        image_token=image_token,
        mark_token=image_token,
        names=SIGLIP_NAMES,
        prefixes=_TOWERS,
        layer="encoder.layers",
        probe="embeddings.patch_embedding.weight",
        extras=(*siglip_tensors(_TOWERS, encoder, patch_size), projection),
    )


def spec(config: ConfigJson) -> ModelSpec:
    read_tower(config)
    architecture = architecture_of(config)
    tied = config.flag("tie_word_embeddings", default=False)
    text = config.sub("text_config").with_defaults({"tie_word_embeddings": tied})
    text.refuse("model_type", "the text part must be a Llama", unless=("llama",))
    text.refuse("quantization_config", "it belongs beside text_config, not into it")
    text.refuse("qk_layer_norms", "heads must not be normalised", unless=(False,))
    text.refuse("use_resampler", "image features must not be resampled", unless=(False,))
    plain = llama.spec(text.with_value("architectures", ["LlamaForCausalLM"]))
    return msgspec.structs.replace(plain, architecture=architecture, family="idefics3")


def sources(spec: ModelSpec, names: frozenset[str]) -> TensorSources:
    prefix = find_prefix(names, ("model.text_model.", "text_model."), "embed_tokens.weight")
    return named_sources(spec, LLAMA_NAMES, names, prefix=prefix)
