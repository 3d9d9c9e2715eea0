"""Opens LoRA adapters by name: checks their files against the model, and names them by their content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.engine.interface.request import AdapterRef
from headrace.models.adapters.adapter_folder import adapter_digest, read_adapter
from headrace.models.model_folder import ModelFolder


def open_adapter(name: str, path: str | Path, folder: ModelFolder) -> AdapterRef:
    """Return a checked adapter. ModelError for one that the model cannot be served with."""
    resolved = Path(path).expanduser().resolve()
    digest = adapter_digest(resolved)
    read_adapter(resolved, folder)
    return AdapterRef(name, str(resolved), digest)


def open_adapters(adapters: Mapping[str, str | Path], folder: ModelFolder) -> dict[str, AdapterRef]:
    return {name: open_adapter(name, path, folder) for name, path in adapters.items()}
