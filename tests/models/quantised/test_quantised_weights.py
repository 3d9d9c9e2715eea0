"""Quantised checkpoints: every scheme's weights are those that its format defines, and its logits those of transformers
on these weights; what is not supported, or contradicts itself, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import ModelError
from headrace.models.model_folder import open_model
from headrace.models.precision import Precision
from headrace.models.weight_choice import choose_plan
from tests.models.quantised.quantised_models import SCHEMES, Built, Quantised
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import build, prompt

LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_bit_for_bit_those_of_the_format(name: str, built: Built) -> None:
    quantised = built(name)
    weights = open_model(quantised.folder).weights
    assert len(quantised.weights) == 14
    for tensor, expected in quantised.weights.items():
        found = weights.dense(tensor)
        assert weights.shape(tensor) == found.shape == tuple(expected.shape)
        assert np.array_equal(found.to_f32(), expected.numpy()), tensor
    assert weights.names == set(quantised.model.state_dict())


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_transformers_on_the_dequantised_weights(name: str, built: Built) -> None:
    quantised = built(name)
    tokens = prompt(40)
    executor = CpuExecutor.load(
        open_model(quantised.folder), weights="f32", kv="f32", threads=2, context=CONTEXT, isa=None
    )
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    assert np.abs(found - quantised.logits(tokens)).max() < 1e-3


def edited(quantised: Quantised, folder: Path, *, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """Copy a model with other values in its quantization_config and other parts of one layer (None: without it)."""
    values = json.loads((quantised.folder / "config.json").read_text())
    values["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(values))
    stored = safetensors.torch.load_file(quantised.folder / "model.safetensors")
    for part, value in tensors.items():
        name = f"{LAYER}.{part}"
        if value is None:
            del stored[name]
        else:
            stored[name] = value(stored[name]).contiguous() if callable(value) else value
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    return folder


def refusal(folder: Path, part: str = "") -> str:
    """Return why the model is refused when it is opened, or when its tensor is read."""
    with pytest.raises(ModelError) as caught:
        open_model(folder).weights.dense(f"{LAYER}.weight")
    if part:
        assert caught.value.tensor == f"{LAYER}.{part}"
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (
            "gptq-4",
            {"quant_method": "quip"},
            "quantization_config.quant_method': Expected a scheme that Headrace reads (awq, ",
        ),
        ("gptq-4", {"quant_method": None}, "found null"),
        ("gptq-4", {"bits": 5}, "Expected 2, 3, 4 or 8, found 5"),
        ("gptq-4", {"group_size": 0}, "'quantization_config.group_size': Expected -1 or"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "found 'marlin'"),
        ("gptq-4", {"dynamic": {"+:.*": {"bits": 8}}}, "all layers must have the same bits"),
        ("awq", {"bits": 8}, "Expected 4, found 8"),
        ("awq", {"version": "gemv"}, "found 'gemv'"),
        ("ct-w8a8", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported. Headrace reads pack"),
        ("ct-w8a8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse and quantised must be stored dense"),
        ("ct-w8a8", {"transform_config": {"R1": {}}}, "does not rotate"),
        ("bnb-nf4", {"load_in_8bit": True}, "either load_in_4bit or load_in_8bit"),
        ("bnb-nf4", {"bnb_4bit_quant_type": "int3"}, "found 'int3'"),
        ("fp8-blocks", {"weight_block_size": [128]}, "two sizes"),
    ],
)
def test_unknown_schemes_are_refused_by_key(
    name: str, config: dict[str, Any], expected: str, built: Built, tmp_path: Path
) -> None:
    folder = edited(built(name), tmp_path, config=config)
    reason = refusal(folder)
    assert expected in reason
    assert str(folder / "config.json") in reason


@pytest.mark.parametrize(
    ("name", "part", "value", "expected"),
    [
        ("gptq-4", "scales", None, "is missing"),
        ("gptq-4", "qzeros", lambda old: old[:, :-1], "Has shape 3x7. Expected 3x8"),
        ("gptq-4", "qzeros", lambda old: old.float(), "Has dtype F32. Expected I32"),
        ("gptq-4", "qweight", lambda old: old.reshape(-1), "Expected two dimensions"),
        ("gptq-3", "qweight", lambda old: old[:-1], "Expected whole numbers of 3 bits"),
        ("gptq-4", "scales", lambda old: old * float("nan"), "Contains NaN"),
        ("gptq-4-act-order", "g_idx", lambda old: old + 1, "Names group 3 of 3"),
        ("gptq-4-act-order", "g_idx", lambda old: old - 1, "Names group -1 of 3"),
        ("gptq-4", "weight", torch.zeros(64, 96), "stands for the same weights"),
        ("awq", "qzeros", lambda old: old[:-1], "Has shape 2x8. Expected 3x8"),
        ("awq", "scales", lambda old: old.int(), "Has dtype I32"),
        ("ct-w4a16", "weight_shape", lambda old: old * 2, "Says 128x192, but"),
        ("ct-w4a16", "weight_shape", lambda old: -old, "Says -64x-96, but"),
        ("ct-w4a16", "weight_scale", lambda old: old[:-1], "Expected one scale"),
        ("ct-w4a16-asymmetric", "weight_zero_point", lambda old: old[:-1], "Has shape 7x3. Expected 8x3"),
        ("ct-fp8-block", "weight_scale", lambda old: old[:-1], "Has shape 3x3"),
        ("fp8-tensor", "weight_scale", None, "is missing"),
        ("fp8-blocks", "weight_scale_inv", lambda old: old[:, :-1], "Has shape 2x3. Expected"),
        ("fp8-blocks", "weight_scale_inv", lambda old: old / 0, "Contains NaN or infinity"),
        ("bnb-nf4", "weight", lambda old: old[:-1], "Has shape 3071x1. Expected 3072x1"),
        ("bnb-nf4", "weight.absmax", lambda old: old[:-1], "Has shape 95. Expected 96"),
        ("bnb-nf4-nested", "weight.nested_absmax", lambda old: old[:-1], "Has shape 23. Expected 24"),
        ("bnb-nf4", "weight.quant_map", lambda old: old[:-1], "Has shape 15. Expected 16"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", lambda old: old[:-1], "it is no JSON"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", None, "is missing"),
        ("bnb-int8", "SCB", lambda old: old[:-1], "Has shape 63. Expected 64"),
        ("bnb-int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "Expected 0"),
    ],
)
def test_hostile_parts_are_refused_with_the_tensor(
    name: str, part: str, value: Any, expected: str, built: Built, tmp_path: Path
) -> None:
    folder = edited(built(name), tmp_path, **{part: value})
    assert expected in refusal(folder, part)


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        '{"blocksize": 64}',
        '{"blocksize": 0, "shape": [64, 96]}',
        '{"blocksize": 64, "shape": [64]}',
        '{"blocksize": 64, "shape": [64, 1e99]}',
        '{"blocksize": 64, "shape": [64, 96], "nested_blocksize": "x"}',
        '{"blocksize": 64, "shape": [64, 96], "nested_offset": "x"}',
        "[" * 10_000,
    ],
)
def test_a_hostile_quantisation_state_is_refused(state: str, built: Built, tmp_path: Path) -> None:
    part = "weight.quant_state.bitsandbytes__nf4"
    stored = torch.tensor(list(state.encode()), dtype=torch.uint8)
    assert "quantisation state is invalid" in refusal(edited(built("bnb-nf4"), tmp_path, **{part: stored}), part)


def test_nan_codes_of_fp8_are_refused_when_the_model_loads(built: Built, tmp_path: Path) -> None:
    folder = edited(
        built("fp8-tensor"), tmp_path, weight=torch.full((64, 96), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    )
    with pytest.raises(ModelError, match="Contains NaN") as caught:
        CpuExecutor.load(open_model(folder), threads=1)
    assert caught.value.tensor == f"{LAYER}.weight"


@pytest.mark.parametrize("weights", ["auto", "bf16", "int8"])
def test_scales_that_take_fp8_out_of_range_are_refused_when_the_model_loads(
    weights: str, built: Built, tmp_path: Path
) -> None:
    folder = edited(built("fp8-tensor"), tmp_path, weight_scale=lambda old: torch.full_like(old, 1e37))
    with pytest.raises(ModelError, match=r"above 3\.39e\+38, the range of bf16") as caught:
        CpuExecutor.load(open_model(folder), weights=weights, threads=1)
    assert caught.value.tensor == f"{LAYER}.weight_scale"


def test_products_by_head_of_a_quantised_latent_are_those_of_its_numbers(tmp_path: Path) -> None:
    model = build("deepseek-v2-lite", tmp_path)
    path, scheme = tmp_path / "model.safetensors", SCHEMES["fp8-blocks"]
    tensors = safetensors.torch.load_file(path)
    for index, layer in enumerate(model.model.layers):
        name = f"model.layers.{index}.self_attn.kv_b_proj"
        stored, defined = scheme.quantise(tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{part}": each.contiguous() for part, each in stored.items()}
        layer.self_attn.kv_b_proj.weight.data = defined
    safetensors.torch.save_file(tensors, path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": scheme.config}))
    folder, tokens = open_model(tmp_path), prompt(40)
    assert choose_plan(folder).precision("layers.0.attn.q_to_latent") == Precision("bf16")
    executor = CpuExecutor.load(folder, weights="f32", kv="f32", threads=2, context=CONTEXT, isa=None)
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_layers_left_in_full_precision_load_as_they_are(built: Built, tmp_path: Path) -> None:
    folder = edited(
        built("awq"), tmp_path, qweight=None, qzeros=None, scales=None, weight=torch.ones(64, 96).bfloat16()
    )
    found = open_model(folder).weights.dense(f"{LAYER}.weight")
    assert found.dtype == "bf16"
    assert (found.to_f32() == 1).all()
