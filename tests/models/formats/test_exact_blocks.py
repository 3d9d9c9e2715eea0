"""Block types of GGUF that are kept with their own codes: nothing is lost but what f16 does not hold of a scale."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.formats.gguf_blocks import BLOCKS, EXACT, TABLES, decode_rows, exact_codes
from headrace.models.formats.quantised_layer import AffineCodes
from headrace.models.packing import aligned_bytes
from headrace.models.precision import WeightFormat

ROWS, INPUTS = 64, 512
# Where a block has its f16 numbers; others have one at the start.
HALVES = {
    **{"Q4_1": (0, 2), "Q4_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
WITH_MINIMA = ("Q4_1", "Q4_K", "Q2_K", "IQ3_S", "IQ1_S", "IQ1_M")
BITS = {"Q4_1": 5, "Q4_K": 5, "Q3_K": 5, "Q2_K": 4, "IQ3_S": 5, "IQ1_S": 3, "IQ1_M": 6, "TQ1_0": 2.125, "TQ2_0": 2.125}
SCALES_OF_F16 = ("Q4_1", "TQ1_0", "TQ2_0")


def random_rows(name: str) -> NDArray[np.uint8]:
    """Any bytes are codes; the f16 numbers are of a weight's size."""
    random = np.random.default_rng(1)
    block = BLOCKS[name]
    blocks = random.integers(0, 256, (ROWS * INPUTS // block.weights, block.bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(110, 122, len(blocks), dtype=np.uint8)  # a power of two
        return blocks.reshape(ROWS, -1)
    if name == "IQ1_M":  # its f16 is in four parts, the exponent in the last one: about 0.01
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x20
        return blocks.reshape(ROWS, -1)
    for at in HALVES.get(name, (0,)):
        numbers = random.uniform(-0.01, 0.01, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", EXACT)
def test_codes_with_scales_and_offsets_are_the_weights_bit_for_bit(name: str) -> None:
    rows = random_rows(name)
    codes, scales, offsets = exact_codes(rows, name)
    exact = EXACT[name]
    assert (offsets is not None) == exact.offsets == (name in WITH_MINIMA)
    assert codes.max() < 1 << exact.bits
    assert scales.shape == (ROWS, INPUTS // exact.group)
    table = TABLES.get(EXACT[name].table)
    middle = 0 if exact.offsets or table is not None else 1 << (exact.bits - 1)
    zeros = np.full(scales.shape, middle, dtype=np.int16)
    kept = AffineCodes(exact.bits, exact.group, codes, scales, zeros, table=table, offsets=offsets)
    assert np.array_equal(kept.dense(), decode_rows(rows, name))


@pytest.mark.parametrize("name", BITS)
def test_the_kernels_layout_holds_them(name: str) -> None:
    rows = random_rows(name)
    exact = EXACT[name]
    codes, scales, offsets = exact_codes(rows, name)
    kind: WeightFormat = "int2" if exact.bits == 2 else "int4"
    lift = 8 - (1 << (exact.bits - 1)) if exact.bits == 3 else 0  # three bits in the middle of four
    group = min(exact.group, 128)
    scales = np.repeat(scales, exact.group // group, axis=1)
    out = aligned_bytes(_core.packed_bytes(kind, ROWS, INPUTS, group, offsets=exact.offsets))
    gain = _core.pack_codes(codes + np.uint8(lift), scales, None, kind, group, out, offsets=offsets)
    found = _core.Packed(kind, ROWS, INPUTS, group, gain, out, offsets=exact.offsets).unpack()
    dense = decode_rows(rows, name)
    if name in SCALES_OF_F16:  # in the file; those of others are an f16 times a whole number
        assert np.array_equal(found, dense)
    else:
        # Codes of IQ types are counted from their least number, so they and the offset are up to twice a weight.
        most = 3 if name.startswith("IQ") else 1
        assert 0 < np.abs(found - dense).max() < most * 2.0**-11 * np.abs(dense).max()
    assert out.size * 8 / dense.size == BITS[name]
