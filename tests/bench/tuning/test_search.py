"""The walk over the levels, on simulated machines: it finds a planted optimum, ignores noise and obeys the gate."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.bench.tuning.remembered_machine import RememberedMachine, TuneState, read_state
from headrace.bench.tuning.search import (
    OUT_OF_TIME,
    Gate,
    Level,
    LevelChoice,
    LevelResult,
    Noise,
    Rules,
    Sample,
    Setting,
    try_level,
    walk_levels,
)
from headrace.errors import RequestError

THREADS, ROWS, BATCH, DRAFTS, KV = (1, 2, 4, 8), (64, 128, 256, 512, 1024), (1, 8, 16, 32, 64), (0, 2, 4, 8), (0, 1)
LEVELS = [
    Level(name=name, what=name, choices=tuple(LevelChoice(str(each), {name: each}) for each in values), lossy=lossy)
    for name, values, lossy in (
        ("threads", THREADS, False),
        ("batch", BATCH, False),
        ("rows", ROWS, False),
        ("drafts", DRAFTS, False),
        ("kv8", KV, True),
    )
]
START: Setting = {"threads": 1, "batch": 1, "rows": 64, "drafts": 0, "kv8": 0}


class Simulated:
    """Speeds with interactions: threads stop helping at 4, drafts help small batches, large rows need threads."""

    def __init__(self, *, noise: float = 0.03, seed: int = 0, flat: bool = False, harmful: bool = False) -> None:
        self.calls = 0
        self.gated: list[Setting] = []
        self._noise, self._flat, self._harmful = noise, flat, harmful
        self._rng = random.Random(seed)

    def speed(self, setting: Setting) -> float:
        if self._flat:
            return 100.0
        threads = {1: 1.0, 2: 1.9, 4: 3.2, 8: 2.7}[setting["threads"]]
        batch = setting["batch"] ** 0.6 / (1.0 + setting["batch"] / 80.0)
        rows = 1.0 - 0.08 * abs(math.log2(setting["rows"] / (128 * setting["threads"] ** 0.5)))
        drafts = 1.0 + setting["drafts"] * (0.05 - 0.004 * setting["drafts"]) * (1.0 if setting["batch"] < 32 else 0.2)
        return 10.0 * threads * batch * rows * drafts * (1.4 if setting["kv8"] else 1.0)

    def measure(self, setting: Setting, number: int) -> Sample:
        self.calls += 1
        speed = self.speed(setting) * math.exp(self._rng.gauss(0.0, self._noise))
        return Sample(score=speed, figures={"tokens_per_s": speed})

    def predict(self, current: Setting, setting: Setting) -> float | None:
        return None

    def impossible(self, setting: Setting) -> str | None:
        return "not enough memory" if setting["batch"] == 64 and setting["rows"] == 1024 else None

    def memory(self, setting: Setting) -> float:
        return 1000.0 - 400.0 * setting["kv8"]

    def gate(self, setting: Setting) -> Gate:
        self.gated.append(setting)
        return Gate(passed=not self._harmful, reason="KL 0.400, at most 0.020" if self._harmful else "KL 0.001")


def every_setting() -> list[Setting]:
    names = list(START)
    found = [dict(zip(names, each, strict=True)) for each in itertools.product(THREADS, BATCH, ROWS, DRAFTS, KV)]
    machine = Simulated()
    return [setting for setting in found if machine.impossible(setting) is None]


@pytest.mark.parametrize("seed", range(10))
def test_the_walk_finds_the_planted_optimum_in_a_tenth_of_a_sweeps_measurements(seed: int) -> None:
    machine = Simulated(seed=seed)
    last = walk_levels(START, LEVELS, machine)[-1].setting
    best = max(map(machine.speed, every_setting()))
    assert machine.speed(last) >= 0.95 * best
    # A sweep that tells 3 % apart needs as many measurements of each setting as the walk has pairs.
    assert machine.calls <= 0.1 * len(every_setting()) * Rules().least_pairs


@pytest.mark.parametrize("seed", range(30))
def test_a_machine_on_which_nothing_helps_keeps_nothing(seed: int) -> None:
    results = walk_levels(START, LEVELS, Simulated(flat=True, seed=seed, noise=0.05))
    assert [result.level for result in results if result.outcome == "kept"] == []
    assert all(result.setting == START for result in results)
    assert max(result.walk for result in results) == 1  # nothing changed, so there is no second walk


def test_a_lossy_level_that_harms_quality_is_rolled_back_however_fast_it_is() -> None:
    machine = Simulated(harmful=True, noise=0.01)
    result = _first("kv8", walk_levels(START, LEVELS, machine))
    assert result.outcome == "rolled back"
    assert result.gain == pytest.approx(1.4, rel=0.05)
    assert result.reason == "the gate failed: KL 0.400, at most 0.020"
    assert result.setting["kv8"] == 0
    assert machine.gated
    good = _first("kv8", walk_levels(START, LEVELS, Simulated(noise=0.01)))
    assert (good.outcome, good.setting["kv8"]) == ("kept", 1)
    assert "gate: KL 0.001" in good.reason


def _first(level: str, results: Sequence[LevelResult]) -> LevelResult:
    return next(result for result in results if result.level == level)


def test_lossless_levels_come_first_and_never_see_the_gate_and_last_once_more() -> None:
    machine = Simulated(noise=0.01)
    results = walk_levels(START, [LEVELS[-1], *LEVELS[:-1]], machine)
    count = len(LEVELS)
    assert [result.walk for result in results] == [1] * count + [2] * (len(results) - count)
    assert [result.level for result in results if result.lossy] == [results[count - 1].level] == ["kv8"]
    assert results[-1].walk == 2
    assert len(machine.gated) == 1


@pytest.mark.parametrize("fits", [3, 27, 60])
def test_a_walk_goes_on_where_it_was_cut_also_inside_a_level_and_measures_nothing_twice(
    fits: int, tmp_path: Path
) -> None:
    whole = Simulated(noise=0.0)
    expected = walk_levels(START, LEVELS, whole)
    path = tmp_path / "state.json"
    first = Simulated(noise=0.0)
    cut = walk_levels(
        START,
        LEVELS,
        RememberedMachine(first, read_state(path, "one"), path, time_is_over=lambda: first.calls >= fits),
    )
    assert first.calls == fits
    assert cut[-1].reason == OUT_OF_TIME
    second = Simulated(noise=0.0)
    again = walk_levels(START, LEVELS, RememberedMachine(second, read_state(path, "one"), path))
    assert [result.setting for result in again] == [result.setting for result in expected]
    assert first.calls + second.calls == whole.calls
    with pytest.raises(RequestError, match="belongs to a tuning with another model"):
        read_state(path, "other")
    path.write_text("{}")
    with pytest.raises(RequestError, match="is not the state of a tuning"):
        read_state(path, "one")


def test_a_setting_measured_twice_with_one_number_is_measured_twice() -> None:
    machine = Simulated(noise=0.1)
    remembered = RememberedMachine(machine, TuneState(digest=""))
    assert remembered.measure(START, 0) != remembered.measure(START, 0)
    assert machine.calls == 2


def test_a_level_says_why_it_was_not_tried() -> None:
    machine = Simulated()
    skipped = Level(name="pages", what="", choices=(), skip="the system decides")
    assert try_level(skipped, START, machine, Rules()).reason == "the system decides"
    same = Level(name="threads", what="", choices=(LevelChoice("1", {"threads": 1}),))
    assert try_level(same, START, machine, Rules()).reason == "the current setting has it already"
    large = Level(name="large", what="", choices=(LevelChoice("64 and 1024", {"batch": 64, "rows": 1024}),))
    assert try_level(large, START, machine, Rules()).reason == "64 and 1024: not enough memory"
    assert machine.calls == 0


def test_a_level_for_memory_is_kept_if_it_is_not_slower() -> None:
    class Memory(Simulated):
        def memory(self, setting: Setting) -> float:
            return float(setting["context"])

        def impossible(self, setting: Setting) -> str | None:
            return None

    def result(*, cost: float) -> LevelResult:
        class Costly(Memory):
            def speed(self, setting: Setting) -> float:
                return 100.0 * (cost if setting["context"] < 8192 else 1.0)

        level = Level(name="context", what="", choices=(LevelChoice("512", {"context": 512}),), aim="memory")
        return try_level(level, {"context": 8192}, Costly(noise=0.01), Rules())

    assert result(cost=1.0).outcome == "kept"
    assert "memory 0.06 times" in result(cost=1.0).reason
    assert result(cost=0.8).outcome == "rolled back"


def test_the_interval_of_ratios_covers_the_truth_and_pools_the_spread() -> None:
    rng = random.Random(5)
    noise = Noise()
    covered = 0
    for _ in range(400):
        ratios = [math.log(1.1) + rng.gauss(0.0, 0.05) for _ in range(5)]
        gain, low, high = noise.interval(ratios)
        assert low <= gain <= high
        covered += low <= 1.1 <= high
        noise.add(ratios)
    assert covered >= 0.985 * 400
    # Three pairs that agree by chance are not trusted more than the machine allows.
    _, low, high = noise.interval([0.0, 0.001, 0.0])
    assert low < 0.92
    assert high > 1.08
    assert Noise().interval([0.0])[1] < 1e-100 < 1e100 < Noise().interval([0.0])[2]
