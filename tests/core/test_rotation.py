"""The rotation of weights and rows: exact in f32, the same bits everywhere, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.packing import aligned_bytes
from tests.core.tiny import ISAS

# Hadamard alone, with a Hartley matrix of 3, 7, 9, 19 and 43 parts, and of 107 parts, which is too many for one.
WIDTHS = (16, 512, 48, 896, 576, 4864, 688, 1712)


def packed(weights: NDArray[np.float32], precision: str, *, rotated: bool, group: int = 0) -> _core.Packed:
    outputs, inputs = weights.shape
    out = aligned_bytes(_core.packed_bytes(precision, outputs, inputs, group))  # pyright: ignore[reportArgumentType]
    gain = _core.pack(weights, "f32", precision, group, out, _core.Pool(1), rotated=rotated)  # pyright: ignore[reportArgumentType]
    return _core.Packed(precision, outputs, inputs, group, gain, out, rotated=rotated)  # pyright: ignore[reportArgumentType]


def product(weights: _core.Packed, rows: NDArray[np.float32], outputs: int, isa: str) -> NDArray[np.float32]:
    out = np.empty((len(rows), outputs), dtype=np.float32)
    _core.multiply(weights, rows, out, _core.Pool(2), isa)
    return out


def random(shape: tuple[int, int], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_changes_no_product_and_undoes_itself(width: int) -> None:
    weights, rows = random((40, width)), random((5, width), 1)
    rotated = packed(weights, "f32", rotated=True)
    exact = rows @ weights.T
    for isa in ISAS:
        np.testing.assert_allclose(product(rotated, rows, 40, isa), exact, atol=1e-5 * float(np.abs(exact).max()))
    np.testing.assert_allclose(rotated.unpack(), weights, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_instruction_sets_rotate_to_the_same_bits(width: int) -> None:
    rotated = packed(random((40, width)), "int8", rotated=True, group=32)
    rows = random((9, width), 1)
    found = {product(rotated, rows, 40, isa).tobytes() for isa in ISAS}
    assert len(found) == 1


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_rotation_keeps_small_values_beside_an_outlier(width: int) -> None:
    weights, rows = random((40, width)), random((9, width), 1)
    rows[:, 5] *= 50.0
    exact = rows @ weights.T

    def error(*, rotated: bool) -> float:
        found = product(packed(weights, "int8", rotated=rotated), rows, 40, ISAS[0])
        return float(np.linalg.norm(found - exact))

    assert error(rotated=True) < 0.6 * error(rotated=False)


def test_weights_of_a_width_that_does_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 50 values cannot be rotated: expected a multiple of 16"):
        packed(random((32, 50)), "f32", rotated=True)
