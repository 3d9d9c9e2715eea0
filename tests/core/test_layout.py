"""Packed weights: what a matrix becomes, bit for bit where it is exact, and how near where it is rounded."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import aligned_bytes
from headrace.models.precision import Precision, WeightFormat
from tests.core.reference import bf16
from tests.core.tiny import Floats, packed

Bytes = NDArray[np.uint8]

SHAPES = [(1, 1), (31, 33), (32, 32), (33, 64), (70, 50), (96, 130), (5, 257)]
INTEGERS: list[tuple[WeightFormat, int]] = [(f, g) for f in ("int8", "int4") for g in (32, 64, 128, 0)]


def matrix(outputs: int, inputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)


def group_of(group: int, inputs: int) -> int:
    """Inputs that share a scale; per channel they are all of them, padded to whole cache lines of codes."""
    return group or -(-inputs // 64) * 64


def packed_bytes_of(
    source: NDArray[np.generic], kind: _core.SourceType, format: WeightFormat, group: int, threads: int = 1
) -> Bytes:
    multiples = Precision(format, group).multiples
    out = aligned_bytes(_core.packed_bytes(format, source.shape[0], source.shape[1], group, multiples=multiples))
    out[:] = 0xA5
    _core.pack(source, kind, format, group, out, _core.Pool(threads), multiples)
    return out.copy()


def squared_error(weights: Floats, found: Floats) -> float:
    return float(((weights.astype(np.float64) - found) ** 2).sum())


def absmax_rounding(weights: Floats, format: WeightFormat, group: int) -> Floats:
    """The plain way: each group's largest magnitude gets the largest code of both signs."""
    most = Precision(format).zero - 1
    size = group_of(group, weights.shape[1])
    found = np.zeros(weights.shape)
    for start in range(0, weights.shape[1], size):
        part = weights[:, start : start + size].astype(np.float64)
        scale = np.abs(part).max(axis=1, keepdims=True) / most
        found[:, start : start + size] = np.rint(part / np.where(scale > 0, scale, 1)) * scale
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_f32_weights_stay_what_they_are(shape: tuple[int, int]) -> None:
    weights = matrix(*shape)
    assert np.array_equal(packed(weights).unpack(), weights)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_weights_are_the_nearest(shape: tuple[int, int]) -> None:
    weights = matrix(*shape)
    assert np.array_equal(packed(weights, "bf16").unpack(), bf16(weights))


def test_bf16_rounds_ties_to_even_and_keeps_what_is_special() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000001, 0x00018000, 0x7F7FFFFF, 0x80000000, 0xFF800000]
    found = packed(np.array([bits], dtype=np.uint32).view(np.float32), "bf16").unpack().view(np.uint32)[0] >> 16
    assert [hex(b) for b in found] == [
        *("0x3f80", "0x3f82", "0x3f80", "0x3f81", "0x0", "0x2", "0x7f80", "0x8000", "0xff80"),
    ]
    assert np.isnan(packed(np.array([[np.nan]], np.float32), "bf16").unpack()).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_integer_weights_are_nearer_than_plain_rounding(
    format: WeightFormat, group: int, shape: tuple[int, int]
) -> None:
    weights = matrix(*shape)
    found = packed(weights, format, group).unpack()
    plain = absmax_rounding(weights, format, group)
    # Scales are kept in f16: that costs 2^-12 of a weight, and a matrix of few weights may have no other error at all.
    floor = 2.0**-23 * float((weights**2).sum())
    assert squared_error(weights, found) <= squared_error(weights, plain) * 1.001 + floor
    worst = np.abs(weights).max() * (0.16 if format == "int8" else 0.5)  # the furthest that a clip may cut
    assert np.abs(weights - found).max() <= worst


@pytest.mark.parametrize(("format", "bound"), [("int8", 0.0075), ("int4", 0.1)])
def test_the_error_of_normal_weights_is_what_the_bits_allow(format: WeightFormat, bound: float) -> None:
    weights = matrix(64, 512)
    found = packed(weights, format, 32).unpack()
    assert squared_error(weights, found) ** 0.5 < bound * float(np.linalg.norm(weights))


@pytest.mark.parametrize("size", [1e35, 1e30, 1e5, 1e-5, 1e-30, 1e-36])
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_weights_of_any_size_are_rounded_as_well(format: WeightFormat, group: int, size: float) -> None:
    weights = matrix(40, 96)
    large = (weights * np.float32(size)).astype(np.float32)
    found = packed(large, format, group).unpack().astype(np.float64) / size
    usual = packed(weights, format, group).unpack()
    assert squared_error(weights, found) <= squared_error(weights, usual) * 1.02


