"""gpt-oss in MXFP4: a tiny model whose experts are written as they are published, and transformers' reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import ModelError
from headrace.models.model_folder import open_model
from headrace.models.packing import load_tensors
from headrace.models.precision import Precision
from headrace.models.weight_choice import choose_plan, describe_choice
from tests.models.tiny_configs import CONTEXT, SIZES
from tests.models.tiny_models import prompt, randomise, write_tokenizer

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS = 4
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def encode(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, outputs, inputs] -> blocks and scales."""
    groups = weights.unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(3))).int() - 2
    parts = groups / torch.exp2(exponents.float())[..., None]
    nearest = (parts.abs()[..., None] - torch.tensor(FP4)).abs().argmin(-1)
    codes = (nearest + 8 * (parts < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    sizes = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(
        **sizes, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, rope_parameters=rope
    )
    torch.manual_seed(5)
    model = transformers.GptOssForCausalLM(config).to(torch.float32).eval()
    randomise(model)
    model.save_pretrained(path)
    write_tokenizer(path)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = encode(tensor.transpose(1, 2))
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": CONFIG}))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """What transformers reads from the same files."""
    plan = transformers.Mxfp4Config(dequantize=True)
    found = transformers.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=plan, dtype=torch.float32, attn_implementation="eager"
    )
    return found.eval()


def test_experts_have_the_weights_that_transformers_reads(folder: Path, model: Any) -> None:
    opened = open_model(folder)
    for layer, block in enumerate(model.model.layers):
        for expert in range(EXPERTS):
            name = f"layers.{layer}.mlp.experts.{expert}"
            both = block.mlp.experts.gate_up_proj[expert].detach().T
            expected = torch.cat([both[::2], both[1::2]]).numpy()
            assert np.array_equal(opened.tensor(f"{name}.gate_up").to_f32(), expected)
            down = block.mlp.experts.down_proj[expert].detach().T.numpy()
            assert np.array_equal(opened.tensor(f"{name}.down").to_f32(), down)


def test_logits_are_those_of_transformers(folder: Path, model: Any) -> None:
    tokens = prompt(100)
    executor = CpuExecutor.load(open_model(folder), weights="f32", kv="f32", threads=2, context=CONTEXT)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    (found,) = logits(executor, [tokens])
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4


def test_codes_are_kept_in_four_bits_with_their_exact_values(folder: Path) -> None:
    opened = open_model(folder)
    plan = choose_plan(opened)
    assert describe_choice(opened, plan) == "mxfp4-g32 from MXFP4: the codes in the files"
    assert Precision("mxfp4", 32, stored=True).bits == 4.5
    name = "layers.0.mlp.experts.0.down"
    held = load_tensors(opened, plan, _core.Pool(1), cache=None).tensors[name]
    assert isinstance(held, _core.Packed)
    assert np.array_equal(held.unpack(), opened.tensor(name).to_f32())
    (kept,) = logits(CpuExecutor.load(opened, kv="f32", threads=2, context=CONTEXT), [prompt(20)])
    (exact,) = logits(CpuExecutor.load(opened, weights="f32", kv="f32", threads=2, context=CONTEXT), [prompt(20)])
    assert np.abs(kept - exact).max() / np.abs(exact).max() < 0.05  # activations have 8 bits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scales": lambda scales: scales.index_fill(2, torch.tensor([0]), 255)}, "Contains NaN"),
        ({"scales": lambda scales: scales[:, :, :1]}, "Expected 128x2"),
        ({"blocks": lambda blocks: blocks[..., :8]}, "Expected outputs x groups x 16"),
        ({"blocks": lambda blocks: blocks.float()}, "Has dtype F32"),
    ],
)
def test_hostile_parts_are_refused_with_the_tensor(
    change: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for part, changed in change.items():
        name = f"model.layers.0.mlp.experts.gate_up_proj_{part}"
        tensors[name] = changed(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=reason) as found:
        open_model(tmp_path).tensor("layers.0.mlp.experts.0.gate_up")
    assert "experts.0.gate_up_proj" in str(found.value)
