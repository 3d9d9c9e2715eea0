"""Reads which modules an adapter is trained for: a group of them, or their names."""

from __future__ import annotations

from typing import Final

from headrace.adapt.recipe import ATTENTION, FEED_FORWARD
from headrace.models.adapters.adapter_modules import adapter_modules
from headrace.models.model_folder import ModelFolder

GROUPS: Final = {"all": (), "attention": ATTENTION, "mlp": FEED_FORWARD}


def parse_targets(folder: ModelFolder, text: str) -> tuple[str, ...]:
    """Read `all`, `attention`, `mlp` or names of modules separated by commas."""
    known = {module.leaf for module in adapter_modules(folder)}
    if text == "all":
        return ()
    if text in GROUPS:
        return tuple(sorted(known.intersection(GROUPS[text])))
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    adapter_modules(folder, names)
    return names
