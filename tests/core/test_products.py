"""One product on every instruction set, against the documented arithmetic written in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import aligned_bytes
from headrace.models.precision import WeightFormat
from tests.core.reference import bf16
from tests.core.test_layout import INTEGERS, group_of, laid_by_multiples, random_codes, random_multiples
from tests.core.tiny import ISAS, ROUNDS_ROWS, Floats, packed, same_bits

Doubles = NDArray[np.float64]

SHAPES = [(1, 1), (33, 31), (77, 72), (32, 128), (130, 200)]  # outputs, inputs
MANY = 50  # rows, for which every instruction set widens the codes of int4 once for all of them


def random_rows(count: int, width: int, seed: int = 1) -> Floats:
    rows = np.random.default_rng(seed).standard_normal((count, width)) * np.logspace(-3, 3, count)[:, None]
    return rows.astype(np.float32)


def product(weights: _core.Packed, rows: Floats, outputs: int, isa: str, threads: int = 1) -> Floats:
    out = np.full((len(rows), outputs), np.nan, dtype=np.float32)
    _core.multiply(weights, rows, out, _core.Pool(threads), isa)
    return out


def from_codes(
    codes: NDArray[np.uint8],
    scales: Floats,
    zeros: NDArray[np.int16] | None,
    format: WeightFormat,
    group: int,
    *,
    float_rows: bool = False,
) -> _core.Packed:
    outputs, inputs = codes.shape
    out = aligned_bytes(_core.packed_bytes(format, outputs, inputs, group, zeros is not None))
    gain = _core.pack_codes(codes, scales, zeros, format, group, out)
    return _core.Packed(format, outputs, inputs, group, gain, out, zeros is not None, float_rows=float_rows)


def rounded_rows(rows: Floats, size: int, *, bounded: bool) -> tuple[NDArray[np.int64], Floats]:
    """Each group of a row as codes and a scale, every operation in f32 as documented: codes of -127..127, and for int8
    weights with zeros of so much that two neighbours are 128 together."""
    count, width = rows.shape
    groups = -(-width // size)
    padded = np.zeros((count, groups * size), np.float32)
    padded[:, :width] = rows
    parts = padded.reshape(count, groups, size)
    sizes = np.abs(parts)
    peaks = (sizes[..., ::2] + sizes[..., 1::2] if bounded else sizes).max(axis=2)
    inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
    codes = np.rint(parts * inverse[..., None]).astype(np.int64)
    return codes, peaks / np.float32(127)


def emulated(
    codes: NDArray[np.uint8],
    scales: Floats,
    zeros: NDArray[np.int16] | int,
    rows: Floats,
    format: WeightFormat,
    group: int,
) -> tuple[Doubles, Doubles]:
    """The product of integer codes, and the sum of the magnitudes of what was added: exact but for f32 sums."""
    size = group_of(group, codes.shape[1])
    centre = zeros if isinstance(zeros, int) else np.repeat(zeros.astype(np.int64), size, axis=1)[:, : codes.shape[1]]
    bounded = format == "int8" and not isinstance(zeros, int)
    return scaled(codes.astype(np.int64) - centre, scales, rows, size, bounded=bounded)


def emulated_multiples(
    codes: NDArray[np.uint8], scales: Floats, multiples: NDArray[np.int8], rows: Floats
) -> tuple[Doubles, Doubles]:
    """The same for codes whose groups have multiples: a row has one scale for a block of them."""
    each = np.repeat(multiples.astype(np.int64), 32, axis=1)[:, : codes.shape[1]]
    return scaled((codes.astype(np.int64) - 8) * each, scales, rows, 128)


def scaled(
    whole: NDArray[np.int64], scales: Floats, rows: Floats, size: int, *, bounded: bool = False
) -> tuple[Doubles, Doubles]:
    """Of whole numbers [outputs, inputs] of which `size` inputs share a scale, in the rows too."""
    row_codes, row_scales = rounded_rows(rows, size, bounded=bounded)
    total = np.zeros((len(rows), len(whole)))
    magnitude = np.zeros_like(total)
    for g in range(scales.shape[1]):
        part = whole[:, g * size : (g + 1) * size]
        dot = row_codes[:, g, : part.shape[1]] @ part.T  # exact
        term = dot * scales[:, g].astype(np.float64) * row_scales[:, g : g + 1].astype(np.float64)
        total += term
        magnitude += np.abs(term)
    return total, magnitude


def extreme_rows() -> Floats:
    """Rows of 256 of ones, minus ones and zeros, which all become the largest codes."""
    rows = np.ones((12, 256), np.float32)
    rows[1] = -1
    rows[2, ::2] = -1
    rows[3, ::3] = -1
    rows[4, 1:] = 0
    rows[5] = np.random.default_rng(0).choice([-1, 1], 256)
    rows[6, 1::2] = 0
    # Half of the inputs of each four, and the other half: what the two halves of a lane add up.
    rows[7, 0::4], rows[7, 1::4] = -1, -1
    rows[8, 2::4], rows[8, 3::4] = -1, -1
    rows[9, 0::4], rows[9, 1::4] = 0, 0
    rows[10, 2::4], rows[10, 3::4] = 0, 0
    rows[11, 0::4], rows[11, 2::4] = 0, -1
    return np.tile(rows, (5, 1))  # as many as are multiplied in the quickest way


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_products_of_float_weights_are_numpys(format: WeightFormat, shape: tuple[int, int], isa: str) -> None:
    outputs, inputs = shape
    weights = packed(np.random.default_rng(2).standard_normal(shape).astype(np.float32), format)
    rows = random_rows(5, inputs)
    held = weights.unpack().astype(np.float64)
    rounds = format == "bf16" and isa in ROUNDS_ROWS
    expected = (bf16(rows.astype(np.float64)) if rounds else rows.astype(np.float64)) @ held.T
    bound = 1e-6 * (np.abs(rows).astype(np.float64) @ np.abs(held).T)
    assert (np.abs(product(weights, rows, outputs, isa) - expected) <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_products_of_integer_weights_are_whole_numbers_times_scales(
    format: WeightFormat, group: int, shape: tuple[int, int], asymmetric: bool, isa: str
) -> None:
    outputs, inputs = shape
    codes, scales, zeros = random_codes(format, outputs, inputs, group)
    weights = from_codes(codes, scales, zeros if asymmetric else None, format, group)
    rows = random_rows(MANY, inputs)
    centre = zeros if asymmetric else 128 if format == "int8" else 8
    expected, magnitude = emulated(codes, scales, centre, rows, format, group)
    found = product(weights, rows, outputs, isa)
    assert (np.abs(found - expected) <= 1e-6 * magnitude).all()
    assert same_bits(product(weights, rows[:7], outputs, isa), found[:7])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_the_largest_codes_and_rows_do_not_overflow(
    format: WeightFormat, group: int, asymmetric: bool, isa: str
) -> None:
    most = 255 if format == "int8" else 15
    codes = np.zeros((36, 256), np.uint8)
    codes[0::4], codes[1::4, ::2], codes[2::4] = most, most, most // 2
    groups = -(-256 // group_of(group, 256))
    scales = np.ones((36, groups), np.float32)
    zeros = np.tile(np.array([[0], [most], [most // 2], [1]], np.int16), (9, groups))
    rows = extreme_rows()
    weights = from_codes(codes, scales, zeros if asymmetric else None, format, group)
    centre = zeros if asymmetric else 128 if format == "int8" else 8
    expected, magnitude = emulated(codes, scales, centre, rows, format, group)
    assert (np.abs(product(weights, rows, 36, isa) - expected) <= 1e-6 * magnitude).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 300), (65, 896)])
def test_products_by_multiples_are_whole_numbers_of_blocks_times_scales(shape: tuple[int, int], isa: str) -> None:
    codes, scales, multiples = random_multiples(*shape)
    weights = laid_by_multiples(codes, scales, multiples)
    rows = random_rows(MANY, shape[1])
    expected, magnitude = emulated_multiples(codes, scales, multiples, rows)
    found = product(weights, rows, shape[0], isa)
    assert (np.abs(found - expected) <= 1e-6 * magnitude).all()
    for count in (1, 2, 7, 13):
        assert same_bits(product(weights, rows[:count], shape[0], isa), found[:count])


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_multiples_and_rows_do_not_overflow(isa: str) -> None:
    codes = np.zeros((36, 256), np.uint8)
    codes[0::4], codes[1::4, ::2], codes[2::4, ::3], codes[3::4, 1::4], codes[3::4, ::4] = 15, 15, 15, 15, 15
    multiples = np.tile(np.array([[127], [-127]], np.int8), (18, 8))
    rows = extreme_rows()
    scales = np.ones((36, 2), np.float32)
    expected, magnitude = emulated_multiples(codes, scales, multiples, rows)
    weights = laid_by_multiples(codes, scales, multiples)
    for count in (1, 12, 60):
        assert (np.abs(product(weights, rows[:count], 36, isa) - expected[:count]) <= 1e-6 * magnitude[:count]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_integer_weights_meet_rows_of_floats_as_they_are(
    format: WeightFormat, group: int, shape: tuple[int, int], asymmetric: bool, isa: str
) -> None:
    outputs, inputs = shape
    codes, scales, zeros = random_codes(format, outputs, inputs, group)
    weights = from_codes(codes, scales, zeros if asymmetric else None, format, group, float_rows=True)
    check_float_rows(weights, random_rows(MANY, inputs), outputs, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 300), (65, 896)])
def test_multiples_meet_rows_of_floats_as_they_are(shape: tuple[int, int], isa: str) -> None:
    weights = laid_by_multiples(*random_multiples(*shape), float_rows=True)
    check_float_rows(weights, random_rows(MANY, shape[1]), shape[0], isa)


def check_float_rows(weights: _core.Packed, rows: Floats, outputs: int, isa: str) -> None:
    """The product is that of numbers, the same bits on every instruction set and among any other rows."""
    held = weights.unpack().astype(np.float64)
    found = product(weights, rows, outputs, isa)
    bound = 2e-6 * (np.abs(rows).astype(np.float64) @ np.abs(held).T)
    assert (np.abs(found - rows.astype(np.float64) @ held.T) <= bound).all()
    for count in (1, 2, 7, 13):
        assert same_bits(product(weights, rows[:count], outputs, isa), found[:count])
    assert same_bits(product(weights, rows, outputs, "portable"), found)


def test_float_rows_are_for_integers_in_groups_that_a_row_holds() -> None:
    data = aligned_bytes(_core.packed_bytes("bf16", 32, 64, 0))
    with pytest.raises(ValueError, match="float_rows is for integers"):
        _core.Packed("bf16", 32, 64, 0, 1.0, data, float_rows=True)
    data = aligned_bytes(_core.packed_bytes("int8", 32, 64, 160))
    with pytest.raises(ValueError, match="groups that divide 128"):
        _core.Packed("int8", 32, 64, 160, 1.0, data, float_rows=True)


@pytest.mark.parametrize("isa", ISAS)
def test_channels_too_long_to_be_widened_are_the_same_bits_among_many(isa: str) -> None:
    weights = packed(np.random.default_rng(8).standard_normal((33, 16416)).astype(np.float32), "int4", 32)
    rows = random_rows(MANY, 16416)
    alone = np.concatenate([product(weights, rows[i : i + 1], 33, isa) for i in range(0, MANY, 7)])
    assert same_bits(product(weights, rows, 33, isa)[::7], alone)


@pytest.mark.parametrize("isa", ISAS)
def test_the_longest_channel_does_not_overflow(isa: str) -> None:
    codes = np.stack([np.full(65536, code, np.uint8) for code in (255, 0)])
    zeros = np.array([[0], [255]], np.int16)
    weights = from_codes(codes, np.ones((2, 1), np.float32), zeros, "int8", 0)
    rows = np.stack([np.full(65536, value, np.float32) for value in (127, -127)])
    largest = np.float32(65536 * 255 * 64 * 2)  # codes of 64, because neighbours are 128 together, times a scale of 2
    assert np.array_equal(product(weights, rows, 2, isa), [[largest, -largest], [-largest, largest]])


def test_longer_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="inputs out of range"):
        _core.packed_bytes("int8", 1, 65537, 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group"), [("f32", 0), ("bf16", 0), *INTEGERS])
def test_a_row_is_the_same_bits_among_any_others(format: WeightFormat, group: int, isa: str) -> None:
    outputs, inputs = 134, 150  # two pairs of panels and a single one
    weights = packed(np.random.default_rng(4).standard_normal((outputs, inputs)).astype(np.float32), format, group)
    rows = random_rows(MANY, inputs)
    alone = np.concatenate([product(weights, rows[i : i + 1], outputs, isa) for i in range(MANY)])
    for count in (*range(1, 21), 31, 43, MANY):
        assert same_bits(product(weights, rows[:count], outputs, isa), alone[:count])
        assert same_bits(product(weights, rows[count - 1 :], outputs, isa, threads=2), alone[count - 1 :])
    shuffled = np.random.default_rng(6).permutation(MANY)
    assert same_bits(product(weights, rows[shuffled], outputs, isa, threads=3), alone[shuffled])
    assert product(weights, rows[:0], outputs, isa).shape == (0, outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_rows_of_zeros_and_rows_of_nothing_else_than_tiny_values_multiply(
    format: WeightFormat, group: int, isa: str
) -> None:
    codes, scales, _ = random_codes(format, 33, 96, group)
    weights = from_codes(codes, scales, None, format, group)
    rows = np.zeros((4, 96), np.float32)
    rows[1, ::2] = 1e-38
    rows[2] = 1e-44
    rows[3, 7] = 1e20
    found = product(weights, rows, 33, isa)
    exact = rows.astype(np.float64) @ weights.unpack().astype(np.float64).T
    assert (found[0] == 0).all()
    assert np.abs(found[1:3]).max() <= 1e-34
    assert np.allclose(found[3], exact[3], rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_neighbours_that_are_infinite_together_do_not_look_like_a_good_row(isa: str) -> None:
    codes, scales, zeros = random_codes("int8", 40, 64, 32)
    weights = from_codes(codes, scales, zeros, "int8", 32)
    rows = np.zeros((1, 64), np.float32)
    rows[0, 4:6] = 3e38
    assert not np.isfinite(product(weights, rows, 40, isa)).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("format", "group"), [("f32", 0), ("bf16", 0), *INTEGERS])
def test_a_value_that_is_not_finite_is_seen_in_the_product(
    format: WeightFormat, group: int, value: float, isa: str
) -> None:
    """A broken row must not turn into plausible numbers."""
    weights = packed(np.random.default_rng(4).standard_normal((40, 100)).astype(np.float32), format, group)
    rows = random_rows(3, 100)
    good = product(weights, rows, 40, isa)
    for place in (0, 50, 99):
        bad = rows.copy()
        bad[1, place] = value
        found = product(weights, bad, 40, isa)
        assert not np.isfinite(found[1]).any()
        assert same_bits(found[::2], good[::2])
