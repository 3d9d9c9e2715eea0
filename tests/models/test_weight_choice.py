"""The precision of a quantised file's weights when the user names none: its own codes, or what loses least."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import ModelError
from headrace.models.model_folder import open_model
from headrace.models.packing import load_tensors, packed_size
from headrace.models.precision import Precision, WeightFormat
from headrace.models.weight_choice import choose_plan, describe_choice, prediction_tensors
from tests.core.tiny import ROUNDS_ROWS
from tests.models.quantised.quantised_models import (
    FP4,
    GROUP,
    NF4,
    SCHEMES,
    Built,
    build_quantised,
    four_bits,
    gptq,
)
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import build, prompt

OWN = {
    "gptq-2": ("int2", GROUP, True),
    "gptq-3": ("int3", GROUP, True),
    **dict.fromkeys(("gptq-4", "gptq-4-v2", "awq", "ct-w4a16-asymmetric"), ("int4", GROUP, True)),
    **dict.fromkeys(("gptq-4-symmetric", "ct-w4a16"), ("int4", GROUP, False)),
    "ct-w3a16": ("int3", GROUP, False),
    "gptq-8": ("int8", GROUP, True),
    "gptq-8-rows": ("int8", 128, True),
    **dict.fromkeys(("ct-w8a16-channel", "ct-w8a8", "ct-w8a8-tensor", "bnb-int8"), ("int8", 128, False)),
}
OWN_FP8: dict[str, Precision] = {
    **dict.fromkeys(("fp8-tensor", "fp8-rows", "ct-fp8", "ct-fp8-tensor"), Precision("fp8", stored=True)),
    "fp8-e5m2": Precision("fp8e5m2", stored=True),
    "ct-fp8-block": Precision("fp8", 32, stored=True),
}
RICHER = ("gptq-3-v2-act-order", "gptq-4-act-order", "bnb-nf4", "bnb-nf4-nested", "bnb-fp4")


def test_every_scheme_has_a_choice() -> None:
    assert {*OWN, *OWN_FP8, *RICHER, "fp8-blocks"} == set(SCHEMES)


@pytest.mark.parametrize("name", OWN)
def test_codes_are_kept_as_they_are(name: str, built: Built) -> None:
    folder = open_model(built(name).folder)
    plan = choose_plan(folder)
    kind, group, zeros = OWN[name]
    expected = Precision(kind, group, stored=True, zeros=zeros)  # pyright: ignore[reportArgumentType]
    assert plan.precision("layers.0.attn.qkv") == plan.precision("layers.1.mlp.down") == expected
    assert plan.precision("embed") == plan.precision("head") == Precision("bf16")
    assert plan.name == expected.name
    assert describe_choice(folder, plan).endswith("the codes in the files")
    loaded = load_tensors(folder, plan, _core.Pool(1), cache=None)
    assert loaded.bytes == packed_size(folder.spec, folder.shapes, plan)
    packed = loaded.tensors["layers.1.mlp.down"]
    assert isinstance(packed, _core.Packed)
    dense = folder.tensor("layers.1.mlp.down").to_f32()
    error = np.abs(packed.unpack() - dense).max() / np.abs(dense).max()
    assert error < 2.0**-11  # of scales that f16 does not hold
    if "gptq" in name or name == "awq":
        assert error < 2.0**-23  # their scales are f16 themselves


@pytest.mark.parametrize("name", RICHER)
def test_codes_without_a_layout_are_repacked_richer(name: str, built: Built) -> None:
    folder = open_model(built(name).folder)
    plan = choose_plan(folder)
    assert plan.name == "int8-g32"
    assert not plan.precision("layers.0.mlp.gate_up").stored
    assert describe_choice(folder, plan).startswith("int8-g32 from ")


@pytest.mark.parametrize("name", OWN_FP8)
def test_fp8_numbers_and_their_scales_are_kept_exactly_in_eight_bits(name: str, built: Built) -> None:
    quantised = built(name)
    folder = open_model(quantised.folder)
    plan = choose_plan(folder)
    expected = OWN_FP8[name]
    assert plan.precision("layers.0.attn.qkv") == plan.precision("layers.1.mlp.down") == expected
    assert plan.name == expected.name
    assert describe_choice(folder, plan).endswith("the codes in the files")
    loaded = load_tensors(folder, plan, _core.Pool(1), cache=None)
    assert loaded.bytes == packed_size(folder.spec, folder.shapes, plan)
    for tensor in ("layers.1.mlp.down", "layers.0.attn.o"):
        packed = loaded.tensors[tensor]
        assert isinstance(packed, _core.Packed)
        assert np.array_equal(packed.unpack(), folder.tensor(tensor).to_f32())


@pytest.mark.parametrize("name", OWN_FP8)
def test_fp8_weights_give_the_logits_of_the_dequantised_model(name: str, built: Built) -> None:
    quantised = built(name)
    tokens = prompt(40)
    keep = ["embed=f32", "head=f32"]
    executor = CpuExecutor.load(open_model(quantised.folder), keep=keep, kv="f32", threads=2, context=CONTEXT)
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    expected = quantised.logits(tokens)
    # On some instruction sets rows are rounded to bf16.
    bound = 2e-2 if executor.isa in ROUNDS_ROWS else 1e-5
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)


def test_fp8_blocks_that_no_group_fits_become_bf16_which_loses_less_than_integers(built: Built) -> None:
    folder = open_model(built("fp8-blocks").folder)  # of 40 rows by 28 inputs
    plan = choose_plan(folder)
    assert plan.name == "bf16"
    assert describe_choice(folder, plan) == "bf16 from FP8: it loses less than integers"
    errors: dict[str, float] = {}
    for weights in ("bf16", "int8-g32"):
        packed = load_tensors(folder, choose_plan(folder, weights), _core.Pool(1), cache=None).tensors
        found = packed["layers.0.mlp.down"]
        assert isinstance(found, _core.Packed)
        dense = folder.tensor("layers.0.mlp.down").to_f32()
        errors[weights] = float(np.square(found.unpack() - dense).sum())
    assert errors["bf16"] < errors["int8-g32"]


def test_weights_are_rounded_to_fp8_if_asked(built: Built) -> None:
    folder = open_model(built("gptq-4").folder)
    plan = choose_plan(folder, "fp8")
    assert plan.name == "fp8"
    assert not plan.precision("layers.0.attn.o").stored
    packed = load_tensors(folder, plan, _core.Pool(1), cache=None).tensors["layers.0.attn.o"]
    assert isinstance(packed, _core.Packed)
    dense = folder.tensor("layers.0.attn.o").to_f32()
    assert 0 < np.abs(packed.unpack() - dense).max() <= np.abs(dense).max() * 2.0**-4


@pytest.mark.parametrize("name", ["gptq-4", "awq", "ct-w4a16", "ct-w8a8", "gptq-4-act-order", "bnb-nf4", "fp8-blocks"])
def test_the_chosen_precision_computes_what_the_dequantised_model_does(name: str, built: Built) -> None:
    quantised = built(name)
    tokens = prompt(40)
    executor = CpuExecutor.load(open_model(quantised.folder), kv="f32", threads=2, context=CONTEXT)
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    expected = quantised.logits(tokens)
    # Activations are rounded to 8 bits beside integer weights, and these weights are random.
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "ct-w8a8"])
def test_stored_codes_meet_rows_that_are_not_quantised_if_asked(name: str, built: Built) -> None:
    quantised = built(name)
    folder = open_model(quantised.folder)
    plan = choose_plan(folder, "auto-a16")
    assert plan.name == f"{choose_plan(folder).name}-a16"
    assert plan.precision("embed") == Precision("bf16")
    tokens = prompt(40)
    keep = ["embed=f32", "head=f32"]  # on some instruction sets bf16 rounds rows
    executor = CpuExecutor.load(folder, weights="auto-a16", keep=keep, kv="f32", threads=2, context=CONTEXT)
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    expected = quantised.logits(tokens)
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(("table", "kind"), [(NF4, "nf4"), (FP4, "fp4")])
def test_a_table_that_whole_numbers_come_near_to_is_kept_beside_rows_of_floats(
    table: tuple[float, ...], kind: WeightFormat, tmp_path: Path
) -> None:
    folder = open_model(build_quantised(four_bits(table, kind, nested=True, block=32), tmp_path).folder)
    assert choose_plan(folder).name == "int8-g32"
    plan = choose_plan(folder, "auto-a16")
    expected = Precision(kind, 32, stored=True, float_rows=True)
    assert plan.precision("layers.0.mlp.gate_up") == expected
    loaded = load_tensors(folder, plan, _core.Pool(1), cache=None)
    assert loaded.bytes == packed_size(folder.spec, folder.shapes, plan)
    packed = loaded.tensors["layers.1.mlp.down"]
    assert isinstance(packed, _core.Packed)
    dense = folder.tensor("layers.1.mlp.down").to_f32()
    assert np.abs(packed.unpack() - dense).max() < 0.0045 * np.abs(dense).max()
    codes = folder.weights.codes(folder.sources["layers.1.mlp.down"][0].name)
    assert codes is not None
    assert np.abs(codes.dense() - packed.unpack()).max() < 2.0**-11 * np.abs(dense).max()  # the core has the same table


def test_a_named_precision_and_keep_win(built: Built) -> None:
    folder = open_model(built("gptq-4").folder)
    assert choose_plan(folder, "int8").precision("layers.0.attn.o") == Precision("int8", 128, rotated=True)
    plan = choose_plan(folder, keep=["layers.0.attn.*=f32"])
    assert plan.precision("layers.0.attn.o") == Precision("f32")
    assert plan.precision("layers.1.attn.o").stored


def test_a_model_that_is_not_quantised_is_bf16() -> None:
    folder = open_model(Path(__file__).parents[2] / "src/headrace/models/bundled/draft")
    plan = choose_plan(folder)
    assert plan == choose_plan(folder, "bf16")
    assert describe_choice(folder, plan) == ""


def test_packed_codes_are_mapped_on_the_next_start(built: Built, tmp_path: Path) -> None:
    folder = open_model(built("awq").folder)
    plan = choose_plan(folder)
    first = load_tensors(folder, plan, _core.Pool(1), cache=tmp_path).tensors["layers.0.mlp.gate_up"]
    again = load_tensors(folder, plan, _core.Pool(1), cache=tmp_path)
    second = again.tensors["layers.0.mlp.gate_up"]
    assert again.mapped
    assert isinstance(first, _core.Packed)
    assert isinstance(second, _core.Packed)
    assert np.array_equal(first.unpack(), second.unpack())


def test_zeros_of_a_file_that_claims_to_be_symmetric_are_refused(tmp_path: Path) -> None:
    scheme = gptq(4)
    scheme.config["sym"] = True
    folder = open_model(build_quantised(scheme, tmp_path).folder)
    with pytest.raises(ModelError, match="Has zeros other than 8") as caught:
        load_tensors(folder, choose_plan(folder), _core.Pool(1), cache=None)
    assert caught.value.tensor == "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "key", "extra"),
    [
        ("deepseek-v3", "num_nextn_predict_layers", ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight")),
        ("qwen3.5", "mtp_num_hidden_layers", ("mtp.fc.weight", "mtp.layers.0.mlp.down_proj.weight")),
    ],
)
def test_layers_that_predict_further_tokens_are_named_and_not_used(
    name: str, key: str, extra: tuple[str, ...], tmp_path: Path
) -> None:
    build(name, tmp_path)
    plain = open_model(tmp_path)
    assert prediction_tensors(plain) == []
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), **{each: torch.zeros(4, 4) for each in extra}}, path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), key: 1}))
    folder = open_model(tmp_path)
    assert folder.spec == plain.spec
    assert prediction_tensors(folder) == sorted(extra)
    expected = "2 tensors of layers that predict further tokens are not used"
    assert describe_choice(folder, choose_plan(folder)).startswith(expected)
