"""The folders of the benchmark under build/peers: environments, sources, models, caches and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
ADAPTERS: Final = HERE / "adapters"
CONVERTERS: Final = HERE / "convert"

BUILD: Final = REPOSITORY / "build" / "peers"  # ignored by git
SOURCES: Final = BUILD / "src"
MODELS: Final = BUILD / "models"
CACHE: Final = BUILD / "cache"  # Headrace's packed weights, OpenVINO's and vLLM's compiled models
LOGS: Final = BUILD / "logs"
STAMPS: Final = BUILD / "stamps"  # what is installed, with its versions
LLAMA_BUILD: Final = BUILD / "build-llama"
LLAMA_DRIVER: Final = LLAMA_BUILD / "llama_driver"
LLAMA_SERVER: Final = LLAMA_BUILD / "bin" / "llama-server"


def environment(peer: str) -> Path:
    return BUILD / "venvs" / peer


def python(peer: str) -> Path:
    return environment(peer) / "bin" / "python"


def model(shape: str, form: str) -> Path:
    """Return the path of a shape's weights in one form: `hf`, `q8_0.gguf`, `openvino-int8`, `w8a8` and so on."""
    return MODELS / shape / form
