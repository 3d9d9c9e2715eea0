"""The sections [catalogues.NAME]: files of approved texts that answer known questions. gateway.caches applies them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headrace.config.value_types import Section, Text


class CatalogueConfig(Section, frozen=True):
    file: Text  # written by headrace catalogue build; read again when it changes
    match: Literal["folded", "exact"] = "folded"  # folded: without case, spaces and marks at the end
    models: tuple[Text, ...] = ()  # requests for these are answered; MODEL includes its variants; empty: for all
    tenants: tuple[Text, ...] = ()  # whose requests are answered; "-": requests without one; empty: all
    surfaces: tuple[Text, ...] = ()  # empty: all
    system: Literal["none", "any"] = "none"  # any: requests with a system message of their own are answered too

    @property
    def path(self) -> Path:
        return Path(self.file).expanduser()
