"""Lists the image parts of GGUF files that Headrace reads, by the names of their projectors, and says what their keys
mean in the words of config.json and preprocessor_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace.models.config_json import MAX_HIDDEN, MAX_LAYERS, ConfigJson
from headrace.models.families.decoder import TensorNames
from headrace.models.families.vision.vision_tower import MAX_SIDE
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.gguf.gguf_keys import GgufKeys

_SCALE: Final = "projector.scale_factor"
_MERGE: Final = "spatial_merge_size"
_MAX_EDGE: Final = 1 << 20  # pixels; the layout has a bound of its own
# Names in vision_config -> names in a file.
_SIGLIP: Final[Mapping[str, str]] = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_QWEN: Final[Mapping[str, str]] = {
    "patch_size": "patch_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "depth": "block_count",
    "num_heads": "attention.head_count",
    "spatial_merge_size": _MERGE,
}
_PIXTRAL: Final = {key: name for key, name in _SIGLIP.items() if key != "layer_norm_eps"}

NAMES: Final[TensorNames] = {
    "embed": ("position_embd",),
    "norm": ("post_ln",),
    "attn.norm": ("ln1",),
    "attn.qkv": ("attn_q", "attn_k", "attn_v"),
    "attn.o": ("attn_out",),
    "mlp.norm": ("ln2",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"),
    "mlp.up": ("ffn_up",),
    "mlp.down": ("ffn_down",),
}
_PATCHES: Final = {"patch": "v.patch_embd.weight", "patch.bias": "v.patch_embd.bias"}
_POSITIONS: Final = {"positions": "v.position_embd.weight"}
_FRAMES: Final = {"patch": "v.patch_embd.frames", "patch.bias": "v.patch_embd.bias"}


class Projector(msgspec.Struct, frozen=True):
    """What a projector's name in a file means for us."""

    texts: tuple[str, ...]  # architectures of the text part's file
    name: str  # the Hugging Face class
    tokens: Mapping[str, str]  # names in config.json -> tokens of the text part
    config: Callable[[GgufKeys, GgufFile], dict[str, Any]]  # values of config.json
    preparation: Callable[[GgufKeys], dict[str, Any]]  # values of preprocessor_config.json
    activations: tuple[str, ...]  # what the file may say of the tower's, beside `clip.`; "": nothing
    extras: Callable[[GgufKeys], dict[str, str]]  # our tensors beside the encoder's -> names in the file
    added: Mapping[str, float] = {}  # what converters add to our tensors
    names: TensorNames = {}  # of the encoder, beside the common ones
    pairs: bool = False  # rows of q and k are in the pairs that the rope rotates


def _idefics3(keys: GgufKeys, text: GgufFile) -> dict[str, Any]:
    return {"vision_config": _named(keys, _SIGLIP), "scale_factor": _size(keys, _SCALE, default=2)}


