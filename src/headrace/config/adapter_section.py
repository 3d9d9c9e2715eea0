"""Configuration of LoRA adapters, which clients name as MODEL:ADAPTER. Reads no adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.config.value_types import Finding, Section, Text

MOST_ADAPTERS: Final = 1024  # of a model
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class AdapterConfig(Section, frozen=True):
    path: Text  # folder in PEFT's layout
    tenants: tuple[Text, ...] = ()  # that may use it; default: all


def check_adapters(
    model: str, adapters: Mapping[str, AdapterConfig], where: str, *, named: Mapping[str, str]
) -> Iterator[Finding]:
    """`named`: the names and aliases of all models, with the key of each."""
    if len(adapters) > MOST_ADAPTERS:
        yield where, f"expected at most {MOST_ADAPTERS} adapters, found {len(adapters)}"
    for name in adapters:
        if not ADAPTER_NAME.fullmatch(name):
            yield f"{where}.{name}", f'expected up to 64 letters, digits and . _ -, found "{name[:100]}"'
        if f"{model}:{name}" in named:
            yield f"{where}.{name}", f'"{model}:{name}" is the name of another model'
