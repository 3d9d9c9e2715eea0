"""The step-time model: learns a machine, bends where it is no line, and is not misled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of

Machine = Callable[[int, int], float]


def straight(rows: int, pairs: int) -> float:
    return 8e-3 + 0.9e-3 * rows + 40e-9 * pairs


def waits_for_memory(rows: int, pairs: int) -> float:
    """The first sixteen rows are nearly free."""
    return max(15e-3 + 0.05e-3 * rows, 1e-3 * rows) + 40e-9 * pairs


def step(rng: random.Random) -> tuple[int, int]:
    """Decoding of a few sequences, or of these and a prompt."""
    decodes = rng.randint(1, 32)
    pairs = decodes * rng.randint(50, 2000)
    if rng.random() < 0.6:
        return decodes, pairs
    rows = rng.randint(16, 480)
    return decodes + rows, pairs + pairs_of(rng.randint(0, 3000), rows)


def teach(
    model: StepTimeModel, machine: Machine, steps: int, *, seed: int = 0, noise: float = 0.05, held_up: float = 0.0
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        rows, pairs = step(rng)
        seconds = machine(rows, pairs) * math.exp(rng.gauss(0.0, noise))
        model.observe(rows, pairs, seconds * 10 if rng.random() < held_up else seconds)


def worst_error(model: StepTimeModel, machine: Machine) -> float:
    rng = random.Random(99)
    steps = [step(rng) for _ in range(300)]
    errors = sorted(abs(math.log(model.predict(*each) / machine(*each))) for each in steps)
    return errors[int(0.95 * len(errors))]


def test_before_it_has_seen_a_step_it_says_what_it_was_made_with() -> None:
    model = StepTimeModel(10e-3, 1e-3, 1e-6)
    assert model.predict(20, 1000) == pytest.approx(10e-3 + 20e-3 + 1e-3)
    assert model.predict(0, 0) == 0.0


def test_one_step_sets_the_scale() -> None:
    model = StepTimeModel(10e-3, 1e-3, 0.0)
    model.observe(10, 100, 0.2)
    assert model.predict(10, 100) == pytest.approx(0.2, rel=0.05)
    assert model.predict(100, 1000) == pytest.approx(1.1, rel=0.3)


@pytest.mark.parametrize("machine", [straight, waits_for_memory])
def test_it_learns_a_machine(machine: Machine) -> None:
    model = StepTimeModel()
    teach(model, machine, 100)
    assert worst_error(model, machine) < 0.25
    teach(model, machine, 3000, seed=1)
    assert worst_error(model, machine) < 0.15
    assert model.error < 0.1


def test_it_tells_rows_from_the_cache_that_they_read() -> None:
    model = StepTimeModel()
    teach(model, straight, 3000, noise=0.01)
    fixed, per_row, per_pair = model.coefficients
    assert fixed == pytest.approx(8e-3, rel=0.25)
    assert per_row == pytest.approx(0.9e-3, rel=0.1)
    assert per_pair == pytest.approx(40e-9, rel=0.25)


def test_steps_that_were_held_up_hardly_count() -> None:
    model = StepTimeModel()
    teach(model, straight, 1000, held_up=0.03)
    assert worst_error(model, straight) < 0.2


def test_a_single_step_that_was_held_up_moves_it_by_less_than_a_fifth() -> None:
    model = StepTimeModel()
    teach(model, straight, 1000)
    before = model.predict(16, 8000)
    model.observe(16, 8000, before * 50)
    assert model.predict(16, 8000) < 1.2 * before


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_it_follows_a_machine_that_changes_its_speed(factor: float) -> None:
    model = StepTimeModel()
    teach(model, straight, 1000)

    def changed(rows: int, pairs: int) -> float:
        return factor * straight(rows, pairs)

    teach(model, changed, 40, seed=2)
    assert worst_error(model, changed) < 0.35
    teach(model, changed, 400, seed=3)
    assert worst_error(model, changed) < 0.15


def test_hours_of_decoding_do_not_make_it_forget_what_a_prefill_costs() -> None:
    model = StepTimeModel()
    teach(model, straight, 500)
    rng = random.Random(5)
    for _ in range(20_000):
        pairs = 8 * rng.randint(500, 700)
        model.observe(8, pairs, straight(8, pairs) * math.exp(rng.gauss(0.0, 0.05)))
    assert model.predict(400, 100_000) == pytest.approx(straight(400, 100_000), rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_duration_is_not_learned(seconds: float) -> None:
    model = StepTimeModel()
    before = model.predict(10, 100)
    model.observe(10, 100, seconds)
    model.observe(0, 0, 1.0)
    assert model.predict(10, 100) == before
    assert model.steps == 0


def test_the_rows_that_fit_are_the_most_that_do() -> None:
    model = StepTimeModel()
    teach(model, waits_for_memory, 300)
    rng = random.Random(7)
    for _ in range(300):
        rows, pairs, context = rng.randint(0, 64), rng.randint(0, 100_000), rng.randint(0, 4000)
        seconds, most = rng.uniform(0.0, 0.4), rng.randint(0, 512)
        fits = model.rows_within(seconds, most=most, rows=rows, pairs=pairs, context=context)
        assert 0 <= fits <= most
        if fits:
            assert model.predict(rows + fits, pairs + pairs_of(context, fits)) <= seconds
        if fits < most:
            assert model.predict(rows + fits + 1, pairs + pairs_of(context, fits + 1)) > seconds


def test_rows_read_what_is_before_them_and_themselves() -> None:
    assert pairs_of(100, 1) == 101
    assert pairs_of(0, 4) == 1 + 2 + 3 + 4
    assert pairs_of(10, 3) == 11 + 12 + 13


def test_no_size_of_step_is_too_large_for_it() -> None:
    model = StepTimeModel()
    for exponent in range(40):
        model.observe(1 << exponent, 1 << (2 * exponent), 1e-3 * (1 << exponent))
    assert 0.0 < model.predict(1 << 39, 1 << 78) < math.inf