@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_weights_that_are_hardly_numbers_become_no_larger(format: WeightFormat, group: int) -> None:
    weights = matrix(40, 96)
    weights[:, 40:] *= np.float32(1e-39)
    weights[20:] *= np.float32(1e-39)
    found = packed(weights, format, group).unpack()
    assert np.isfinite(found).all()
    assert np.abs(found[:20, 64:]).max() <= 1e-37
    assert np.abs(found[20:]).max() <= 1e-37


@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_small_rows_beside_large_ones_keep_their_precision(format: WeightFormat, group: int) -> None:
    weights = matrix(40, 128)
    sizes = np.logspace(0, -6, 40).astype(np.float32)[:, None]
    found = packed(weights * sizes, format, group).unpack() / sizes
    usual = packed(weights, format, group).unpack()
    for row in range(40):
        assert squared_error(weights[row], found[row]) <= squared_error(weights[row], usual[row]) * 1.05


@pytest.mark.parametrize("format", ["f32", "bf16", "int8", "int4"])
def test_rows_of_zeros_stay_zeros(format: WeightFormat) -> None:
    weights = matrix(40, 70)
    weights[::2] = 0
    weights[:, 32:64] = 0
    found = packed(weights, format, 32).unpack()
    assert (found[::2] == 0).all()
    assert (found[:, 32:64] == 0).all()
    assert (found[1::2, :32] != 0).any()
    assert (packed(np.zeros((3, 5), np.float32), format).unpack() == 0).all()


