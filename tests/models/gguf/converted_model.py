"""A model folder on its way into a GGUF file: what converters know of it. Writes nothing by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

Tensor = torch.Tensor
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MODULE = re.compile(r"layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight$")
# Qwen's names of what predicts further tokens, and those that converters give it.
_NUMBERED = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}


class Model:
    """A folder, and the writer of its file."""

    def __init__(self, folder: Path, writer: gguf.GGUFWriter, kind: gguf.MODEL_ARCH) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.writer = writer
        self.kind = kind
        self.layers = int(
            self.find("num_hidden_layers", "n_layer", "n_layers") or len(self.config["layers_block_type"])
        )
        self.further = int(self.find("mtp_num_hidden_layers", "num_nextn_predict_layers") or 0)
        self.table = gguf.get_tensor_name_map(kind, self.layers + self.further)
        self.tensors = _stacked(_numbered(load_file(folder / "model.safetensors"), self.layers))
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        self.rope: dict[str, Any] = rope

    def find(self, *names: str) -> Any:
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    @property
    def heads(self) -> int:
        return int(self.find("num_attention_heads", "n_head", "n_heads"))

    @property
    def hidden(self) -> int:
        return int(self.find("hidden_size", "n_embd", "d_model"))

    @property
    def head_size(self) -> int:
        return int(self.config.get("head_dim") or self.hidden // self.heads)

    def name(self, source: str) -> str:
        if (module := _MODULE.search(source)) is not None:
            return f"blk.{module[1]}.nextn.{module[2].replace('.', '_')}.weight"
        found = self.table.get_name(source, try_suffixes=(".weight", ".bias"))
        assert found is not None, source
        return found


def _numbered(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the tensors with those of Qwen's prediction module in a layer after the last."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        start = next((each for each in _NUMBERED if name.startswith(each)), "")
        renamed = f"model.layers.{layers}.{_NUMBERED[start]}{name.removeprefix(start)}" if start else name
        found[renamed] = tensor
    return found


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of all experts of a layer in one."""
    whole: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _EXPERT.search(name)
        if found is None:
            whole[name] = tensor
        else:
            experts.setdefault(_EXPERT.sub(".experts.", name), {})[int(found[1])] = tensor
    return whole | {name: torch.stack([each[key] for key in sorted(each)]) for name, each in experts.items()}
