"""Block types of GGUF: every value equals that of the reference, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headrace.models.formats.gguf_blocks import BLOCKS, TABLES, TYPE_NAMES, decode_rows, exact_codes

SIZES = {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name in BLOCKS}


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bytes_decode_as_the_reference_decodes_them(name: str) -> None:
    weights, size = SIZES[name]
    rows = np.random.default_rng(7).integers(0, 256, (24, 6 * size), dtype=np.uint8)

    values = decode_rows(rows, name)

    with np.errstate(all="ignore"):
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name]).astype(np.float32)
    assert values.shape == (24, 6 * weights)
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.5
    np.testing.assert_array_equal(np.isnan(values), ~numbers)
    np.testing.assert_array_equal(values.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_that_the_reference_quantised_come_back_close(name: str) -> None:
    source = np.random.default_rng(3).normal(0, 0.05, (8, 64)).astype(np.float32)
    rows = gguf.quantize(source, gguf.GGMLQuantizationType[name]).view(np.uint8)

    values = decode_rows(rows, name)

    np.testing.assert_allclose(values, source, atol=0.02)


def test_sizes_and_numbers_of_types_are_those_of_the_reference() -> None:
    assert {name: (block.weights, block.bytes) for name, block in BLOCKS.items()} == SIZES
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: name for number, name in known.items() if number in TYPE_NAMES} == dict(TYPE_NAMES)


@pytest.mark.parametrize(("name", "zero"), [("Q8_0", 128), ("Q4_0", 8)])
def test_codes_and_scales_give_the_same_values_exactly(name: str, zero: int) -> None:
    source = np.random.default_rng(5).normal(0, 0.1, (16, 96)).astype(np.float32)
    rows = gguf.quantize(source, gguf.GGMLQuantizationType[name])

    codes, scales, offsets = exact_codes(rows, name)
    assert offsets is None

    values = (codes.astype(np.float32) - zero).reshape(16, 3, 32) * scales[:, :, None]
    np.testing.assert_array_equal(values.reshape(16, 96), decode_rows(rows, name))


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS"])
def test_codes_for_a_table_give_the_same_values_exactly(name: str) -> None:
    weights, size = SIZES[name]
    blocks = np.random.default_rng(6).integers(0, 256, (24, size), dtype=np.uint8)
    blocks[:, :2] = np.array([0.37], np.float16).view(np.uint8)
    rows = blocks.reshape(8, -1)

    codes, scales, offsets = exact_codes(rows, name)
    assert offsets is None

    assert codes.max() == 15
    values = TABLES["iq4"][codes].astype(np.float32).reshape(8, -1, 32) * scales[:, :, None]
    np.testing.assert_array_equal(values.reshape(8, 3 * weights), decode_rows(rows, name))


def test_many_rows_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(9).integers(0, 100, (37, 2 * SIZES["Q4_K"][1]), dtype=np.uint8)
    whole = decode_rows(rows, "Q4_K")
    monkeypatch.setattr("headrace.models.formats.gguf_blocks._DECODED", 1024)
    np.testing.assert_array_equal(decode_rows(rows, "Q4_K"), whole)
