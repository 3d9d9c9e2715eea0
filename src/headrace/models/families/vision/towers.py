"""Chooses how the image part of a config is read, by its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.models.config_json import ConfigJson
from headrace.models.families.family import architecture_of
from headrace.models.families.vision import gemma3_tower, idefics3, llava, qwen3_vl, qwen_vl
from headrace.models.families.vision.vision_tower import TowerSpec

_READERS: Final[dict[str, Callable[[ConfigJson], TowerSpec]]] = {
    **dict.fromkeys(idefics3.architectures, idefics3.read_tower),
    **dict.fromkeys(llava.architectures, llava.read_tower),
    **dict.fromkeys(qwen_vl.architectures, qwen_vl.read_tower),
    **dict.fromkeys(qwen3_vl.architectures, qwen3_vl.read_tower),
    gemma3_tower.ARCHITECTURE: gemma3_tower.read_tower,
}


def has_tower(config: ConfigJson) -> bool:
    """Return whether a config has an image part that Headrace computes."""
    return architecture_of(config) in _READERS and config.has("vision_config")


def read_tower(config: ConfigJson) -> TowerSpec:
    """Read the image part of a config. ModelError for one that Headrace does not compute exactly."""
    return _READERS[architecture_of(config)](config)
