"""Whole models: every family stays the same model, memory is bounded, and a killed run continues."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.compress.compression import check_model, compress_model, memory_needed, products_of, scale_type
from headrace.compress.disk_layout import DenseType, dense_type
from headrace.compress.layer_compression import LayerCompression
from headrace.compress.layer_pass import LayerPass, Tokens, embed, final_norm, head_logits, head_weight, load_layer
from headrace.compress.recipe import METHODS, Recipe
from headrace.errors import RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.model_folder import ModelFolder, open_model
from headrace.models.synthetic.public_shapes import find_shape
from headrace.models.synthetic.random_model import write_shape
from headrace.models.weight_choice import choose_plan
from tests.models.tiny_models import COMPRESSIBLE, Reference, prompt

Tiny = Callable[[str], Reference]
PROMPTS = [prompt(60, seed=each) for each in range(4)]


def recipe_for(folder: ModelFolder, method: str, bits: int, **options: object) -> Recipe:
    each = dict.fromkeys(products_of(folder), bits)
    return Recipe(method=method, bits=each, scale_type=scale_type(folder), **{"group": 0, **options})


def all_logits(folder: ModelFolder, prompts: Sequence[Sequence[int]] = PROMPTS) -> np.ndarray:
    tokens = Tokens.join(prompts)
    hidden = embed(folder, tokens)
    for index in range(len(folder.spec.layers)):
        hidden = LayerPass(folder.spec, index, load_layer(folder, index)).forward(hidden, tokens.offsets)
    return head_logits(folder.spec, hidden, final_norm(folder), head_weight(folder))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(one - other).sum() / np.square(other).sum())


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_moving_factors_changes_no_output(name: str, method: str, tiny: Tiny) -> None:
    folder = open_model(tiny(name).folder)
    tokens = Tokens.join(PROMPTS)
    tensors = load_layer(folder, 0)
    layer = LayerPass(folder.spec, 0, dict(tensors))
    hidden = embed(folder, tokens)
    before = layer.forward(hidden, tokens.offsets)
    recipe = recipe_for(folder, method, 3)
    bits = dict.fromkeys(tensors, 3)
    stored: dict[str, DenseType] = {each: dense_type(folder, f"layers.0.{each}") for each in tensors}
    LayerCompression(layer, hidden, tokens, recipe, bits, stored).move_factors()
    moved = [each for each in tensors if (layer.tensors[each] != tensors[each]).any()]
    # Only a gate, or a product before it, takes the factors of the product after the activation.
    assert "mlp.down" in moved or any("experts" in each for each in moved) or not folder.spec.gated
    assert ("attn.norm" in moved) == folder.spec.pre_norm
    np.testing.assert_allclose(layer.forward(hidden, tokens.offsets), before, atol=1e-4 * np.abs(before).max())


@pytest.mark.parametrize("method", ["awq+gptq", "smoothquant"])
@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_every_family_stays_the_same_model(name: str, method: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny(name).folder)
    recipe = recipe_for(folder, method, 8, symmetric=True)
    compress_model(folder, tmp_path / "small", PROMPTS, recipe).publish(tmp_path / "small")
    small = open_model(tmp_path / "small")
    assert not list(tmp_path.glob("*.partial"))
    assert small.weights.total_bytes < 0.6 * folder.weights.total_bytes or "moe" in name
    assert distance(all_logits(small), all_logits(folder)) < 3e-2
    stored = choose_plan(small).stored
    assert set(stored) == set(recipe.bits)
    assert all(precision.stored and precision.format == "int8" for precision in stored.values())


@pytest.mark.parametrize("method", METHODS)
def test_methods_keep_what_they_can_of_their_bits(method: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("smollm3").folder)
    nf4 = method.startswith("nf4")
    fp8 = method.startswith("fp8")
    recipe = recipe_for(folder, method, 8 if fp8 else 4, group=0 if fp8 or nf4 else 32)
    if nf4:
        widths = {name: folder.shapes[name][1] for name in recipe.bits}
        recipe = Recipe(method=method, bits={name: 4 if widths[name] % 64 == 0 else 16 for name in widths})
    out = tmp_path / "small"
    compress_model(folder, out, PROMPTS, recipe, format="bitsandbytes" if nf4 else "compressed-tensors").publish(out)
    small = open_model(out)
    error = distance(all_logits(small), all_logits(folder))
    assert 1e-6 < error < 0.6
    assert small.weights.layout(folder.sources["layers.0.attn.o"][0].name) is not None
    assert not fp8 or (error < 0.1 and choose_plan(small).name == "fp8")


def test_calibrated_rounding_is_closer_to_the_model_than_nearest(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("qwen3").folder)
    calibration = [prompt(200, seed=each) for each in range(20, 30)]
    expected = all_logits(folder)
    errors: dict[str, float] = {}
    for method in ("rtn", "gptq", "awq+gptq"):
        out = tmp_path / method
        compress_model(folder, out, calibration, recipe_for(folder, method, 3, group=32)).publish(out)
        errors[method] = distance(all_logits(open_model(out)), expected)
    assert errors["gptq"] < errors["rtn"]
    assert errors["awq+gptq"] < errors["rtn"]


def test_mixed_bits_and_kept_products_are_written_and_read(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("llama").folder)
    names = products_of(folder)
    bits = {name: (3, 4, 8, 16)[number % 4] for number, name in enumerate(names)}
    recipe = Recipe(method="awq+gptq", bits=bits, group=32, scale_type="f16")
    compress_model(folder, tmp_path / "small", PROMPTS, recipe).publish(tmp_path / "small")
    small = open_model(tmp_path / "small")
    for name, each in bits.items():
        layout = small.weights.layout(small.sources[name][0].name)
        assert (16 if layout is None else layout.bits) == each
    assert distance(all_logits(small), all_logits(folder)) < 0.5


RUN = """
import os, signal, sys
from pathlib import Path
from headrace.compress.compression import compress_model, products_of
from headrace.compress.recipe import Recipe
from headrace.models.config_json import ConfigJson
from headrace.models.families import model_spec
from headrace.models.model_folder import open_model
folder = open_model(Path(sys.argv[1]))
recipe = Recipe(bits=dict.fromkeys(products_of(folder), 4), group=64)
def watch(state):
    if state.doing == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
