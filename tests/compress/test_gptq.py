"""GPTQ against rounding to nearest, and the factor of the inverse that it uses."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.compress.gptq import inverse_factor, round_with_correction
from headrace.compress.grids import GridSpec, dequantise, fit, round_to_nearest
from headrace.compress.input_statistics import InputStatistics
from headrace.compress.layer_pass import F32
from headrace.compress.scaling import search_factors, smooth_factors

INPUTS = 256


@pytest.fixture
def rows() -> F32:
    """Inputs that depend on each other, and of which a few are large."""
    random = np.random.default_rng(1)
    mixed = random.standard_normal((2000, 60)) @ random.standard_normal((60, INPUTS))
    sizes = np.where(random.random(INPUTS) < 0.05, 20.0, 1.0)
    return ((mixed + random.standard_normal((2000, INPUTS))) * sizes).astype(np.float32)


@pytest.fixture
def weights() -> F32:
    return np.random.default_rng(2).standard_normal((96, INPUTS)).astype(np.float32)


def output_error(weights: F32, values: F32, rows: F32) -> float:
    return float(np.square(rows @ (values - weights).T).sum() / np.square(rows @ weights.T).sum())


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_outputs_are_closer_than_with_rounding_to_nearest(weights: F32, rows: F32, bits: int, act_order: bool) -> None:
    grid = fit(weights, GridSpec(bits=bits, symmetric=False))
    nearest = dequantise(round_to_nearest(weights, grid), grid)
    codes = round_with_correction(weights, grid, rows.T @ rows / len(rows), act_order=act_order)
    assert output_error(weights, dequantise(codes, grid), rows) < 0.5 * output_error(weights, nearest, rows)


def test_inputs_that_do_not_depend_on_each_other_need_no_correction(weights: F32) -> None:
    grid = fit(weights, GridSpec(bits=4))
    codes = round_with_correction(weights, grid, np.diag(np.arange(1.0, INPUTS + 1)).astype(np.float32))
    assert (codes == round_to_nearest(weights, grid)).all()


def test_the_factor_is_that_of_the_damped_inverse(rows: F32) -> None:
    hessian = rows.T @ rows / len(rows)
    hessian[7], hessian[:, 7] = 0, 0  # an input that is always 0
    upper = inverse_factor(hessian, 0.01)
    damped = hessian.astype(np.float64)
    damped[7, 7] = 1
    damped += np.eye(INPUTS) * 0.01 * np.diag(damped).mean()
    assert (np.tril(upper, -1) == 0).all()
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(INPUTS), atol=1e-8)


def test_awq_finds_factors_that_lessen_the_error(weights: F32, rows: F32) -> None:
    statistics = InputStatistics(INPUTS, total=len(rows))
    for chunk in np.array_split(rows, 3):
        statistics.add(chunk)
    spec = GridSpec(bits=3, symmetric=False)
    factors, exponent = search_factors([weights], spec, statistics)
    grid = fit(weights * factors, spec, clip=False)
    scaled = dequantise(round_to_nearest(weights * factors, grid), grid) / factors
    plain = fit(weights, spec, clip=False)
    nearest = dequantise(round_to_nearest(weights, plain), plain)
    assert exponent > 0
    assert output_error(weights, scaled, rows) < 0.8 * output_error(weights, nearest, rows)


def test_heads_that_share_values_share_factors(weights: F32, rows: F32) -> None:
    statistics = InputStatistics(INPUTS, total=len(rows))
    statistics.add(rows)
    sets = (2, 4, INPUTS // 8)
    for factors in (
        search_factors([weights], GridSpec(bits=3), statistics, sets=sets)[0],
        smooth_factors([weights], statistics, sets=sets),
    ):
        each = factors.reshape(sets)
        assert (each == each[:, :1]).all()
        assert len(np.unique(factors)) > 2


def test_smoothing_makes_inputs_and_weights_alike(weights: F32, rows: F32) -> None:
    statistics = InputStatistics(INPUTS, total=len(rows))
    statistics.add(rows)
    factors = smooth_factors([weights], statistics)
    inputs, columns = np.abs(rows / factors).max(axis=0), np.abs(weights * factors).max(axis=0)
    ratios = inputs / columns
    assert ratios.max() / ratios.min() < 1.001
    before = np.abs(rows).max(axis=0)
    assert inputs.max() / inputs.min() < 0.5 * before.max() / before.min()


def test_statistics_do_not_depend_on_the_chunks(rows: F32) -> None:
    one, many = (InputStatistics(INPUTS, total=len(rows), hessian=True) for _ in range(2))
    one.add(rows)
    for chunk in np.split(rows, [1, 300, 301, 1500]):
        many.add(chunk)
    assert one.hessian is not None
    assert many.hessian is not None
    np.testing.assert_allclose(many.hessian, rows.T @ rows / len(rows), rtol=1e-3, atol=0.05)
    np.testing.assert_allclose(one.mean_abs, many.mean_abs, rtol=1e-5)
    np.testing.assert_array_equal(one.samples, many.samples)
    assert 512 <= len(one.samples) < 1024
