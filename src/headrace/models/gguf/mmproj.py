"""Reads the image part of a GGUF model: a second file beside it ("mmproj"), as llama.cpp's converters write it.

Its keys are given their names in config.json and preprocessor_config.json, so that the readers of those read them. Keys
that Headrace does not know are rejected, because they may change what the model computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson, shorten
from headrace.models.families.decoder import named_sources, paired_sources
from headrace.models.families.family import TensorSources
from headrace.models.families.vision.towers import read_tower
from headrace.models.families.vision.vision_tower import TowerSpec, TowerTensor
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.gguf.gguf_keys import GgufKeys, key_error
from headrace.models.gguf.projectors import NAMES, PROJECTORS, Projector

_VISION: Final = "clip.vision"
# Without an effect, or for the text part.
_OTHERS: Final = (
    "image_size",
    "projection_dim",
    "projector_type",
    "attention.layer_norm_epsilon",
    "feed_forward_length",
)
_CLIP: Final = frozenset("clip.projector_type clip.has_vision_encoder clip.use_gelu clip.use_silu".split())
_ACTIVATIONS: Final = ("use_gelu", "use_silu")


class Mmproj(NamedTuple):
    """An image part: its file, its tower with the file's names, and how images are prepared, in the words of
    preprocessor_config.json."""

    file: GgufFile
    tower: TowerSpec
    preparation: ConfigJson
    pairs: bool = False  # rows of q and k are in the pairs that the rope rotates


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
        raise key_error(file, "general.architecture", "Expected 'clip': the file holds no image part.")
    kind = str(file.metadata.get("clip.projector_type", file.metadata.get(f"{_VISION}.projector_type")))
    if kind not in PROJECTORS:
        known = ", ".join(PROJECTORS)
        raise key_error(
            file, "clip.projector_type", f"Found {shorten(kind)}. Headrace reads these from GGUF files: {known}."
        )
    projector = PROJECTORS[kind]
    if text.metadata.get("general.architecture") not in projector.texts:
        kinds = " or ".join(projector.texts)
        raise key_error(file, "clip.projector_type", f"{shorten(kind)} belongs to a model of the kind {kinds}.")
    keys = GgufKeys(file, _VISION)
    config = _config(keys, projector, text)
    preparation = _preparation(keys, projector)
    tower = _renamed(read_tower(config), projector, keys)
    _check_keys(keys, projector)
    return Mmproj(file, tower, preparation, projector.pairs)


def mmproj_sources(found: Mmproj, names: frozenset[str]) -> TensorSources:
    """Map the tensors of the tower's encoder to those of the file, of which `names` are there."""
    tower = found.tower
    sources = named_sources(tower.encoder, tower.names, names, prefix=tower.prefixes[0], layer=tower.layer)
    return paired_sources(sources, tower.encoder) if found.pairs else sources


def _check_keys(keys: GgufKeys, projector: Projector) -> None:
    file = keys.file
    for key in _OTHERS:
        keys.get(key)
    keys.refuse_unread()
    for key, value in file.metadata.items():
        if key.startswith("clip.") and not key.startswith(f"{_VISION}.") and key not in _CLIP and value:
            raise key_error(file, key, "Headrace does not know this key, and it may change what the model sees.")
    said = [each for each in _ACTIVATIONS if file.metadata.get(f"clip.{each}") is True]
    wrong = [each for each in said or [""] if each not in projector.activations]
    if not said and file.metadata.get("clip.use_gelu") is False and "use_gelu" in projector.activations:
        wrong = ["use_gelu"]
    if wrong:
        key = f"clip.{wrong[0] or projector.activations[0]}"
        raise key_error(file, key, "The tower of this projector has another activation.")


def _config(keys: GgufKeys, projector: Projector, text: GgufFile) -> ConfigJson:
    tokens = text.metadata.get("tokenizer.ggml.tokens")
    places = {token: place for place, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    missing = [token for token in projector.tokens.values() if token not in places]
    if missing:
        raise ModelError(f"The vocabulary has no token '{missing[0]}', which stands for images.", path=text.path)
    width = text.metadata.get(f"{text.metadata.get('general.architecture')}.embedding_length")
    values: dict[str, Any] = {
        "architectures": [projector.name],
        "text_config": {"hidden_size": width},
        **{key: places[token] for key, token in projector.tokens.items()},
        **projector.config(keys, text),
    }
    return ConfigJson(values, path=keys.file.path, spelled=keys.spelled())


def _renamed(tower: TowerSpec, projector: Projector, keys: GgufKeys) -> TowerSpec:
    """Return the tower with the names that its tensors have in the file."""
    file, names = keys.file, projector.extras(keys)
    extras = tuple(
        TowerTensor(extra.name, (names[extra.name],), extra.shape, projector.added.get(extra.name, 0.0))
        for extra in tower.extras
    )
    table = {**NAMES, **projector.names}
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    sizes = (tower.encoder.hidden_size, tower.encoder.intermediate_size)
    if up is not None and sizes[0] != sizes[1] and up.shape == sizes:  # older converters exchanged them
        down, gate = table["mlp.down"], table["mlp.gate_up"]
        table = {**table, "mlp.up": down, "mlp.down": table["mlp.up"], "mlp.gate_up": (gate[0], *down)}
    if "v.blk.0.attn_qkv.weight" in file.tensors:
        table = {**table, "attn.qkv": ("attn_qkv",)}
    return msgspec.structs.replace(
        tower, names=table, prefixes=("v.",), layer="blk", probe="patch_embd.weight", extras=extras
    )


def _preparation(keys: GgufKeys, projector: Projector) -> ConfigJson:
    """Return how images are prepared."""
    values = {key: keys.items(key) for key in ("image_mean", "image_std") if keys.items(key)}
    return ConfigJson({**values, **projector.preparation(keys)}, path=keys.file.path)