def _gemma3(keys: GgufKeys, text: GgufFile) -> dict[str, Any]:
    vision = _named(keys, _SIGLIP)
    side = _size(keys, "image_size") // _size(keys, "patch_size")
    return {"vision_config": vision, "mm_tokens_per_image": (side // _size(keys, _SCALE, default=4)) ** 2}


def _splitting(keys: GgufKeys) -> dict[str, Any]:
    side = _size(keys, "image_size")
    longest = _size(keys, "preproc_image_size", maximum=_MAX_EDGE, default=side)
    return {
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": longest},
        "do_image_splitting": longest > side,
    }


def _square(keys: GgufKeys) -> dict[str, Any]:
    side = _size(keys, "image_size")
    return {"size": {"height": side, "width": side}}


def _qwen2(keys: GgufKeys, text: GgufFile) -> dict[str, Any]:
    vision = _named(keys, _QWEN)
    hidden = _size(keys, "embedding_length", maximum=MAX_HIDDEN)
    up = keys.file.tensors.get("v.blk.0.ffn_up.weight")
    # The key of the inner size has another number, and early converters exchanged the names of the products.
    inner = max(up.shape) if up is not None else 4 * hidden
    return {
        "vision_config": {
            **{key: value for key, value in vision.items() if key != "intermediate_size"},
            "embed_dim": hidden,
            "hidden_size": _text_width(text),
            "mlp_ratio": (inner + 0.5) / hidden,  # the family rounds down
        }
    }


def _qwen25(keys: GgufKeys, text: GgufFile) -> dict[str, Any]:
    vision = _named(keys, _QWEN)
    period = _size(keys, "n_wa_pattern", maximum=MAX_LAYERS)
    layers = _size(keys, "block_count", maximum=MAX_LAYERS)
    return {
        "vision_config": {
            **vision,
            "out_hidden_size": _text_width(text),
            "fullatt_block_indexes": list(range(period - 1, layers, period)),
            "window_size": _size(keys, "window_size", default=112),
        }
    }


def _qwen3(keys: GgufKeys, text: GgufFile) -> dict[str, Any]:
    side = _size(keys, "image_size") // _size(keys, "patch_size")
    return {
        "vision_config": {
            **_named(keys, _QWEN),
            "out_hidden_size": _text_width(text),
            "num_position_embeddings": side * side,
            "deepstack_visual_indexes": _stacked(keys),
        }
    }


def _pixtral(keys: GgufKeys, text: GgufFile) -> dict[str, Any]:
    merges = keys.get(_MERGE) is not None
    eps = text.metadata.get(f"{text.metadata.get('general.architecture')}.attention.layer_norm_rms_epsilon")
    values: dict[str, Any] = {
        "architectures": ["Mistral3ForConditionalGeneration" if merges else "LlavaForConditionalGeneration"],
        "vision_config": {
            **_named(keys, _PIXTRAL),
            "model_type": "pixtral",
            "hidden_act": "silu" if keys.file.metadata.get("clip.use_silu") is True else "gelu",
        },
        "text_config": {"model_type": "mistral", "hidden_size": _text_width(text), "rms_norm_eps": eps},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": "mm.1.bias" in keys.file.tensors,
    }
    return values | ({"spatial_merge_size": keys.get(_MERGE)} if merges else {})


def _patches(least: int, most: int) -> Callable[[GgufKeys], dict[str, Any]]:
    """Return how the images of Qwen-VL are prepared, whose files may lack the bounds of their pixels."""

    def preparation(keys: GgufKeys) -> dict[str, Any]:
        return {
            "patch_size": keys.get("patch_size"),
            "min_pixels": keys.get("image_min_pixels", least),
            "max_pixels": keys.get("image_max_pixels", most),
        }

    return preparation


def _lines(keys: GgufKeys) -> dict[str, Any]:
    return {"size": {"longest_edge": keys.get("image_size")}}


def _stacked(keys: GgufKeys) -> list[int]:
    return [layer for layer, kept in enumerate(keys.items("is_deepstack_layers")) if kept]


def _fixed(*tables: Mapping[str, str]) -> Callable[[GgufKeys], dict[str, str]]:
    return lambda keys: {ours: name for table in tables for ours, name in table.items()}


def _merger(first: str, second: str, stem: str = "") -> dict[str, str]:
    return {
        f"{stem}{name}{ours_end}": f"{prefix}.{end}"
        for name, prefix in (("merge", first), ("projection", second))
        for ours_end, end in (("", "weight"), (".bias", "bias"))
    }


def _qwen3_extras(keys: GgufKeys) -> dict[str, str]:
    found = {**_FRAMES, **_POSITIONS, **_merger("mm.0", "mm.2")}
    for place, layer in enumerate(_stacked(keys)):
        stem = f"v.deepstack.{layer}"
        found |= {f"stacked.{place}.norm": f"{stem}.norm.weight", f"stacked.{place}.norm.bias": f"{stem}.norm.bias"}
        found |= _merger(f"{stem}.fc1", f"{stem}.fc2", f"stacked.{place}.")
    return found


def _named(keys: GgufKeys, table: Mapping[str, str]) -> dict[str, Any]:
    """Return values of vision_config. Keys that the tower needs must be there."""
    keys.require(*(name for name in table.values() if name != _MERGE))
    for ours, name in table.items():
        keys.spell(f"vision_config.{ours}", f"{keys.name}.{name}")
    return {ours: value for ours, name in table.items() if (value := keys.get(name)) is not None}


def _size(keys: GgufKeys, name: str, *, maximum: int = MAX_SIDE, default: int | None = None) -> int:
    values = {name: value} if (value := keys.get(name)) is not None else {}
    return ConfigJson(values, path=keys.file.path, prefix=f"{keys.name}.").size(name, maximum=maximum, default=default)


def _text_width(text: GgufFile) -> object:
    return text.metadata.get(f"{text.metadata.get('general.architecture')}.embedding_length")


PROJECTORS: Final[Mapping[str, Projector]] = {
    "idefics3": Projector(
        ("llama",),
        "Idefics3ForConditionalGeneration",
        {"image_token_id": "<image>"},
        _idefics3,
        _splitting,
        ("use_gelu", ""),
        _fixed(_PATCHES, _POSITIONS, {"projection": "mm.model.fc.weight"}),
    ),
    "gemma3": Projector(
        ("gemma3",),
        "Gemma3ForConditionalGeneration",
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        _gemma3,
        _square,
        ("use_gelu", ""),
        _fixed(_PATCHES, _POSITIONS, {"projection": "mm.input_projection.weight", "norm": "mm.soft_emb_norm.weight"}),
        {"norm": 1.0},
    ),
    "qwen2vl_merger": Projector(
        ("qwen2vl",),
        "Qwen2VLForConditionalGeneration",
        {"image_token_id": "<|image_pad|>"},
        _qwen2,
        _patches(56 * 56, 28 * 28 * 16_384),
        ("",),
        _fixed(_FRAMES, _merger("mm.0", "mm.2")),
    ),
    "qwen2.5vl_merger": Projector(
        ("qwen2vl",),
        "Qwen2_5_VLForConditionalGeneration",
        {"image_token_id": "<|image_pad|>"},
        _qwen25,
        _patches(56 * 56, 28 * 28 * 16_384),
        ("use_silu",),
        _fixed(_FRAMES, _merger("mm.0", "mm.2")),
    ),
    "qwen3vl_merger": Projector(
        ("qwen3vl", "qwen3vlmoe"),
        "Qwen3VLForConditionalGeneration",
        {"image_token_id": "<|image_pad|>"},
        _qwen3,
        _patches(256 * 256, 4096 * 4096),
        ("use_gelu",),
        _qwen3_extras,
    ),
    "pixtral": Projector(
        ("llama", "mistral3"),
        "LlavaForConditionalGeneration",
        {"image_token_index": "[IMG]"},
        _pixtral,
        _lines,
        ("use_silu", "use_gelu"),
        _fixed(
            {"patch": "v.patch_embd.weight", "merge_norm": "mm.input_norm.weight", "square": "mm.patch_merger.weight"},
            _merger("mm.1", "mm.2"),
        ),
        names={"embed_norm": ("pre_ln",)},
        pairs=True,
    ),
}