@pytest.mark.parametrize(("format", "group"), [("f32", 0), ("bf16", 0), *INTEGERS])
def test_half_precision_sources_are_read_exactly(format: WeightFormat, group: int) -> None:
    weights = matrix(37, 75)
    weights[0, :6] = [0.0, -0.0, 2.0**-24, 1023 * 2.0**-24, 65504.0, -(2.0**-14)]  # f16: zeros, subnormals, extremes
    half = weights.astype(np.float16)
    assert np.array_equal(
        packed_bytes_of(half.view(np.uint16), "f16", format, group),
        packed_bytes_of(half.astype(np.float32), "f32", format, group),
    )
    short = (weights.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(
        packed_bytes_of(short, "bf16", format, group),
        packed_bytes_of((short.astype(np.uint32) << 16).view(np.float32), "f32", format, group),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_bytes_follow_from_the_shape(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    panels = -(-outputs // 32)
    assert _core.packed_bytes("f32", outputs, inputs, 0) == panels * 32 * inputs * 4
    assert _core.packed_bytes("bf16", outputs, inputs, 0) == panels * 32 * -(-inputs // 32) * 32 * 2
    for format, group in INTEGERS:
        size = group_of(group, inputs)
        groups = -(-inputs // size)
        codes = size if format == "int8" else size // 2
        assert _core.packed_bytes(format, outputs, inputs, group) == panels * 32 * groups * (codes + 2)
        assert _core.packed_bytes(format, outputs, inputs, group, True) == panels * 32 * groups * (codes + 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_bytes_by_multiples_follow_from_the_shape(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    blocks, groups = -(-inputs // 128), -(-inputs // 32)
    found = _core.packed_bytes("int4", outputs, inputs, 32, multiples=True)
    assert found == -(-outputs // 32) * 32 * (blocks * (2 + 4) + groups * 16)


@pytest.mark.parametrize("wrong", [("int8", 32, False), ("int4", 64, False), ("int4", 0, False), ("int4", 32, True)])
def test_only_symmetric_int4_in_groups_of_32_has_multiples(wrong: tuple[WeightFormat, int, bool]) -> None:
    format, group, asymmetric = wrong
    with pytest.raises(ValueError, match="multiples are for symmetric int4, int3 and int2 in groups of 32"):
        _core.packed_bytes(format, 40, 70, group, asymmetric, multiples=True)


@pytest.mark.parametrize(("format", "group"), [("f32", 0), ("bf16", 0), *INTEGERS])
def test_packed_bytes_are_the_same_on_any_number_of_threads(format: WeightFormat, group: int) -> None:
    weights = matrix(200, 130)
    one = packed_bytes_of(weights, "f32", format, group)
    for threads in (2, 3):
        assert np.array_equal(packed_bytes_of(weights, "f32", format, group, threads), one)


def random_codes(
    format: WeightFormat, outputs: int, inputs: int, group: int
) -> tuple[Bytes, Floats, NDArray[np.int16]]:
    """Codes, scales that f16 holds exactly, and zeros."""
    random = np.random.default_rng(5)
    most = 255 if format == "int8" else 15
    groups = -(-inputs // group_of(group, inputs))
    codes = random.integers(0, most + 1, (outputs, inputs), dtype=np.uint8)
    scales = random.uniform(-0.1, 0.1, (outputs, groups)).astype(np.float16).astype(np.float32)
    zeros = random.integers(0, most + 1, (outputs, groups), dtype=np.int16)
    return codes, scales, zeros


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_codes_of_another_program_are_kept_exactly(
    format: WeightFormat, group: int, shape: tuple[int, int], asymmetric: bool
) -> None:
    outputs, inputs = shape
    codes, scales, zeros = random_codes(format, outputs, inputs, group)
    out = aligned_bytes(_core.packed_bytes(format, outputs, inputs, group, asymmetric))
    gain = _core.pack_codes(codes, scales, zeros if asymmetric else None, format, group, out)
    found = _core.Packed(format, outputs, inputs, group, gain, out, asymmetric).unpack()
    group_at = np.arange(inputs) // group_of(group, inputs)
    centre = zeros[:, group_at] if asymmetric else 128 if format == "int8" else 8
    expected = scales[:, group_at] * (codes.astype(np.float32) - centre)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("format", "group"), INTEGERS)
def test_codes_lie_in_memory_as_documented(format: WeightFormat, group: int, asymmetric: bool) -> None:
    outputs, inputs = 70, 130
    codes, scales, zeros = random_codes(format, outputs, inputs, group)
    out = aligned_bytes(_core.packed_bytes(format, outputs, inputs, group, asymmetric))
    gain = _core.pack_codes(codes, scales, zeros if asymmetric else None, format, group, out)
    size = group_of(group, inputs)
    groups = -(-inputs // size)
    header = 128 if asymmetric else 64
    records = out.reshape(-1, groups, header + 32 * (size if format == "int8" else size // 2))  # [panel, group, record]
    for channel in range(outputs):
        panel, lane = divmod(channel, 32)
        for g in range(groups):
            record = records[panel, g]
            assert record[:64].view(np.float16)[lane] * gain == scales[channel, g]
            if asymmetric:
                assert record[64:128].view(np.int16)[lane] == zeros[channel, g]
            if format == "int8":
                lanes = record[header:].reshape(-1, 32, 4)[:, lane].reshape(-1)
            else:
                pairs = record[header:].reshape(-1, 32, 4)[:, lane]
                lanes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
            mine = codes[channel, g * size : (g + 1) * size]
            zero = zeros[channel, g] if asymmetric else 128 if format == "int8" else 8
            assert np.array_equal(lanes[: len(mine)], mine)
            assert (lanes[len(mine) :] == zero).all()


def laid_codes(codes: Bytes, format: WeightFormat) -> Bytes:
    """Codes of a panel [32 channels, whole runs of 32 inputs], of at most 4 bits, laid out as documented."""
    fours = codes.reshape(32, -1, 8, 4).transpose(1, 2, 0, 3)  # [run][four][channel][input]
    if format == "int4":
        rows = [fours[:, 2 * i] | fours[:, 2 * i + 1] << 4 for i in range(4)]
    elif format == "int2":
        rows = [sum(fours[:, 4 * i + j] << 2 * j for j in range(4)) for i in range(2)]
    else:
        rows = [fours[:, 2 * i] | fours[:, 2 * i + 1] << 3 for i in range(3)]
        for i in range(2):
            rows[i] |= (fours[:, 6 + i] & 3) << 6
            rows[2] |= (fours[:, 6 + i] >> 2) << 6 + i
    return np.stack(rows, axis=1).astype(np.uint8).reshape(-1)


def laid_by_multiples(
    codes: Bytes,
    scales: Floats,
    multiples: NDArray[np.int8],
    *,
    format: WeightFormat = "int4",
    float_rows: bool = False,
) -> _core.Packed:
    """Codes [outputs, inputs], scales [outputs, blocks] that f16 holds and multiples [outputs, groups], laid out as
    documented."""
    outputs, inputs = codes.shape
    groups, blocks = multiples.shape[1], scales.shape[1]
    panels = -(-outputs // 32)
    whole = np.full((panels * 32, groups * 32), Precision(format).zero, np.uint8)
    whole[:outputs, :inputs] = codes
    steps = np.zeros((panels * 32, blocks * 4), np.int8)
    steps[:outputs, :groups] = multiples
    sizes = np.zeros((panels * 32, blocks), np.float16)
    sizes[:outputs] = scales
    parts: list[Bytes] = []
    for panel in range(panels):
        rows = slice(panel * 32, panel * 32 + 32)
        for b in range(blocks):
            parts.append(np.ascontiguousarray(sizes[rows, b]).view(np.uint8))
            parts.append(np.ascontiguousarray(steps[rows, b * 4 : b * 4 + 4].T).view(np.uint8).reshape(-1))
            parts.append(laid_codes(whole[rows, b * 128 : b * 128 + 128], format))
    out = aligned_bytes(_core.packed_bytes(format, outputs, inputs, 32, multiples=True))
    out[:] = np.concatenate(parts)
    return _core.Packed(format, outputs, inputs, 32, 1.0, out, multiples=True, float_rows=float_rows)


def random_multiples(outputs: int, inputs: int) -> tuple[Bytes, Floats, NDArray[np.int8]]:
    random = np.random.default_rng(6)
    codes = random.integers(0, 16, (outputs, inputs), dtype=np.uint8)
    scales = random.uniform(0.001, 0.1, (outputs, -(-inputs // 128))).astype(np.float16).astype(np.float32)
    return codes, scales, random.integers(-127, 128, (outputs, -(-inputs // 32)), dtype=np.int8)


@pytest.mark.parametrize("shape", [*SHAPES, (40, 128), (33, 300)])
def test_multiples_lie_in_memory_as_documented(shape: tuple[int, int]) -> None:
    codes, scales, multiples = random_multiples(*shape)
    at = np.arange(shape[1])
    expected = scales[:, at // 128] * (multiples[:, at // 32].astype(np.float32) * (codes.astype(np.float32) - 8))
    assert np.array_equal(laid_by_multiples(codes, scales, multiples).unpack(), expected)


def test_a_small_group_beside_a_large_one_is_not_lost() -> None:
    weights = matrix(40, 256)
    weights[:, 32:64] *= 0.02
    weights[:, 160:192] *= 0.002  # less than one of 127 parts of the largest group's scale
    found = packed(weights, "int4", 32).unpack()
    for begin, bound in ((32, 0.11), (160, 0.6)):
        part = weights[:, begin : begin + 32]
        assert squared_error(part, found[:, begin : begin + 32]) ** 0.5 < bound * float(np.linalg.norm(part))


def test_dense_weights_lie_in_memory_as_documented() -> None:
    weights = matrix(40, 35)
    padded = np.zeros((64, 64), np.float32)
    padded[:40, :35] = bf16(weights)
    expected = padded.reshape(2, 32, 32, 2).transpose(0, 2, 1, 3).reshape(-1)  # [panel][input pair][channel][2]
    assert np.array_equal(packed_bytes_of(weights, "f32", "bf16", 0).view(np.uint16), expected.view(np.uint32) >> 16)
    padded = np.zeros((64, 35), np.float32)
    padded[:40] = weights
    expected = padded.reshape(2, 32, 35).transpose(0, 2, 1).reshape(-1)  # [panel][input][channel]
    assert np.array_equal(packed_bytes_of(weights, "f32", "f32", 0).view(np.float32), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_the_first_value_that_is_not_finite_is_found(kind: _core.SourceType, threads: int) -> None:
    pool = _core.Pool(threads)
    count = 3 * 65536 + 17  # the search goes in runs of 65536
    bits = np.uint32 if kind == "f32" else np.uint16
    bad = {"f32": (0x7F800000, 0xFFC00001), "bf16": (0x7F80, 0xFF81), "f16": (0xFC00, 0x7C01)}[kind]
    largest = {"f32": 0x7F7FFFFF, "bf16": 0x7F7F, "f16": 0x7BFF}[kind]
    values = np.full(count, largest, dtype=bits)
    as_stored = values.view(np.float32) if kind == "f32" else values
    assert _core.find_nonfinite(as_stored, kind, pool) == -1
    for place in (count - 1, 2 * 65536, 2 * 65536 - 1, 70000, 1, 0):
        values[place] = bad[place % 2]
        assert _core.find_nonfinite(as_stored, kind, pool) == place
    assert _core.find_nonfinite(as_stored[1:].reshape(-1, 1), kind, pool) == 0
    assert _core.find_nonfinite(as_stored[:0], kind, pool) == -1
