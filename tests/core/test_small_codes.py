"""Codes of 3 and 2 bits: kept exactly in that many bits, and multiplied to the bits that the same whole numbers give as
int4, on every instruction set, for every number of rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.precision import Precision, WeightFormat
from headrace.models.tensor_shapes import is_product
from tests.core.test_layout import (
    absmax_rounding,
    group_of,
    laid_by_multiples,
    laid_codes,
    matrix,
    packed_bytes_of,
    squared_error,
)
from tests.core.test_products import MANY, from_codes, product, random_rows
from tests.core.tiny import (
    ISAS,
    SPECS,
    CoreTensors,
    Floats,
    Share,
    Tiny,
    by_turns,
    packed,
    random_tensors,
    same_bits,
    text,
)

Bytes = NDArray[np.uint8]
Zeros = NDArray[np.int16]

SMALL: list[WeightFormat] = ["int3", "int2"]
SHAPES = [(1, 1), (33, 31), (40, 72), (70, 300)]  # outputs, inputs
COUNTS = (1, 2, 5, 7, 13, MANY)  # rows: what a pass takes, more, and so many that codes are widened first


def bits_of(format: WeightFormat) -> int:
    return 2 if format == "int2" else 3


def random_small(
    format: WeightFormat, outputs: int, inputs: int, group: int, *, asymmetric: bool
) -> tuple[Bytes, Floats, Zeros | None]:
    random = np.random.default_rng(7)
    count = 1 << bits_of(format)
    groups = -(-inputs // group_of(group, inputs))
    codes = random.integers(0, count, (outputs, inputs), dtype=np.uint8)
    scales = random.uniform(-0.1, 0.1, (outputs, groups)).astype(np.float16).astype(np.float32)
    zeros = random.integers(0, count, (outputs, groups), dtype=np.int16) if asymmetric else None
    return codes, scales, zeros


def both(
    format: WeightFormat, outputs: int, inputs: int, group: int, *, asymmetric: bool, float_rows: bool = False
) -> tuple[_core.Packed, _core.Packed]:
    """The same whole numbers in a small format and as int4, whose zero is higher."""
    codes, scales, zeros = random_small(format, outputs, inputs, group, asymmetric=asymmetric)
    small = from_codes(codes, scales, zeros, format, group, float_rows=float_rows)
    shift = 0 if asymmetric else 8 - Precision(format).zero
    return small, from_codes(codes + np.uint8(shift), scales, zeros, "int4", group, float_rows=float_rows)


def by_multiples(format: WeightFormat, outputs: int, inputs: int, *, float_rows: bool) -> tuple[_core.Packed, ...]:
    random = np.random.default_rng(8)
    zero = Precision(format).zero
    codes = random.integers(0, 2 * zero, (outputs, inputs), dtype=np.uint8)
    scales = random.uniform(0.001, 0.1, (outputs, -(-inputs // 128))).astype(np.float16).astype(np.float32)
    multiples = random.integers(-127, 128, (outputs, -(-inputs // 32)), dtype=np.int8)
    return (
        laid_by_multiples(codes, scales, multiples, format=format, float_rows=float_rows),
        laid_by_multiples(codes + np.uint8(8 - zero), scales, multiples, float_rows=float_rows),
    )


def check_products(small: _core.Packed, wide: _core.Packed, shape: tuple[int, int], isa: str) -> None:
    outputs, inputs = shape
    assert np.array_equal(small.unpack(), wide.unpack())
    rows = random_rows(MANY, inputs)
    for count in COUNTS:
        expected = product(wide, rows[:count], outputs, isa)
        assert np.isfinite(expected).all()
        assert same_bits(product(small, rows[:count], outputs, isa, threads=1 + count % 3), expected), count


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("format", SMALL)
def test_small_codes_are_kept_exactly(format: WeightFormat, group: int, asymmetric: bool) -> None:
    for outputs, inputs in SHAPES:
        codes, scales, zeros = random_small(format, outputs, inputs, group, asymmetric=asymmetric)
        weights = from_codes(codes, scales, zeros, format, group)
        each = np.arange(inputs) // group_of(group, inputs)
        centre = Precision(format).zero if zeros is None else zeros[:, each].astype(np.float32)
        assert np.array_equal(weights.unpack(), scales[:, each] * (codes.astype(np.float32) - centre))


@pytest.mark.parametrize("format", SMALL)
def test_small_codes_lie_in_memory_as_documented(format: WeightFormat) -> None:
    codes, _, _ = random_small(format, 64, 96, 96, asymmetric=False)
    ones = np.ones((64, 3), np.float32)
    out = np.zeros(_core.packed_bytes(format, 64, 96, 32) + 64, np.uint8)
    out = out[-out.ctypes.data % 64 :][: _core.packed_bytes(format, 64, 96, 32)]
    _core.pack_codes(codes, ones, None, format, 32, out)
    groups = out.reshape(2, 3, -1)[:, :, 64:]  # after the scales
    for panel in range(2):
        for group in range(3):
            part = codes[panel * 32 : panel * 32 + 32, group * 32 : group * 32 + 32]
            assert np.array_equal(groups[panel, group], laid_codes(part, format))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", SMALL)
def test_products_of_small_codes_have_the_bits_of_int4(format: WeightFormat, isa: str) -> None:
    for shape, group in zip(SHAPES, (32, 0, 64, 128), strict=True):
        for asymmetric in (False, True):
            for float_rows in (False, True):
                if not float_rows or group in (32, 128):
                    small, wide = both(format, *shape, group, asymmetric=asymmetric, float_rows=float_rows)
                    check_products(small, wide, shape, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", SMALL)
def test_products_by_multiples_of_small_codes_have_the_bits_of_int4(format: WeightFormat, isa: str) -> None:
    for shape in ((33, 31), (70, 300)):
        for float_rows in (False, True):
            small, wide = by_multiples(format, *shape, float_rows=float_rows)
            check_products(small, wide, shape, isa)


@cache
def tensors_of(format: WeightFormat, *, wide: bool) -> CoreTensors:
    """A model with experts whose products have small codes with zeros of their own, or the same as int4."""
    found: CoreTensors = {}
    for name, values in random_tensors(SPECS["everything"]).items():
        rows = by_turns(values) if name.endswith((".gate_up", ".gate_up.bias")) else values
        if is_product(name):
            each = both(format, *rows.shape, 32, asymmetric=len(found) % 2 == 0)
            found[name] = each[1 if wide else 0]
        else:
            found[name] = packed(rows) if name.endswith(".router") else rows.reshape(-1)
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", SMALL)
def test_a_forward_pass_over_small_codes_has_the_bits_of_int4(format: WeightFormat, isa: str) -> None:
    model = SPECS["everything"]
    wide = Tiny(model, isa=isa, tensors=tensors_of(format, wide=True))
    shares = [Share(text(70, model), 0, (0, 1, 2, 3, 4)), Share(text(3, model, seed=1), 0, (5,))]
    expected = wide.step(shares)
    assert np.isfinite(expected).all()
    for threads in (1, 3):
        small = Tiny(model, isa=isa, threads=threads, tensors=tensors_of(format, wide=False))
        assert same_bits(small.step(shares), expected)
        assert same_bits(small.rows(text(70, model), (10, 11, 12, 13, 14), chunk=7), expected[:70])


@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("format", SMALL)
def test_rounding_to_small_codes_is_nearer_than_plain_rounding(format: WeightFormat, group: int) -> None:
    weights = matrix(70, 300)
    found = packed(weights, format, group).unpack()
    assert squared_error(weights, found) < squared_error(weights, absmax_rounding(weights, format, group))
    assert np.array_equal(
        packed_bytes_of(weights, "f32", format, group, threads=3), packed_bytes_of(weights, "f32", format, group)
    )


def test_a_code_or_zero_of_more_bits_is_refused() -> None:
    codes, scales, zeros = random_small("int3", 32, 64, 32, asymmetric=True)
    with pytest.raises(ValueError, match="a code does not fit int2"):
        from_codes(codes, scales, None, "int2", 32)
    assert zeros is not None
    zeros[0, 0] = 8
    with pytest.raises(ValueError, match="a zero does not fit int3"):
        from_codes(codes, scales, zeros, "int3", 32)
