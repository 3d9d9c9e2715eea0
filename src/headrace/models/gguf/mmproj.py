"""Reads the image part of a GGUF model: a second file beside it ("mmproj"), as llama.cpp's converters write it.

Its keys are given their names in config.json and preprocessor_config.json, so that the readers of those read them. Keys
that Headrace does not know are rejected, because they may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson, shorten
from headrace.models.families.decoder import TensorNames
from headrace.models.families.vision.towers import read_tower
from headrace.models.families.vision.vision_tower import MAX_SIDE, TowerSpec, TowerTensor
from headrace.models.formats.gguf_file import GgufFile

_VISION: Final = "clip.vision."
_SCALE: Final = "projector.scale_factor"
_MAX_EDGE: Final = 1 << 20  # pixels; the layout has a bound of its own
# Names in vision_config -> names in a file.
_KEYS: Final[Mapping[str, str]] = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_OTHERS: Final = frozenset(
    "projection_dim image_mean image_std preproc_image_size projector.scale_factor projector_type".split()
)
# Of clip itself; its activation is that of the towers below.
_CLIP: Final = frozenset("clip.projector_type clip.has_vision_encoder clip.use_gelu".split())

_NAMES: Final[TensorNames] = {
    "embed": ("position_embd",),
    "norm": ("post_ln",),
    "attn.norm": ("ln1",),
    "attn.qkv": ("attn_q", "attn_k", "attn_v"),
    "attn.o": ("attn_out",),
    "mlp.norm": ("ln2",),
    "mlp.up": ("ffn_up",),
    "mlp.down": ("ffn_down",),
}
_EXTRAS: Final[Mapping[str, str]] = {
    "patch": "v.patch_embd.weight",
    "patch.bias": "v.patch_embd.bias",
    "positions": "v.position_embd.weight",
}


class Projector(msgspec.Struct, frozen=True):
    """What a projector's name in a file means for us."""

    text: str  # architecture of the text part's file
    name: str  # the Hugging Face class
    tokens: Mapping[str, str]  # names in config.json -> tokens of the text part
    extras: Mapping[str, str]  # our tensors -> names in the file
    added: Mapping[str, float] = {}  # what converters add to our tensors


_PROJECTORS: Final[Mapping[str, Projector]] = {
    "idefics3": Projector(
        "llama",
        "Idefics3ForConditionalGeneration",
        {"image_token_id": "<image>"},
        {"projection": "mm.model.fc.weight"},
    ),
    "gemma3": Projector(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        {"projection": "mm.input_projection.weight", "norm": "mm.soft_emb_norm.weight"},
        {"norm": 1.0},
    ),
}


class Mmproj(NamedTuple):
    """An image part: its file, its tower with the file's names, and how images are prepared, in the words of
    preprocessor_config.json."""

    file: GgufFile
    tower: TowerSpec
    preparation: ConfigJson


def find_mmproj(path: Path) -> Path | None:
    """Return the file of a GGUF model's image part: the only one in its folder with "mmproj" in its name. None if there
    is none; ModelError if there are several."""
    if not path.is_file():
        return None
    found = [each for each in sorted(path.parent.glob("*mmproj*.gguf")) if each.name != path.name]
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:4])
        raise ModelError(f"The folder has several image parts: {names}. Keep the one of this model.", path=path.parent)
    return found[0] if found else None


def has_mmproj(path: Path) -> bool:
    """Return whether a GGUF model has a file beside it that may be its image part."""
    try:
        return find_mmproj(path) is not None
    except ModelError:
        return True  # who opens it is told that there are several


def image_span(path: Path, text: GgufFile) -> int:
    """Return how many tokens of an image see each other, whatever their order: those of Gemma 3. 0 if the image part
    cannot be read."""
    try:
        found = find_mmproj(path)
        tower = None if found is None else read_mmproj(found, text).tower
    except ModelError:
        return 0  # the server says why when it opens the image part, and serves text
    return tower.tile_tokens if tower is not None and tower.connector == "pool" else 0


