"""Codes for the 16 values of a table: kept in 4 bits, and multiplied to the bits that the same values give as int8."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.formats.gguf_blocks import TABLES as BLOCK_TABLES
from headrace.models.packing import aligned_bytes
from headrace.models.precision import TABLES, WeightFormat
from tests.core.test_layout import group_of
from tests.core.test_products import MANY, from_codes, product, random_rows
from tests.core.tiny import ISAS, same_bits

SHAPES = [(33, 31), (40, 72), (70, 300)]  # outputs, inputs
COUNTS = (1, 2, 7, MANY)  # rows: what a pass takes, more, and so many that codes are widened first


def values_of(format: WeightFormat) -> NDArray[np.int16]:
    """What the codes stand for, as the core unpacks them."""
    codes = np.arange(16, dtype=np.uint8).reshape(1, 16)
    found = from_codes(codes, np.ones((1, 1), np.float32), None, format, 32).unpack()[0]
    return np.rint(found).astype(np.int16)


def both(format: WeightFormat, shape: tuple[int, int], group: int, *, float_rows: bool) -> tuple[_core.Packed, ...]:
    """The same weights as codes of a table and as int8."""
    random = np.random.default_rng(9)
    codes = random.integers(0, 16, shape, dtype=np.uint8)
    groups = -(-shape[1] // group_of(group, shape[1]))
    scales = random.uniform(-0.1, 0.1, (shape[0], groups)).astype(np.float16).astype(np.float32)
    wide = (values_of(format)[codes] + 128).astype(np.uint8)
    return (
        from_codes(codes, scales, None, format, group, float_rows=float_rows),
        from_codes(wide, scales, None, "int8", group, float_rows=float_rows),
    )


def test_the_tables_are_those_of_the_formats() -> None:
    assert np.array_equal(values_of("iq4"), BLOCK_TABLES["iq4"])
    positive = np.array([0, 1, 2, 3, 4, 6, 8, 12])  # twice 0, 0.5, 1, 1.5, 2, 3, 4 and 6
    assert np.array_equal(values_of("mxfp4"), np.concatenate([positive, -positive]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", sorted(TABLES))
def test_products_of_codes_of_a_table_have_the_bits_of_int8(format: WeightFormat, isa: str) -> None:
    for shape, group in zip(SHAPES, (32, 0, 128), strict=True):
        for float_rows in (False, True):
            if float_rows and group == 0:
                continue
            small, wide = both(format, shape, group, float_rows=float_rows)
            assert np.array_equal(small.unpack(), wide.unpack())
            rows = random_rows(MANY, shape[1])
            for count in COUNTS:
                expected = product(wide, rows[:count], shape[0], isa)
                assert np.isfinite(expected).all()
                assert same_bits(product(small, rows[:count], shape[0], isa, threads=1 + count % 3), expected), count


def test_codes_of_a_table_take_four_bits() -> None:
    assert _core.packed_bytes("mxfp4", 64, 256, 32) == _core.packed_bytes("int4", 64, 256, 32)


def test_weights_are_not_rounded_to_a_table_and_have_no_zeros() -> None:
    out = aligned_bytes(_core.packed_bytes("nf4", 32, 64, 32))
    with pytest.raises(ValueError, match="weights are not rounded to nf4"):
        _core.pack(np.zeros((32, 64), np.float32), "f32", "nf4", 32, out, _core.Pool(1))
    with pytest.raises(ValueError, match="codes of a table have no zeros"):
        _core.packed_bytes("iq4", 32, 64, 32, asymmetric=True)
    with pytest.raises(ValueError, match="multiples are for"):
        _core.packed_bytes("iq4", 32, 64, 32, multiples=True)
