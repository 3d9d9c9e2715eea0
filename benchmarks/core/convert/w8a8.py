"""A model folder as vLLM takes int8: compressed-tensors W8A8, weights per channel, activations per token on the fly.

    w8a8.py MODEL OUT

Runs in the transformers environment (torch, safetensors). The embedding and the head stay bf16, as such checkpoints
have them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

PRODUCTS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS: Final[dict[str, Any]] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
    "observer": "minmax",
}
ACTIVATIONS: Final[dict[str, Any]] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(str(file)).items():
            if name.endswith(".weight") and name.split(".")[-2] in PRODUCTS:
                values = tensor.float()
                scale = values.abs().amax(dim=1, keepdim=True) / 127
                tensors[name] = (values / scale).round().clamp(-127, 127).to(torch.int8)
                tensors[f"{name}_scale"] = scale.bfloat16()
            else:
                tensors[name] = tensor
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}},
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
