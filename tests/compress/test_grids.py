"""Grids: codes, clipping, and what importance changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.compress.fp8_numbers import E4M3, to_e4m3
from headrace.compress.grids import NF4, GridSpec, dequantise, fit, round_to_nearest, rounded, to_bf16
from headrace.compress.layer_pass import F32

OUTPUTS, INPUTS = 24, 256


@pytest.fixture
def weights() -> F32:
    return np.random.default_rng(3).standard_t(4, (OUTPUTS, INPUTS)).astype(np.float32)


def square_error(weights: F32, spec: GridSpec, importance: F32 | None = None, *, clip: bool) -> float:
    grid = fit(weights, spec, importance=importance, clip=clip)
    error = np.square(weights - dequantise(round_to_nearest(weights, grid), grid))
    return float((error if importance is None else error * importance).sum())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_on_a_grid_are_exact(bits: int, symmetric: bool) -> None:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (OUTPUTS, INPUTS)).astype(np.int64)
    codes[:, ::64], codes[:, 1::64] = 0, (1 << bits) - 1  # the whole range in every group
    zeros = (1 << (bits - 1)) if symmetric else random.integers(1, (1 << bits) - 1, (OUTPUTS, INPUTS // 64))
    shift = zeros - 0.5 if symmetric else np.repeat(zeros, 64, axis=1)  # a symmetric range reaches both ends
    weights = ((codes - shift) * 0.5).astype(np.float32)
    spec = GridSpec(bits=bits, group=64, symmetric=symmetric)
    grid = fit(weights, spec, clip=False)
    found = dequantise(round_to_nearest(weights, grid), grid)
    # Without a zero in the grid's middle, half a step is left.
    assert np.abs(found - weights).max() <= (0.2501 if symmetric else 0.0)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_clipping_leaves_less_error(weights: F32, bits: int) -> None:
    spec = GridSpec(bits=bits, group=128)
    assert square_error(weights, spec, clip=True) < 0.95 * square_error(weights, spec, clip=False)


def test_the_search_follows_the_importance_of_inputs(weights: F32) -> None:
    importance = np.random.default_rng(0).lognormal(0, 2, INPUTS).astype(np.float32)
    spec = GridSpec(bits=3, group=128, symmetric=False)
    grid = fit(weights, spec)
    unweighted = np.square(weights - dequantise(round_to_nearest(weights, grid), grid)) * importance
    assert square_error(weights, spec, importance, clip=True) < unweighted.sum()


def test_scales_are_values_of_the_type_that_is_stored(weights: F32) -> None:
    for kind in ("bf16", "f16"):
        scales = fit(weights, GridSpec(bits=4, scale_type=kind)).scales
        assert (scales == rounded(scales, kind)).all()
    assert (to_bf16(np.array([1.0, 1.00390625, 1.01171875], np.float32)) == [0x3F80, 0x3F80, 0x3F82]).all()


def test_fp8_rounds_to_the_nearest_number_to_even_and_its_largest_weight_is_448(weights: F32) -> None:
    special = np.array([0, -0.0, 2.0**-10, 3 * 2.0**-10, 2.0**-6, 1.0625, 1.1875, 448, 449, 1e9, -17.5], np.float32)
    values = np.concatenate([special, weights[:40].reshape(-1) * 100])
    expected = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_e4m3(values), expected)
    grid = fit(weights, GridSpec(bits=8, group=0, kind="fp8", scale_type="f32"))
    codes = round_to_nearest(weights, grid)
    assert (np.abs(E4M3[codes]).max(axis=1) == 448).all()
    found = dequantise(codes, grid)
    assert np.abs(found - weights).max(axis=1).max() <= np.abs(weights).max() * 2.0**-4


def test_nf4_rounds_to_the_nearest_value_of_the_table() -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    grid = fit(values, GridSpec(bits=4, group=64, kind="nf4", scale_type="f32"), clip=False)
    found = dequantise(round_to_nearest(values, grid), grid)
    nearest = NF4[np.abs(values[0, :, None] - NF4).argmin(axis=1)]
    assert (found[0] == nearest).all()
