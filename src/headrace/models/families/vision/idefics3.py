"""Reads Idefics3 and SmolVLM: a Llama that also reads images. The image part is in `models/vision`."""

from __future__ import annotations

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.families import llama
from headrace.models.families.decoder import LLAMA_NAMES, find_prefix, named_sources
from headrace.models.families.family import TensorSources, architecture_of
from headrace.models.families.vision.vision_tower import read_tower
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