prompts = [[(7 * row + 3 * at) % 250 + 3 for at in range(40)] for row in range(6)]
made = compress_model(folder, Path(sys.argv[2]), prompts, recipe, watch=watch)
print(made.resumed)
made.publish(Path(sys.argv[2]))
"""


def test_a_killed_run_continues_to_the_same_bytes(tiny_folder: Path, tmp_path: Path) -> None:
    def run(name: str, die_at: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", RUN, str(tiny_folder), str(tmp_path / name), die_at]
        return subprocess.run(arguments, capture_output=True, text=True, check=False)

    layers = len(open_model(tiny_folder).spec.layers)
    assert layers >= 2
    assert run("whole", "").stdout == "0\n"
    assert run("killed", f"layer 2 of {layers}, mlp.down").returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    continued = run("killed", "")
    assert continued.stdout == "1\n", continued.stderr
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes(), file.name


def test_another_job_does_not_continue_the_work(tiny_folder: Path, tmp_path: Path) -> None:
    folder = open_model(tiny_folder)
    prompts = [[5, 6, 7, 8]]
    compress_model(folder, tmp_path / "out", prompts, recipe_for(folder, "rtn", 4))
    with pytest.raises(RequestError, match="pass --restart to begin again"):
        compress_model(folder, tmp_path / "out", prompts, recipe_for(folder, "rtn", 3))
    compress_model(folder, tmp_path / "out", prompts, recipe_for(folder, "rtn", 3), restart=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(RequestError, match="exists"):
        compress_model(folder, tmp_path / "out", prompts, recipe_for(folder, "rtn", 3))


def test_memory_is_bounded_by_the_formula_and_not_by_the_layers(tmp_path: Path) -> None:
    prompts = [[(row + at) % 250 for at in range(64)] for row in range(8)]
    peaks: list[int] = []
    for layers in (2, 6):
        path = tmp_path / f"model-{layers}"
        shape = find_shape("tiny")
        config = {**shape.config, "num_hidden_layers": layers}
        write_shape(msgspec.structs.replace(shape, config=config), path, "bf16", 1)
        folder = open_model(path)
        recipe = recipe_for(folder, "awq+gptq", 4)
        tracemalloc.start()
        compress_model(folder, tmp_path / f"out-{layers}", prompts, recipe)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert peaks[-1] < memory_needed(folder.spec, 64 * 8, 64, recipe)
    assert peaks[1] < 1.3 * peaks[0]


def test_what_cannot_be_compressed_is_refused_by_name(tiny: Tiny) -> None:
    encoder = open_model(tiny("bert").folder)
    with pytest.raises(RequestError, match="BertModel is an encoder"):
        check_model(encoder, Recipe())
    file: Any = SimpleNamespace(spec=open_model(tiny("llama").folder).spec, path=Path("small.gguf"))
    with pytest.raises(RequestError, match=r"small.gguf is a GGUF file. Pass the folder"):
        check_model(file, Recipe())
    for name, reason in (
        ("cohere", "the layers of CohereForCausalLM"),
        ("glm", "GlmForCausalLM keeps the rows .* in pairs"),
    ):
        with pytest.raises(RequestError, match=reason):
            check_model(open_model(tiny(name).folder), Recipe())
    folder = open_model(tiny("llama").folder)
    with pytest.raises(RequestError, match=r"has 96 inputs, which is no multiple of the group 64"):
        check_model(folder, recipe_for(folder, "rtn", 4, group=64))


def test_seven_billion_weights_fit_into_24_gigabytes() -> None:
    values = {**find_shape("mistral-7b").config, "architectures": ["MistralForCausalLM"]}
    spec = model_spec(ConfigJson(values, path=Path("config.json")))
    assert memory_needed(spec, 128 * 2048, 2048, Recipe()) < 24e9
