"""FP8 weights: kept exactly in 8 bits, scales in f32, and multiplied as bf16 weights are, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import aligned_bytes
from headrace.models.precision import WeightFormat
from tests.core.reference import bf16
from tests.core.test_layout import group_of, matrix
from tests.core.test_products import MANY, from_codes, product, random_rows
from tests.core.tiny import ISAS, ROUNDS_ROWS, SPECS, Floats, Share, Tiny, packed, same_bits, text

TYPES: dict[WeightFormat, torch.dtype] = {"fp8": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2}
SHAPES = [(1, 1), (33, 31), (70, 300), (96, 256)]  # outputs, inputs
GROUPS = (32, 0, 128, 64)  # of each shape
COUNTS = (1, 2, 7, 9, 13, 25)  # rows: what a pass takes, more, and so many that numbers are widened first


def table_of(format: WeightFormat) -> Floats:
    """What each byte stands for, by PyTorch."""
    return torch.arange(256, dtype=torch.uint8).view(TYPES[format]).float().numpy()


def random_numbers(format: WeightFormat, outputs: int, inputs: int, group: int) -> tuple[NDArray[np.uint8], Floats]:
    """Every finite number, those without an exponent too, and scales that f16 does not hold."""
    random = np.random.default_rng(3)
    finite = np.flatnonzero(np.isfinite(table_of(format))).astype(np.uint8)
    codes = random.choice(finite, (outputs, inputs))
    groups = -(-inputs // group_of(group, inputs))
    return codes, random.uniform(-1e-6, 1e-6, (outputs, groups)).astype(np.float32)


def weights_of(format: WeightFormat, shape: tuple[int, int], group: int) -> tuple[_core.Packed, Floats]:
    codes, scales = random_numbers(format, *shape, group)
    each = np.arange(shape[1]) // group_of(group, shape[1])
    return from_codes(codes, scales, None, format, group), table_of(format)[codes] * scales[:, each]


@pytest.mark.parametrize("format", TYPES)
def test_numbers_and_scales_of_a_file_are_kept_exactly(format: WeightFormat) -> None:
    for shape, group in zip(SHAPES, GROUPS, strict=True):
        weights, dense = weights_of(format, shape, group)
        assert same_bits(weights.unpack(), dense)


def test_a_number_takes_eight_bits() -> None:
    assert _core.packed_bytes("fp8", 64, 256, 0) == 64 * 256 + 64 * 4
    assert _core.packed_bytes("fp8e5m2", 64, 256, 128) == 64 * 256 + 2 * 64 * 4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", TYPES)
def test_products_are_numpys_and_have_the_same_bits_for_any_number_of_rows(format: WeightFormat, isa: str) -> None:
    for shape, group in zip(SHAPES, GROUPS, strict=True):
        weights, dense = weights_of(format, shape, group)
        rows = random_rows(MANY, shape[1])
        read = bf16(rows.astype(np.float64)) if isa in ROUNDS_ROWS else rows.astype(np.float64)
        found = product(weights, rows, shape[0], isa)
        bound = 1e-6 * (np.abs(read) @ np.abs(dense.astype(np.float64)).T)
        assert (np.abs(found - read @ dense.astype(np.float64).T) <= bound).all()
        for count in COUNTS:
            assert same_bits(product(weights, rows[:count], shape[0], isa, threads=1 + count % 3), found[:count]), count


def test_instruction_sets_that_do_not_round_rows_give_the_same_bits() -> None:
    weights, _ = weights_of("fp8", (70, 300), 0)
    rows = random_rows(MANY, 300)
    found = {product(weights, rows, 70, isa).tobytes() for isa in ISAS if isa not in ROUNDS_ROWS}
    assert len(found) == 1


@pytest.mark.parametrize("group", [32, 0])
def test_rounding_is_to_the_nearest_number_with_the_largest_weight_at_448(group: int) -> None:
    weights = matrix(70, 300)
    weights[3] = 0
    weights[4, 7] = 1e4  # beside which the others have no exponent
    size = group_of(group, 300)
    padded = np.zeros((70, -(-300 // size) * size), np.float32)
    padded[:, :300] = weights
    parts = padded.reshape(70, -1, size)
    scales = np.abs(parts).max(axis=2, keepdims=True) / np.float32(448)
    scaled = np.divide(parts, scales, out=np.zeros_like(parts), where=scales > 0)
    rounded = torch.from_numpy(scaled).to(torch.float8_e4m3fn).float().numpy() * scales
    assert same_bits(packed(weights, "fp8", group).unpack() + 0, rounded.reshape(70, -1)[:, :300] + 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["everything", "experts"])
def test_company_chunks_and_threads_change_no_bit(name: str, isa: str) -> None:
    model = SPECS[name]
    tokens = text(70, model)
    tiny = Tiny(model, "fp8", 0, isa=isa)
    alone = tiny.rows(tokens, (0, 1, 2, 3, 4))
    assert np.isfinite(alone).all()
    shares = [Share(text(3, model, seed=1), 0, (5,)), Share(tokens, 0, (6, 7, 8, 9, 10))]
    for threads in (1, 3):
        other = Tiny(model, "fp8", 0, isa=isa, threads=threads)
        assert same_bits(other.step(shares)[3:], alone)
        assert same_bits(other.rows(tokens, (11, 12, 13, 14, 15), chunk=7), alone)


def test_what_is_no_number_and_what_has_no_layout_is_refused() -> None:
    ones = np.ones((32, 1), np.float32)
    for format, code in (("fp8", 0x7F), ("fp8", 0xFF), ("fp8e5m2", 0x7C), ("fp8e5m2", 0xFE)):
        with pytest.raises(ValueError, match="a number is not finite"):
            from_codes(np.full((32, 64), code, np.uint8), ones, None, format, 0)
    out = aligned_bytes(_core.packed_bytes("fp8e5m2", 32, 64, 0))
    with pytest.raises(ValueError, match="weights are not rounded to fp8e5m2"):
        _core.pack(np.zeros((32, 64), np.float32), "f32", "fp8e5m2", 0, out, _core.Pool(1))
    with pytest.raises(ValueError, match="fp8 weights are not rotated"):
        _core.pack(np.zeros((32, 64), np.float32), "f32", "fp8", 0, out, _core.Pool(1), rotated=True)
    with pytest.raises(ValueError, match="fp8 numbers have no zeros"):
        _core.packed_bytes("fp8", 32, 64, 32, asymmetric=True)
    out = aligned_bytes(_core.packed_bytes("fp8", 32, 64, 256))
    with pytest.raises(ValueError, match="fp8 take groups that divide 128"):
        _core.Packed("fp8", 32, 64, 256, 1.0, out)
