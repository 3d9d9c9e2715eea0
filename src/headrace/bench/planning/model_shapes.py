"""Finds the shape of a model to plan for: of files on this machine, or of a public model by its name.

A name needs no files: the shapes that `headrace make-model` knows, and a few larger ones by their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.model_folder import ModelFolder, find_model, local_model, open_model
from headrace.models.spec import ModelSpec
from headrace.models.synthetic.public_shapes import (
    SHAPE_NAMES,
    ConfigDict,
    decoder,
    find_shape,
    llama_3_2_1b,
    qwen2,
)


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> ConfigDict:
    sizes: dict[str, Any] = {
        "head_dim": hidden // heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    return llama_3_2_1b().config | sizes


# The sizes that the models' own config.json files state.
LARGE_SHAPES: Final[dict[str, ConfigDict]] = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128),
    "qwen2.5-14b": qwen2(5120, 13824, 48, 40, 8, vocab_size=152064),
    "qwen2.5-32b": qwen2(5120, 27648, 64, 40, 8, vocab_size=152064),
    "qwen2.5-72b": qwen2(8192, 29568, 80, 64, 8, vocab_size=152064),
    "mixtral-8x7b": decoder(
        "mixtral",
        "MixtralForCausalLM",
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        vocab_size=32000,
    ),
}
PLANNED_SHAPES: Final = (*(name for name in SHAPE_NAMES if name != "minilm-l6"), *LARGE_SHAPES)


class ModelShape(msgspec.Struct, frozen=True):
    name: str
    spec: ModelSpec
    folder: ModelFolder | None = None  # None: only the shape is known


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model folder, a GGUF file, a bundled or downloaded model, or a public model by name."""
    if name in PLANNED_SHAPES and local_model(name) is None:
        config = LARGE_SHAPES[name] if name in LARGE_SHAPES else find_shape(name).config
        return ModelShape(name, model_spec(ConfigJson(config, path=Path(name) / "config.json")))
    try:
        path = find_model(name)
    except RequestError as error:
        raise RequestError(
            f"{error} For a plan, a shape will do: {', '.join(PLANNED_SHAPES)}.", parameter="model"
        ) from None
    folder = open_model(path)
    if folder.spec.kind != "decoder":
        raise RequestError(
            f"{folder.spec.architecture} is an {folder.spec.kind}: it generates no text. Plan for a decoder.",
            parameter="model",
        )
    return ModelShape(name, folder.spec, folder)
