"""Fixtures for tests of models: tiny models, each built once on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.models.tiny_models import TINY, Reference, build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    built: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in built:
            folder = tmp_path_factory.mktemp(name)
            built[name] = Reference(name, TINY[name], folder, build(name, folder))
        return built[name]

    return get


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return quantised checkpoints by their scheme."""
    from tests.models.quantised.quantised_models import SCHEMES, Quantised, build_quantised  # slow imports

    made: dict[str, Quantised] = {}

    def get(name: str) -> Quantised:
        if name not in made:
            made[name] = build_quantised(SCHEMES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get
