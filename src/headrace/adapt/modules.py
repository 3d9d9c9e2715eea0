"""Reads which modules an adapter is trained for: a group of them, or their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.adapt.recipe import ATTENTION, FEED_FORWARD
from headrace.errors import RequestError
from headrace.models.adapters.adapter_folder import product_of
from headrace.models.adapters.adapter_modules import AdapterModule, adapter_modules
from headrace.models.model_folder import ModelFolder

GROUPS: Final = {"all": (), "attention": ATTENTION, "mlp": FEED_FORWARD}


def trained_modules(folder: ModelFolder, targets: Sequence[str] = ()) -> list[AdapterModule]:
    """Return the modules that an adapter is trained for: of those with these last names, all that can be served with
    an adapter. Experts cannot."""
    found = [module for module in adapter_modules(folder, targets) if product_of(module.tensor) is not None]
    if not found:
        raise _only_experts(folder)
    return found


def _only_experts(folder: ModelFolder) -> RequestError:
    return RequestError(
        f"These modules of {folder.spec.architecture} are experts, which take no adapters. Pass --targets attention, "
        "or train all weights with --full.",
        parameter="targets",
    )


def parse_targets(folder: ModelFolder, text: str) -> tuple[str, ...]:
    """Read `all`, `attention`, `mlp` or names of modules separated by commas."""
    if text == "all":
        return ()
    if text in GROUPS:
        found = tuple(sorted({module.leaf for module in adapter_modules(folder)}.intersection(GROUPS[text])))
        if not found:  # experts have names of their own
            raise _only_experts(folder)
        trained_modules(folder, found)
        return found
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    trained_modules(folder, names)
    return names
