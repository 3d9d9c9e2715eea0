"""Every architecture in GGUF files computes what its folder does, which the golden tests compare with transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.models.gguf.gguf_architectures import ARCHITECTURES
from tests.models.gguf.converted import write_converted
from tests.models.gguf.gguf_configs import MADE, build_folder
from tests.models.gguf.test_gguf_models import headrace_logits
from tests.models.tiny_models import prompt

# Models that are a file of an architecture with another name.
FILES = {
    "mixtral": "llama",
    "gemma4-experts": "gemma4",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "command-r-plus": "command-r",
    "exaone4-full": "exaone4",
    "stablelm-12b": "stablelm",
    "bamba": "granitehybrid",
    "granitehybrid-dense": "granitehybrid",
    "deepseek2-lite": "deepseek2",
    "deepseek3": "deepseek2",
    "falcon-40b": "falcon",
}
TOKENS = prompt(40)  # more than a window


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    build_folder(name, tmp_path)
    write_converted(tmp_path, tmp_path / "model.gguf", FILES.get(name, name))

    expected, found = (headrace_logits(path, TOKENS) for path in (tmp_path, tmp_path / "model.gguf"))

    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_every_architecture_is_compared() -> None:
    elsewhere = {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2"}
    embedders = {"bert", "nomic-bert", "modern-bert", "gemma-embedding"}
    images = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
    compared = {FILES.get(name, name) for name in MADE}
    assert compared | elsewhere | embedders | images == ARCHITECTURES.keys()
