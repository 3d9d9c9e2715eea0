"""Sparsity: which weights become 0, what that costs, and that the files are read back as they were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from compressed_tensors.utils import unpack_bitmasks

from headrace.cli import main
from headrace.compress.compression import compress_model, products_of, scale_type
from headrace.compress.input_statistics import InputStatistics
from headrace.compress.layer_compression import relative_error
from headrace.compress.pruning import PRUNERS, keep, prune, zeros
from headrace.compress.recipe import KEPT, Recipe
from headrace.errors import ModelError
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.model_folder import ModelFolder, open_model
from tests.models.tiny_models import Reference, prompt

Tiny = Callable[[str], Reference]
PROMPTS = [prompt(60, seed=each) for each in range(4)]


def correlated(rows: int, inputs: int) -> np.ndarray:
    """Inputs of which some are large, and which depend on each other."""
    rng = np.random.default_rng(1)
    mixed = rng.standard_normal((rows, inputs // 4)) @ rng.standard_normal((inputs // 4, inputs))
    sizes = np.exp(rng.standard_normal(inputs))
    return ((mixed + rng.standard_normal((rows, inputs))) * sizes).astype(np.float32)


def statistics_of(rows: np.ndarray) -> InputStatistics:
    found = InputStatistics(rows.shape[1], total=len(rows), hessian=True)
    found.add(rows)
    return found


def recipe_for(folder: ModelFolder, sparsity: str, bits: int = KEPT, **options: Any) -> Recipe:
    names = products_of(folder)
    return Recipe(
        bits=dict.fromkeys(names, bits),
        sparsity=sparsity,
        pruned=tuple(names),
        scale_type=scale_type(folder),
        **options,
    )


def make(folder: ModelFolder, out: Path, recipe: Recipe, format: str) -> ModelFolder:
    compress_model(folder, out, PROMPTS, recipe, format=format).publish(out)
    return open_model(out)


def test_the_highest_scores_stay() -> None:
    scores = np.array([[4, 1, 3, 2, 9, 9, 9, 9]], dtype=np.float32)
    assert keep(scores, "2:4", by_row=True).tolist() == [[True, False, True, False, True, True, False, False]]
    assert keep(scores, "0.25", by_row=True).tolist() == [[True, False, True, False] + [True] * 4]
    rows = np.array([[1, 2], [3, 4]], dtype=np.float32)
    assert keep(rows, "0.5", by_row=False).tolist() == [[False, False], [True, True]]
    assert keep(rows, "0.5", by_row=True).tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_inputs_say_more_than_magnitudes(sparsity: str) -> None:
    rows = correlated(400, 160)
    weights = np.random.default_rng(2).standard_normal((48, 160)).astype(np.float32)
    errors: dict[str, float] = {}
    for pruner in PRUNERS:
        values = prune(weights, statistics_of(rows), pruner, sparsity)
        assert zeros(values) == pytest.approx(0.5, abs=0.002)
        if sparsity == "2:4":
            assert (np.count_nonzero(values.reshape(-1, 4), axis=1) <= 2).all()
        errors[pruner] = relative_error(weights, values, rows)
    assert errors["sparsegpt"] < 0.7 * errors["wanda"] < 0.7 * errors["magnitude"]


@pytest.mark.parametrize(
    ("sparsity", "format"), [("2:4", "sparse-bitmask"), ("0.6", "sparse-bitmask"), ("0.5", "dense")]
)
def test_what_is_stored_is_read(sparsity: str, format: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("llama").folder)
    dense = make(folder, tmp_path / "dense", recipe_for(folder, sparsity, pruner="wanda"), "dense")
    made = make(folder, tmp_path / "made", recipe_for(folder, sparsity, pruner="wanda"), format)
    for name in folder.shapes:
        assert np.array_equal(made.tensor(name).to_f32(), dense.tensor(name).to_f32()), name
    share = float(sparsity) if sparsity != "2:4" else 0.5
    assert zeros(made.tensor("layers.1.mlp.down").to_f32()) == pytest.approx(share, abs=0.02)
    assert np.array_equal(made.tensor("embed").data, folder.tensor("embed").data)
    if format == "dense":
        assert "quantization_config" not in json.loads((tmp_path / "made/config.json").read_text())
        return
    assert made.weights.total_bytes < folder.weights.total_bytes
    file = SafetensorsFile.open(tmp_path / "made/model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    mask = unpack_bitmasks(torch.tensor(file.stored(f"{layer}.bitmask").data), [64, 96])
    values = torch.zeros(64, 96)
    values[mask] = torch.tensor(file.stored(f"{layer}.compressed").to_f32()).reshape(-1)
    assert np.array_equal(values.numpy(), made.tensor("layers.0.mlp.down").to_f32())


def test_rounding_leaves_zeros_alone(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("llama").folder)
    recipe = recipe_for(folder, "2:4", 4, method="gptq", group=32, symmetric=False)
    made = make(folder, tmp_path / "made", recipe, "compressed-tensors")
    for name in products_of(folder):
        fours = made.tensor(name).to_f32().reshape(-1, 4)
        assert (np.count_nonzero(fours, axis=1) <= 2).all(), name


def test_a_mask_that_does_not_fit_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("llama").folder)
    made = make(folder, tmp_path / "made", recipe_for(folder, "0.5", pruner="magnitude"), "sparse-bitmask")
    path = tmp_path / "made/model.safetensors"
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    entry = msgspec.json.decode(bytes(data[8 : 8 + header]))["model.layers.0.mlp.down_proj.bitmask"]
    data[8 + header + entry["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"Marks 30.. weights, but 'compressed' has"):
        open_model(tmp_path / "made").tensor("layers.0.mlp.down")
    assert made.spec == folder.spec


def test_the_command_makes_zeros_and_measures_them(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old mill stands by the river, and its wheel turns. " * 20)
    out = tmp_path / "sparse"
    fast = ["--calibrate", str(text), "--window", "64", "--calibrate-tokens", "200", "--measure-tokens", "60"]
    options = ["--sparsity", "2:4", "--format", "sparse-bitmask", "--keep", "layers.0.*=16", "--no-speed", "-t", "2"]
    assert main(["compress", str(tiny("qwen3").folder), str(out), *options, *fast]) == 0
    assert "2:4 by sparsegpt" in capsys.readouterr().out
    made = open_model(out)
    assert zeros(made.tensor("layers.0.mlp.down").to_f32()) < 0.1
    assert zeros(made.tensor("layers.2.mlp.down").to_f32()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--sparsity", "1.5"], "'sparsity' must be 2:4 or a share between 0 and 1 such as 0.5, not 1.5."),
        (["--sparsity", "0.5", "--pruner", "best"], "Unknown pruner 'best'. Expected sparsegpt, wanda, magnitude."),
        (["--format", "sparse-bitmask"], "Pass --sparsity, and no --bits."),
        (["--sparsity", "0.5", "--bits", "4", "--format", "dense"], "dense holds no rounded weights."),
        (["--sparsity", "0.5", "--format", "bitsandbytes"], "bitsandbytes is for rounded weights."),
    ],
)
def test_a_wrong_flag_is_named(
    options: list[str], expected: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", str(tiny("llama").folder), str(tmp_path / "x"), *options]) in (1, 2)
    assert expected in " ".join(capsys.readouterr().err.split())
