"""Adapters against the arithmetic of PEFT in torch, on tiny models of several families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner
from headrace.llm.adapters import open_adapter
from headrace.models.adapters.adapter_config import read_adapter_config
from headrace.models.adapters.adapter_folder import ADAPTER_FILE
from headrace.models.model_folder import ModelFolder, open_model
from tests.models.tiny_models import Reference, prompt
from tests.support.models.lora_folders import write_lora

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"ranks": {"q_proj": 7, "down_proj": 2}, "alpha_pattern": {"model.layers.1.self_attn.v_proj": 3}},
    "rslora": {"use_rslora": True, "rank": 9, "alpha": 4.0},
    "dora": {"use_dora": True},
    "plain": {},
}


def peft_logits(model: Any, folder: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The logits of a model in transformers whose modules compute as PEFT's layers do."""
    config = read_adapter_config(folder)
    tensors = load_file(folder / ADAPTER_FILE)
    hooks: list[Any] = []
    for name, module in model.named_modules():
        key = f"base_model.model.{name}"
        if f"{key}.lora_A.weight" not in tensors:
            continue
        down, up = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
        magnitude, scale = tensors.get(f"{key}.lora_magnitude_vector"), config.scale_of(name)
        weight = module.weight.T if type(module).__name__ == "Conv1D" else module.weight

        def hook(
            module: Any,
            given: tuple[torch.Tensor, ...],
            result: torch.Tensor,
            *,
            down: torch.Tensor = down,
            up: torch.Tensor = up,
            magnitude: torch.Tensor | None = magnitude,
            scale: float = scale,
            weight: torch.Tensor = weight,
        ) -> torch.Tensor:
            added = given[0] @ down.T @ up.T * scale
            if magnitude is None:
                return result + added
            factor = magnitude / torch.linalg.norm(weight + scale * (up @ down), dim=1)
            bare = result if module.bias is None else result - module.bias
            return result + (factor - 1) * bare + factor * added

        hooks.append(module.register_forward_hook(hook))
    assert len(hooks) == sum(name.endswith("lora_A.weight") for name in tensors)
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0].float().numpy()
    for each in hooks:
        each.remove()
    return found


def served_logits(folder: ModelFolder, adapter: Path, tokens: list[int], weights: str) -> np.ndarray[Any, Any]:
    executor = CpuExecutor.load(folder, weights=weights, kv="f32", threads=1, context=128)
    try:
        assert executor.adapters is not None
        ref = open_adapter("one", adapter, folder)
        executor.adapters.load(ref).result()
        runner = Runner(executor)
        sequence = runner.open(tokens, adapter=ref)
        return runner.step([(sequence, len(tokens))], range(len(tokens)))
    finally:
        executor.close()


DENSE = ("llama", "qwen2", "phi3", "gpt2", "gemma2", "gptj", "starcoder2", "falcon")
RECURRENT = ("mamba2", "lfm2", "bamba", "falcon-h1")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in DENSE for kind in KINDS if kind != "plain"]
    + [(name, "plain") for name in (*RECURRENT, "gemma4", "gemma4-experts")],
)
def test_logits_are_those_of_peft(name: str, kind: str, tiny: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = tiny(name)
    folder = open_model(reference.folder)
    adapter = write_lora(folder, tmp_path / kind, seed=3, **KINDS[kind])
    tokens = prompt(40)
    expected = peft_logits(reference.model, adapter, tokens)
    found = served_logits(folder, adapter, tokens, "f32")
    largest = float(np.abs(expected).max())
    assert np.abs(found - expected).max() < 1e-4 * max(1.0, largest)
    with torch.no_grad():
        base = reference.model(torch.tensor([tokens])).logits[0].float().numpy()
    assert np.abs(base - expected).max() > 0.01 * largest
