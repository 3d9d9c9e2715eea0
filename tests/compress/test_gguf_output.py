"""GGUF files of `headrace compress`: our loader and the package gguf read the codes that were chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.llama_server import llama_server
from headrace import LLM
from headrace.cli import main
from headrace.compress.block_grids import BLOCK_TYPES, pack_blocks
from headrace.compress.compression import check_model, compress_model, products_of
from headrace.compress.grids import GridSpec, dequantise, fit, round_to_nearest
from headrace.compress.layer_pass import load_tensor
from headrace.compress.recipe import Recipe
from headrace.errors import RequestError
from headrace.models.formats.gguf_blocks import decode_rows
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.formats.gguf_writer import NewTensor, write_gguf
from headrace.models.model_folder import ModelFolder, open_model
from tests.models.tiny_models import Reference, prompt

Tiny = Callable[[str], Reference]
PROMPTS = [prompt(40, seed=each) for each in range(2)]
FAMILIES = ("llama", "mistral", "qwen2-yarn", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2")

WITHOUT_WINDOW = {"use_sliding_window": False, "layer_types": None, "sliding_window": None}
# What GGUF has a form for: the usual scale of scores, pattern of layers and windows.
CHANGED: dict[str, dict[str, Any]] = {
    "qwen3": WITHOUT_WINDOW,
    "smollm3": {**WITHOUT_WINDOW, "no_rope_layers": None, "no_rope_layer_interval": 4},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24, "layer_types": None, "sliding_window_pattern": 6},
}


def recipe_for(folder: ModelFolder, bits: int, method: str = "rtn", **options: Any) -> Recipe:
    each = dict.fromkeys(products_of(folder), bits)
    return Recipe(method=method, bits=each, gguf=True, scale_type="f16", **options)


def make(folder: ModelFolder, out: Path, recipe: Recipe) -> ModelFolder:
    compress_model(folder, out, PROMPTS, recipe, format="gguf").publish(out)
    return open_model(out)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_hold_the_values_that_were_fitted(name: str, clip: bool) -> None:
    weights = np.random.default_rng(0).standard_normal((9, 512)).astype(np.float32) * np.float32(0.05)
    weights[3], weights[4] = 0, np.abs(weights[4]) + 1  # nothing to scale; far from 0
    grid = fit(weights, GridSpec.of_blocks(name), clip=clip)
    codes = round_to_nearest(weights, grid)
    values = dequantise(codes, grid)
    assert grid.blocks is not None
    packed = pack_blocks(codes, name, grid.blocks)
    assert np.array_equal(decode_rows(packed, name), values)
    assert np.array_equal(gguf.dequantize(packed, gguf.GGMLQuantizationType[name]), values)
    spread = float(np.sqrt(np.square(values - weights)[:3].mean()) / 0.05)
    assert spread < {"Q8_0": 0.006, "Q6_K": 0.02}.get(name, 0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_that_is_read_is_written(name: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny(name).folder, source)
    config = json.loads((source / "config.json").read_text()) | CHANGED.get(name, {})
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    folder = open_model(source)
    made = make(folder, tmp_path / "small.gguf", recipe_for(folder, 8))
    for tensor in folder.shapes:
        one, other = load_tensor(folder, tensor), load_tensor(made, tensor)
        if one.ndim == 1:
            assert np.array_equal(one, other), tensor
        else:
            assert np.abs(one - other).max() <= np.abs(one).max() / 120, tensor
    assert made.tokenizer.encode("The old mill") == folder.tokenizer.encode("The old mill")


def test_the_file_holds_the_codes_that_gptq_chose(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("llama").folder)
    recipe = recipe_for(folder, 4, "gptq", symmetric=True)
    made = make(folder, tmp_path / "small.gguf", recipe)
    plain = make(folder, tmp_path / "plain.gguf", recipe_for(folder, 4, symmetric=True))
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == types["blk.2.ffn_down.weight"] == "Q4_0"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["output_norm.weight"] == "F32"
    stored = next(each for each in reader.tensors if each.name == "blk.1.ffn_down.weight")
    values = gguf.dequantize(stored.data, stored.tensor_type)
    assert np.array_equal(values, made.tensor("layers.1.mlp.down").to_f32())
    assert not np.array_equal(values, plain.tensor("layers.1.mlp.down").to_f32())
    assert made.weights.layout("blk.1.ffn_down.weight") is not None


def test_the_command_writes_a_file_that_runs(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old mill stands by the river, and its wheel turns. " * 20)
    out = tmp_path / "small.gguf"
    fast = ["--calibrate", str(text), "--window", "64", "--calibrate-tokens", "200", "--measure-tokens", "60"]
    arguments = ["compress", str(tiny("llama").folder), str(out), "--block-type", "q4_1", "--no-speed", *fast]
    assert main([*arguments, "--threads", "2"]) == 0
    assert "awq+gptq, GGUF with 4 bits, 5.00 bits per weight" in capsys.readouterr().out
    assert "| layers.0.attn.qkv | 4 |" in (tmp_path / "small.gguf.md").read_text()
    assert GgufFile.open(out).tensors["blk.0.attn_v.weight"].type == "Q4_1"
    assert main(["generate", str(out), "--prompt", "The old", "--max-tokens", "2", "--no-cache"]) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--bits", "5"], "GGUF files of 5 bits are not written."),
        (["--bits", "4.5"], "A GGUF file takes no mixed plan."),
        (["--block-type", "q5_k"], "Unknown block type 'q5_k'. Expected Q8_0, Q6_K, Q4_K, Q4_1, Q4_0."),
        (["--block-type", "q4_k"], "which is no multiple of the group 256. Choose another --block-type"),
        (["--method", "nf4"], "GGUF files have no nf4."),
        (["--format", "bitsandbytes"], "does not fit --format bitsandbytes"),
    ],
)
def test_a_wrong_flag_is_named(
    options: list[str], expected: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", str(tiny("llama").folder), str(tmp_path / "x.gguf"), *options]) in (1, 2)
    assert expected in " ".join(capsys.readouterr().err.split())


def test_a_model_without_a_form_in_gguf_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("cohere2").folder)
    with pytest.raises(RequestError, match="Headrace writes no GGUF files of Cohere2ForCausalLM"):
        check_model(folder, recipe_for(folder, 8))
    windowed = open_model(tiny("qwen3").folder)
    with pytest.raises(RequestError, match="what it reads back as differs in layers"):
        make(windowed, tmp_path / "x.gguf", recipe_for(windowed, 8))
    mini = open_model(Path(__file__).parents[2] / "src/headrace/models/bundled/mini")
    with pytest.raises(RequestError, match="GGUF has no name for the way"):
        check_model(mini, recipe_for(mini, 8))


def test_a_tensor_must_fill_its_shape(tmp_path: Path) -> None:
    piece = np.zeros(3, dtype=np.float32)
    with pytest.raises(ValueError, match="12 bytes do not fill"):
        write_gguf(tmp_path / "x.gguf", {}, {"a": NewTensor("F32", (4,), lambda: [piece])})
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("name", ["llama", "llama-linear-tied", "qwen2-yarn"])
def test_llama_cpp_computes_the_same(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Biases of all products, ropes of four kinds, tied and separate heads. It rounds activations, too."""
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: no llama.cpp to compare with")
    folder = open_model(tiny(name).folder)
    out = tmp_path / "small.gguf"
    make(folder, out, recipe_for(folder, 8))
    with llama_server(out, threads=2) as server:
        assert server.tokens("The old mill") == folder.tokenizer.encode("The old mill", False)
        prompts = (prompt(12, seed=seed) for seed in range(8))
        tokens, theirs = next((each, found) for each in prompts if (found := server.likeliest(each, 8)))
    with LLM(str(out), weights="f32") as engine:
        (first,) = engine.generate([tokens], max_tokens=1, temperature=0, logprobs=20)[0].completions[0].logprobs
    ours = dict(first.top)
    assert len(theirs) == 8
    assert all(abs(ours[token] - value) < 0.2 for token, value in theirs.items())
