"""Fewer heads, neurons and experts: what was superfluous goes without a loss, and the files are the new shape's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.compress.layer_pass import LayerPass, Tokens, embed, load_layer
from headrace.compress.reshape import output_fit
from headrace.compress.reshape.head_pooling import pool_heads
from headrace.compress.reshape.reshaping import Shape, reshape_model, target_spec
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder, open_model
from tests.models.tiny_models import Reference, prompt

Tiny = Callable[[str], Reference]
PROMPTS = [prompt(50, seed=each) for each in range(4)]


def outputs(folder: ModelFolder) -> np.ndarray:
    tokens = Tokens.join(PROMPTS)
    hidden = embed(folder, tokens)
    for index in range(len(folder.spec.layers)):
        hidden = LayerPass(folder.spec, index, load_layer(folder, index)).forward(hidden, tokens.offsets)
    return hidden


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(one - other).sum() / np.square(other).sum())


def test_heads_that_are_turned_copies_pool_without_a_loss(tiny: Tiny) -> None:
    folder = open_model(tiny("llama-linear-tied").folder)  # four heads, each with a key and value head of its own
    tokens = Tokens.join(PROMPTS)
    hidden = embed(folder, tokens)
    tensors = load_layer(folder, 0)
    spec, size = folder.spec, folder.spec.head_size
    qkv = tensors["attn.qkv"].copy()
    keys, values = qkv[spec.q_size : spec.q_size + spec.kv_size], qkv[spec.q_size + spec.kv_size :]
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    values[size : 2 * size] = rotation @ values[:size]
    angles, half = rng.uniform(0, 6, size // 2), size // 2
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    keys[size : size + half] = cosine * keys[:half] - sine * keys[half:size]
    keys[size + half : 2 * size] = sine * keys[:half] + cosine * keys[half:size]
    for part in (keys, values):
        part[2 * size :] = np.concatenate([part[2 * size : 3 * size]] * 2)
    layer = LayerPass(spec, 0, {**tensors, "attn.qkv": qkv})
    pooled = pool_heads(layer, layer.attention_inputs(hidden), 2)
    fewer = LayerPass(replace(spec, kv_heads=2), 0, {**tensors, **pooled})
    before = layer.forward(hidden, tokens.offsets)
    np.testing.assert_allclose(fewer.forward(hidden, tokens.offsets), before, atol=1e-4 * np.abs(before).max())


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "gemma2", "phi3"])
def test_what_adds_nothing_goes_without_a_loss(name: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny(name).folder)
    spec = folder.spec
    groups, group = spec.kv_heads, spec.heads // spec.kv_heads
    shape = Shape(heads=group if groups > 1 else None, neurons=64)
    source = tmp_path / "model"
    shutil.copytree(tiny(name).folder, source)
    silence(open_model(source), source, spec.head_size * group, 64)
    folder = open_model(source)
    reports = reshape_model(folder, tmp_path / "small", PROMPTS, shape)
    small = open_model(tmp_path / "small")
    assert (small.spec.heads, small.spec.intermediate_size) == (group, 64)
    assert small.weights.total_bytes < folder.weights.total_bytes
    assert max(each.error for each in reports) < 1e-6
    assert distance(outputs(small), outputs(folder)) < 1e-6


def silence(folder: ModelFolder, path: Path, width: int, neurons: int) -> None:
    """Set what the first group of heads and the first neurons add to 0, in the files."""
    from safetensors.numpy import load_file, save_file

    for file in path.glob("*.safetensors"):
        tensors = {name: values.copy() for name, values in load_file(file).items()}
        for name, values in tensors.items():
            if name.endswith("o_proj.weight") and folder.spec.kv_heads > 1:
                values[:, : values.shape[1] - width] = 0
            elif name.endswith("down_proj.weight"):
                values[:, : values.shape[1] - neurons] = 0
        save_file(tensors, file, {"format": "pt"})


def test_the_fit_keeps_more_than_cutting_alone(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_model(tiny("llama-linear-tied").folder)
    shape = Shape(kv_heads=2, heads=2, neurons=64)
    reports = reshape_model(folder, tmp_path / "small", PROMPTS, shape)
    small = open_model(tmp_path / "small")
    assert small.spec == replace(folder.spec, heads=2, kv_heads=1, intermediate_size=64)
    monkeypatch.setattr(output_fit, "RIDGE", 1e9)  # holds the weights where they were
    cut = reshape_model(folder, tmp_path / "cut", PROMPTS, shape)
    assert 0 < reports[0].error < 0.9 * cut[0].error
    assert distance(outputs(small), outputs(folder)) < distance(outputs(open_model(tmp_path / "cut")), outputs(folder))
    assert np.array_equal(small.tensor("embed").data, folder.tensor("embed").data)


def test_a_mixture_keeps_the_experts_that_tokens_go_to(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("qwen3-moe").folder)
    experts = folder.spec.experts
    assert experts is not None
    reshape_model(folder, tmp_path / "small", PROMPTS, Shape(experts=experts.count - 1))
    small = open_model(tmp_path / "small")
    assert small.spec.experts == replace(experts, count=experts.count - 1)
    index = next(index for index, layer in enumerate(folder.spec.layers) if layer.experts)
    routers = (each.tensor(f"layers.{index}.mlp.router").to_f32() for each in (folder, small))
    before, after = (router.tolist() for router in routers)
    kept = [before.index(row) for row in after]
    assert kept == sorted(kept)
    for place, expert in enumerate(kept):
        name = "layers.{}.mlp.experts.{}.down"
        old, new = folder.tensor(name.format(index, expert)), small.tensor(name.format(index, place))
        assert np.array_equal(old.to_f32(), new.to_f32())


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_lose_the_neurons_that_add_nothing(name: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny(name).folder, source)
    size = open_model(source).spec.experts
    assert size is not None
    silence_experts(source, size.intermediate_size - 16)
    folder = open_model(source)
    shape = Shape(experts=size.count - 1, expert_neurons=16) if name == "qwen3-moe" else Shape(expert_neurons=16)
    reports = reshape_model(folder, tmp_path / "small", PROMPTS, shape)
    small = open_model(tmp_path / "small")
    assert small.spec.experts == replace(size, count=shape.experts or size.count, intermediate_size=16)
    index = next(index for index, layer in enumerate(folder.spec.layers) if layer.experts)
    assert small.shapes[f"layers.{index}.mlp.experts.0.down"] == (folder.spec.hidden_size, 16)
    if shape.experts is None:
        assert max(each.error for each in reports) < 1e-6
        assert distance(outputs(small), outputs(folder)) < 1e-6


def silence_experts(path: Path, neurons: int) -> None:
    """Set what the first neurons of every expert add to 0, in the files."""
    from safetensors.numpy import load_file, save_file

    for file in path.glob("*.safetensors"):
        tensors = {name: values.copy() for name, values in load_file(file).items()}
        silenced = 0
        for name, values in tensors.items():
            if "experts" in name and name.endswith(("down_proj", "down_proj.weight", "w2.weight")):
                values[..., :neurons] = 0
                silenced += 1
        assert silenced
        save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("llama", Shape(), "nothing would change"),
        ("llama", Shape(kv_heads=3), "must be 1 to 2"),
        ("llama-linear-tied", Shape(kv_heads=3), "'kv_heads' must divide the 4 key and value heads"),
        ("llama", Shape(heads=3), "'heads' must be a multiple of 2"),
        ("llama", Shape(neurons=0), "'neurons' must be 1 to 96"),
        ("llama", Shape(experts=2), "has no experts"),
        ("llama", Shape(expert_neurons=2), "has no experts. --neurons is for"),
        ("qwen3-moe", Shape(expert_neurons=0), "'expert_neurons' must be 1 to"),
        ("qwen3-moe", Shape(experts=1), "'experts' must be at least 3"),
        ("olmo2", Shape(heads=2), "normalises all heads together"),
    ],
)
def test_sizes_that_a_model_cannot_have_are_rejected(name: str, shape: Shape, expected: str, tiny: Tiny) -> None:
    with pytest.raises(RequestError, match=expected):
        target_spec(open_model(tiny(name).folder).spec, shape)


def test_the_command_writes_a_model_that_runs(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old mill stands by the river, and its wheel turns. " * 20)
    out = tmp_path / "small"
    arguments = ["reshape", str(tiny("llama").folder), str(out), "--neurons", "64", "--calibrate", str(text)]
    assert main([*arguments, "--window", "64", "--calibrate-tokens", "200"]) == 0
    assert f"headrace adapt {out} --full --distil-from" in capsys.readouterr().out.replace("\n", " ")
    assert main(["generate", str(out), "--prompt", "The old", "--max-tokens", "2", "--no-cache"]) == 0
    assert main(arguments) in (1, 2)
    assert "exists. Choose another name" in capsys.readouterr().err
