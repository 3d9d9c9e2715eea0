"""Every architecture in GGUF files computes what its folder does, which the golden tests compare with transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import headrace._core as _core
from headrace.errors import ModelError
from headrace.models.gguf.gguf_architectures import ARCHITECTURES
from headrace.models.model_folder import open_model, with_expanded_kv
from headrace.models.packing import load_tensors
from headrace.models.precision import Precision
from headrace.models.weight_choice import choose_plan, describe_choice
from tests.models.gguf.converted import write_converted
from tests.models.gguf.gguf_configs import MADE, build_folder
from tests.models.gguf.test_gguf_models import headrace_logits
from tests.models.tiny_models import prompt

# Models that are a file of an architecture with another name.
FILES = {
    "mixtral": "llama",
    "gemma4-experts": "gemma4",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "command-r-plus": "command-r",
    "exaone4-full": "exaone4",
    "stablelm-12b": "stablelm",
    "bamba": "granitehybrid",
    "granitehybrid-dense": "granitehybrid",
    "deepseek2-lite": "deepseek2",
    "deepseek3": "deepseek2",
    "falcon-40b": "falcon",
}
TOKENS = prompt(40)  # more than a window


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    build_folder("qwen3moe", folder)
    return folder


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    build_folder(name, tmp_path)
    write_converted(tmp_path, tmp_path / "model.gguf", FILES.get(name, name))

    expected, found = (headrace_logits(path, TOKENS) for path in (tmp_path, tmp_path / "model.gguf"))

    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_each_expert_keeps_the_codes_of_its_part(tmp_path: Path) -> None:
    build_folder("qwen3moe", tmp_path, moe_intermediate_size=64)
    file = tmp_path / "model.gguf"
    write_converted(tmp_path, file, "qwen3moe", {"_exps.weight": "Q8_0", "ffn_down_exps.weight": "Q4_0"})
    model = open_model(file)
    whole = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}

    plan = choose_plan(model)
    assert plan.stored["layers.1.mlp.experts.5.gate_up"] == Precision("int8", 32, stored=True)
    assert model.weights.block_type("blk.1.ffn_up_exps.5.weight") == "Q8_0"  # pyright: ignore
    for kind in ("gate", "up", "down"):
        codes = model.weights.codes(f"blk.1.ffn_{kind}_exps.5.weight")
        assert codes is not None
        assert np.array_equal(codes.dense(), whole[f"blk.1.ffn_{kind}_exps.weight"][5])
    packed = load_tensors(model, plan, _core.Pool(1), cache=None).tensors["layers.1.mlp.experts.5.down"]
    assert isinstance(packed, _core.Packed)
    assert np.allclose(packed.unpack(), whole["blk.1.ffn_down_exps.weight"][5], atol=1e-6)


def test_codes_of_heads_in_turns_are_put_in_our_order(tmp_path: Path) -> None:
    build_folder("qwen35", tmp_path, linear_value_head_dim=32)
    write_converted(tmp_path, tmp_path / "model.gguf", "qwen35", {"ssm_out.weight": "Q8_0", "attn_gate.weight": "Q8_0"})
    model, folder = open_model(tmp_path / "model.gguf"), open_model(tmp_path)
    plan = choose_plan(model)
    name = "layers.0.recurrent.out"
    assert plan.stored[name].stored
    packed = load_tensors(model, plan, _core.Pool(1), cache=None).tensors[name]
    assert isinstance(packed, _core.Packed)
    exact = folder.tensor(name).to_f32()
    assert 0 < np.abs(packed.unpack() - exact).max() < 0.01 * np.abs(exact).max()


def test_latents_of_a_file_can_be_expanded(tmp_path: Path) -> None:
    build_folder("deepseek3", tmp_path)
    write_converted(tmp_path, tmp_path / "model.gguf", "deepseek2")
    folder, file = (with_expanded_kv(open_model(path)) for path in (tmp_path, tmp_path / "model.gguf"))
    assert file.spec.kv_shapes == folder.spec.kv_shapes != open_model(tmp_path / "model.gguf").spec.kv_shapes
    for layer in range(len(folder.spec.layers)):
        name = f"layers.{layer}.attn.kv_up"
        assert np.array_equal(file.tensor(name).to_f32(), folder.tensor(name).to_f32())


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    build_folder("qwen35moe", tmp_path)

    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("block_count", "attention.recurrent_layers"):
            value = writer.kv_data[0].pop(f"qwen35moe.{key}").value
            if key == "block_count":
                writer.add_block_count(value + 1)
            else:
                writer.add_array(f"qwen35moe.{key}", [*value, False])
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
        writer.add_tensor("blk.4.attn_q.weight", np.ones((64, 64), np.float32))

    write_converted(tmp_path, tmp_path / "model.gguf", "qwen35moe", change=change)
    model = open_model(tmp_path / "model.gguf")
    assert len(model.spec.layers) == 4
    assert "2 tensors of layers that predict further tokens are not used" in describe_choice(model, choose_plan(model))
    expected, found = (headrace_logits(path, TOKENS) for path in (tmp_path, tmp_path / "model.gguf"))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("tensor", "key", "value", "reason"),
    [
        ("blk.1.ffn_gate_exps.scale", "", 0, "tensor 'blk.1.ffn_gate_exps.scale': Headrace does not know this tensor"),
        ("blk.1.ffn_up.weight", "", 0, "tensor 'blk.1.ffn_up.weight': Headrace does not know this tensor"),
        ("", "expert_gating_func", 2, "'qwen3moe.expert_gating_func': Experts must be weighed by function 1. Found 2"),
        ("", "expert_weights_scale", 3, "'qwen3moe.expert_weights_scale': Weights of experts must not be scaled"),
        ("", "expert_shared_count", 1, "'qwen3moe.expert_shared_count': Headrace does not know this key"),
        ("", "expert_count", 9, "tensor 'blk.0.ffn_gate_inp.weight': Has shape 8x64. Expected 9x64 from the metadata"),
        ("", "nextn_predict_layers", 3, "'qwen3moe.nextn_predict_layers': Expected less than 3, found 3"),
    ],
)
def test_what_an_architecture_does_not_have_is_refused(
    tensor: str, key: str, value: int, reason: str, mixture: Path, tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        if tensor:
            writer.add_tensor(tensor, np.ones(64, np.float32))
        else:
            writer.kv_data[0].pop(f"qwen3moe.{key}", None)
            writer.add_uint32(f"qwen3moe.{key}", value)

    write_converted(mixture, tmp_path / "model.gguf", "qwen3moe", change=change)
    with pytest.raises(ModelError) as caught:
        open_model(tmp_path / "model.gguf")
    assert reason in str(caught.value)


def test_every_architecture_is_compared() -> None:
    elsewhere = {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2"}
    embedders = {"bert", "nomic-bert", "modern-bert", "gemma-embedding"}
    images = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
    compared = {FILES.get(name, name) for name in MADE}
    assert compared | elsewhere | embedders | images == ARCHITECTURES.keys()