def read_mmproj(path: Path, text: GgufFile) -> Mmproj:
    """Read the image part in a file. `text` is the file of the text part. ModelError for one that Headrace does not
    compute exactly."""
    file = GgufFile.open(path)
    if file.metadata.get("general.architecture") != "clip":
        raise _error(file, "general.architecture", "Expected 'clip': the file holds no image part.")
    kind = str(file.metadata.get("clip.projector_type", file.metadata.get(f"{_VISION}projector_type")))
    if kind not in _PROJECTORS:
        raise _error(
            file,
            "clip.projector_type",
            f"Found {shorten(kind)}. Headrace reads {' and '.join(_PROJECTORS)} from GGUF files.",
        )
    projector = _PROJECTORS[kind]
    if text.metadata.get("general.architecture") != projector.text:
        raise _error(file, "clip.projector_type", f"{shorten(kind)} belongs to a model of the kind {projector.text}.")
    own = {
        key.removeprefix(_VISION): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
        if key.startswith(_VISION)
    }
    _check_keys(file, own)
    tower = read_tower(_config(file, projector, own, text))
    return Mmproj(file, _renamed(tower, projector, file), _preparation(file, kind, own))


def _check_keys(file: GgufFile, own: Mapping[str, Any]) -> None:
    known = {*_KEYS.values(), *_OTHERS}
    unknown = [f"{_VISION}{key}" for key, value in own.items() if key not in known and value]
    unknown += [
        key
        for key, value in file.metadata.items()
        if key.startswith("clip.") and not key.startswith(_VISION) and key not in _CLIP and value
    ]
    if unknown:
        raise _error(file, unknown[0], "Headrace does not know this key, and it may change what the model sees.")
    if file.metadata.get("clip.use_gelu", True) is not True:
        raise _error(file, "clip.use_gelu", "Expected true: the towers that Headrace reads have no other activation.")


def _config(file: GgufFile, projector: Projector, own: Mapping[str, Any], text: GgufFile) -> ConfigJson:
    for key in _KEYS.values():
        if key not in own:
            raise _error(file, f"{_VISION}{key}", "The key is missing.")
    tokens = text.metadata.get("tokenizer.ggml.tokens")
    places = {token: place for place, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    missing = [token for token in projector.tokens.values() if token not in places]
    if missing:
        raise ModelError(f"The vocabulary has no token '{missing[0]}', which stands for images.", path=text.path)
    values: dict[str, Any] = {
        "architectures": [projector.name],
        "vision_config": {ours: own[theirs] for ours, theirs in _KEYS.items()},
        "text_config": {"hidden_size": text.metadata.get(f"{projector.text}.embedding_length")},
        **{key: places[token] for key, token in projector.tokens.items()},
    }
    sizes = ConfigJson(own, path=file.path, prefix=_VISION)
    if projector.text == "llama":
        values["scale_factor"] = sizes.size(_SCALE, maximum=MAX_SIDE, default=2)
    else:
        side = sizes.size("image_size", maximum=MAX_SIDE) // sizes.size("patch_size", maximum=MAX_SIDE)
        values["mm_tokens_per_image"] = (side // sizes.size(_SCALE, maximum=MAX_SIDE, default=4)) ** 2
    return ConfigJson(values, path=file.path)


def _renamed(tower: TowerSpec, projector: Projector, file: GgufFile) -> TowerSpec:
    """Return the tower with the names that its tensors have in the file."""
    names = {**_EXTRAS, **projector.extras}
    extras = tuple(
        TowerTensor(extra.name, (names[extra.name],), extra.shape, projector.added.get(extra.name, 0.0))
        for extra in tower.extras
    )
    table = _NAMES
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    sizes = (tower.encoder.hidden_size, tower.encoder.intermediate_size)
    if up is not None and sizes[0] != sizes[1] and up.shape == sizes:  # older converters exchanged them
        table = {**_NAMES, "mlp.up": _NAMES["mlp.down"], "mlp.down": _NAMES["mlp.up"]}
    return msgspec.structs.replace(
        tower, names=table, prefixes=("v.",), layer="blk", probe="patch_embd.weight", extras=extras
    )


def _preparation(file: GgufFile, kind: str, own: Mapping[str, Any]) -> ConfigJson:
    """Return how images are prepared."""
    sizes = ConfigJson(own, path=file.path, prefix=_VISION)
    side = sizes.size("image_size", maximum=MAX_SIDE)
    values: dict[str, Any] = {key: own[key] for key in ("image_mean", "image_std") if key in own}
    if kind == "gemma3":
        values["size"] = {"height": side, "width": side}
    else:
        longest = sizes.size("preproc_image_size", maximum=_MAX_EDGE, default=side)
        values |= {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest}}
        values["do_image_splitting"] = longest > side
    return ConfigJson(values, path=file.path)


def _error(file: GgufFile, key: str, reason: str) -> ModelError:
    return ModelError(f"Key {key[:120]!r}: {reason}", path=file.path)
