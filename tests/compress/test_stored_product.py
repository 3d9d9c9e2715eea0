"""Stored codes against the packages that define the formats: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme

from headrace.compress.grids import GridSpec, dequantise, fit, round_to_nearest
from headrace.compress.nested_scales import NESTED_TABLE
from headrace.compress.stored_product import store_codes
from headrace.compress.work_folder import as_pieces
from headrace.models.config_json import ConfigJson
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.formats.quantised_layer import pack_bits, unpack_bits
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.quantised.quantised_weights import QuantisedWeights, read_scheme

OUTPUTS, INPUTS = 40, 192


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_bits_are_read_back(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 77)).astype(np.uint8)
    assert (unpack_bits(pack_bits(codes, bits), bits, 77) == codes).all()


def as_torch(stored: dict[str, tuple[str, Any]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, data) in stored.items():
        tensor = torch.from_numpy(np.array(data.view(np.int16) if dtype == "BF16" else data))
        found[name.removeprefix("layer.")] = tensor.view(torch.bfloat16) if dtype == "BF16" else tensor
    return found


@pytest.mark.parametrize("plain_int8", [False, True])
@pytest.mark.parametrize(("group", "symmetric"), [(64, True), (64, False), (0, True), (0, False)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_reads_the_same_weights(
    bits: int, group: int, symmetric: bool, plain_int8: bool, tmp_path: Path
) -> None:
    if plain_int8 and (bits != 8 or not symmetric):
        pytest.skip("bytes hold only symmetric int8")
    weights = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    spec = GridSpec(bits=bits, group=group, symmetric=symmetric)
    grid = fit(weights, spec)
    codes = round_to_nearest(weights, grid)
    expected = dequantise(codes, grid)
    stored = store_codes("layer.weight", codes, grid, plain_int8=plain_int8)
    described = {
        "num_bits": bits,
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=described)
    compressor = IntQuantizationCompressor if plain_int8 else PackedQuantizationCompressor
    tensors = as_torch(stored)
    tensors["weight_scale"] = tensors["weight_scale"].float()  # their product is rounded once
    found = compressor.decompress(tensors, scheme)["weight"].float().numpy()
    assert (found == expected).all()

    write_safetensors(tmp_path / "model.safetensors", as_pieces(stored))
    name = "int-quantized" if plain_int8 else "pack-quantized"
    section = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": described}},
    }
    read = read_scheme(ConfigJson({"quantization_config": section}, path=tmp_path / "config.json"))
    assert read is not None
    ours = QuantisedWeights(ModelWeights.open(tmp_path), read)
    assert (ours.dense("layer.weight").data == expected).all()


def test_nf4_is_what_bitsandbytes_layers_hold(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    grid = fit(weights, GridSpec(bits=4, group=64, kind="nf4", scale_type="f32"))
    codes = round_to_nearest(weights, grid)
    write_safetensors(tmp_path / "model.safetensors", as_pieces(store_codes("layer.weight", codes, grid)))
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    read = read_scheme(ConfigJson({"quantization_config": section}, path=tmp_path / "config.json"))
    assert read is not None
    ours = QuantisedWeights(ModelWeights.open(tmp_path), read)
    assert (ours.dense("layer.weight").data == dequantise(codes, grid)).all()


def test_magnitudes_of_blocks_are_rounded_and_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((60, 320)).astype(np.float32) * np.exp(rng.standard_normal((60, 1))).astype(
        np.float32
    )
    weights[7] = 0
    parts = (37, 23)  # neither has whole blocks of magnitudes
    grid = fit(weights, GridSpec(bits=4, group=64, kind="nf4", scale_type="f32", nested=True), parts=parts)
    codes = round_to_nearest(weights, grid)
    expected = dequantise(codes, grid)
    stored, begin = {}, 0
    for number, rows in enumerate(parts):
        part = slice(begin, begin + rows)
        stored |= store_codes(f"layer{number}.weight", codes[part], grid.rows(part))
        begin += rows
    write_safetensors(tmp_path / "model.safetensors", as_pieces(stored))
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = ConfigJson({"quantization_config": section}, path=tmp_path / "config.json")
    scheme = read_scheme(config)
    assert scheme is not None
    tensors = QuantisedWeights(ModelWeights.open(tmp_path), scheme)
    found = [tensors.dense(f"layer{number}.weight").to_f32() for number in range(len(parts))]
    assert np.array_equal(np.concatenate(found), expected)
    assert not expected[7].any()
    plain = fit(weights, GridSpec(bits=4, group=64, kind="nf4", scale_type="f32"))
    loss, least = (
        float(np.square(values - weights).sum())
        for values in (expected, dequantise(round_to_nearest(weights, plain), plain))
    )
    assert loss < 1.05 * least
    bits = sum(data.nbytes for name, (_, data) in stored.items() if "absmax" in name) * 8 / weights.size
    assert bits < 0.14  # a magnitude in f32 takes 0.5


def test_the_table_of_magnitudes_is_that_of_bitsandbytes() -> None:
    # create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8)
    assert len(NESTED_TABLE) == 256
    assert (np.diff(NESTED_TABLE) > 0).all()
    assert NESTED_TABLE[127] == 0
    np.testing.assert_allclose(
        NESTED_TABLE[[0, 126, 128, 254, 255]], [-0.99297, -5.5e-7, 5.5e-7, 0.99297, 1], rtol=1e-4
    )
