"""Codes of 4 and 2 bits with an offset for each group, and groups of 16: as Q4_1 and the K-quants of GGUF have them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import aligned_bytes
from headrace.models.precision import WeightFormat
from tests.core.test_layout import group_of
from tests.core.test_products import MANY, extreme_rows, product, random_rows, rounded_rows
from tests.core.tiny import ISAS, Floats, same_bits

Doubles = NDArray[np.float64]

SHAPES = [(1, 1), (33, 31), (40, 72), (70, 300)]  # outputs, inputs
KINDS: list[tuple[WeightFormat, int, bool]] = [
    ("int4", 32, True),
    ("int4", 16, True),
    ("int4", 16, False),
    ("int4", 0, True),
    ("int2", 16, True),
    ("int2", 16, False),
    ("int2", 128, True),
]
COUNTS = (1, 2, 5, 7, 9, 13)  # rows


class Weights:
    """Random codes, and scales and offsets that f16 holds: without offsets, codes have their zero in the middle."""

    def __init__(self, format: WeightFormat, shape: tuple[int, int], group: int, *, offsets: bool) -> None:
        random = np.random.default_rng(4)
        outputs, inputs = shape
        self.size = group_of(group, inputs)
        self.format: WeightFormat = format
        self.group = group
        most = 3 if format == "int2" else 15
        groups = -(-inputs // self.size)
        self.codes = random.integers(0, most + 1, shape, dtype=np.uint8)
        self.scales = random.uniform(-0.1, 0.1, (outputs, groups)).astype(np.float16).astype(np.float32)
        self.offsets = random.uniform(-1, 1, (outputs, groups)).astype(np.float16).astype(np.float32)
        self.zero = 0 if offsets else (most + 1) // 2
        if not offsets:
            self.offsets[:] = 0
        self.with_offsets = offsets

    def packed(self, *, float_rows: bool = False) -> _core.Packed:
        given = self.offsets if self.with_offsets else None
        out = aligned_bytes(_core.packed_bytes(self.format, *self.codes.shape, self.group, offsets=self.with_offsets))
        gain = _core.pack_codes(self.codes, self.scales, None, self.format, self.group, out, offsets=given)
        outputs, inputs = self.codes.shape
        return _core.Packed(
            self.format, outputs, inputs, self.group, gain, out, float_rows=float_rows, offsets=self.with_offsets
        )

    def dense(self) -> Floats:
        each = np.arange(self.codes.shape[1]) // self.size
        whole = self.codes.astype(np.float32) - np.float32(self.zero)
        return self.scales[:, each] * whole + self.offsets[:, each]

    def product(self, rows: Floats) -> tuple[Doubles, Doubles]:
        """What a product with rows in codes is, exact but for f32 sums, and the magnitudes of what was added."""
        row_codes, row_scales = rounded_rows(rows, self.size, bounded=False)
        total = np.zeros((len(rows), len(self.codes)))
        magnitude = np.zeros_like(total)
        whole = self.codes.astype(np.int64) - self.zero
        for g in range(self.scales.shape[1]):
            part = whole[:, g * self.size : (g + 1) * self.size]
            dot = (row_codes[:, g, : part.shape[1]] @ part.T) * self.scales[:, g].astype(np.float64)
            added = row_codes[:, g].sum(axis=1)[:, None] * self.offsets[:, g].astype(np.float64)
            total += (dot + added) * row_scales[:, g : g + 1]
            magnitude += (np.abs(dot) + np.abs(added)) * row_scales[:, g : g + 1]
        return total, magnitude


@pytest.mark.parametrize(("format", "group", "offsets"), KINDS)
def test_codes_scales_and_offsets_are_kept_exactly(format: WeightFormat, group: int, offsets: bool) -> None:
    for shape in SHAPES:
        weights = Weights(format, shape, group, offsets=offsets)
        assert np.array_equal(weights.packed().unpack(), weights.dense())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group", "offsets"), KINDS)
def test_products_are_sums_of_whole_numbers_and_offsets(
    format: WeightFormat, group: int, offsets: bool, isa: str
) -> None:
    for shape in SHAPES:
        weights = Weights(format, shape, group, offsets=offsets)
        packed = weights.packed()
        rows = random_rows(MANY, shape[1])
        expected, magnitude = weights.product(rows)
        found = product(packed, rows, shape[0], isa)
        assert (np.abs(found - expected) <= 2e-6 * magnitude).all()
        for count in COUNTS:
            assert same_bits(product(packed, rows[:count], shape[0], isa, threads=1 + count % 3), found[:count]), count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group", "offsets"), KINDS)
def test_rows_of_floats_meet_the_weights_themselves(format: WeightFormat, group: int, offsets: bool, isa: str) -> None:
    for shape in SHAPES[1:]:
        weights = Weights(format, shape, group, offsets=offsets)
        packed = weights.packed(float_rows=True)
        rows = random_rows(13, shape[1])
        dense = weights.dense().astype(np.float64)
        bound = 1e-6 * (np.abs(rows).astype(np.float64) @ np.abs(dense).T)
        found = product(packed, rows, shape[0], isa)
        assert (np.abs(found - rows.astype(np.float64) @ dense.T) <= bound).all()
        assert same_bits(product(packed, rows[:3], shape[0], isa), found[:3])


def test_instruction_sets_give_the_same_bits() -> None:
    for format, group, offsets in KINDS:
        packed = Weights(format, (70, 300), group, offsets=offsets).packed()
        rows = random_rows(MANY, 300)
        assert len({product(packed, rows, 70, isa).tobytes() for isa in ISAS}) == 1


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_codes_and_rows_do_not_overflow(isa: str) -> None:
    weights = Weights("int4", (36, 256), 0, offsets=True)
    weights.codes[:] = 15
    rows = extreme_rows()
    expected, magnitude = weights.product(rows)
    assert (np.abs(product(weights.packed(), rows, 36, isa) - expected) <= 2e-6 * magnitude).all()


def test_an_offset_far_above_its_scale_is_kept() -> None:
    weights = Weights("int4", (32, 64), 32, offsets=True)
    weights.scales[:], weights.offsets[:] = 2.0**-9, 1.0
    assert np.array_equal(weights.packed().unpack(), weights.dense())


def test_what_has_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="offsets are for int4 and int2"):
        _core.packed_bytes("int8", 32, 64, 32, offsets=True)
    with pytest.raises(ValueError, match="offsets are for int4 and int2"):
        _core.packed_bytes("int4", 32, 64, 32, asymmetric=True, offsets=True)
    for format in ("int8", "int3", "fp8"):
        with pytest.raises(ValueError, match="multiple of 32, not 16"):
            _core.packed_bytes(format, 32, 64, 16)
    codes, ones = np.zeros((32, 64), np.uint8), np.ones((32, 2), np.float32)
    out = aligned_bytes(_core.packed_bytes("int4", 32, 64, 32, offsets=True))
    with pytest.raises(ValueError, match="offsets must be an array of f32"):
        _core.pack_codes(codes, ones, None, "int4", 32, out, offsets=np.ones((32, 2), np.int16))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"offsets must be \[outputs, groups\]"):
        _core.pack_codes(codes, ones, None, "int4", 32, out, offsets=np.ones((32, 1), np.float32))
    with pytest.raises(ValueError, match="an offset is not finite"):
        _core.pack_codes(codes, ones, None, "int4", 32, out, offsets=np.full((32, 2), np.nan, np.float32))
    out = aligned_bytes(_core.packed_bytes("int4", 32, 64, 16))
    with pytest.raises(ValueError, match="in groups of 16"):
        _core.pack(np.zeros((32, 64), np.float32), "f32", "int4", 16, out, _core.Pool(1))
