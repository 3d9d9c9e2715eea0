"""Walks the levels of a tuning: predicts, measures in pairs, gates what is lossy, keeps or rolls back with a reason.

Knows no engine: a TuningMachine measures. Every decision rests on pairs of the current and the new setting, measured in
turns, and on the interval of their ratio; so noise keeps nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

Setting = dict[str, Any]  # options of a variant, and `batching`
Outcome = Literal["kept", "rolled back", "skipped"]
_CALIBRATION: Final = 5  # pairs of the first setting with itself, which show the machine's noise
_FUTILE: Final = 5  # pairs after which a level without a gain is given up
_QUANTILE: Final = 3.3  # of the normal distribution, two-sided 99.9 %: a walk looks many times at many levels
_SLOWER: Final = 0.97  # of the speed that a level for memory may cost
_WIDE: Final = 2.0  # high / low of an interval that proves no gain yet: a burst of other work may have made it


class LevelChoice(msgspec.Struct, frozen=True):
    label: str
    options: dict[str, Any]


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to try, with its alternatives."""

    name: str
    what: str  # what it changes, for readers
    choices: tuple[LevelChoice, ...]
    lossy: bool = False
    aim: Literal["speed", "memory"] = "speed"
    skip: str = ""  # why it is not tried at all


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a setting. The score is better if it is higher."""

    score: float
    figures: dict[str, float] = {}  # tokens_per_s, ttft_p50, ... , memory


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    passed: bool
    reason: str
    figures: dict[str, float] = {}


class OutOfTimeError(Exception):
    """Raised by a machine in place of a measurement when the time for the walk is over."""


class TuningMachine(Protocol):
    def measure(self, setting: Setting, number: int) -> Sample:
        """Measure once. Equal numbers get equal requests. Raise OutOfTimeError if there is no time left."""
        ...

    def predict(self, current: Setting, setting: Setting) -> float | None:
        """Return the expected score of a setting as a multiple of the current one's; None if nothing says."""
        ...

    def impossible(self, setting: Setting) -> str | None:
        """Return why a setting cannot run."""
        ...

    def memory(self, setting: Setting) -> float: ...

    def gate(self, setting: Setting) -> Gate:
        """Compare the answers of a lossy setting with those of the model that it started from."""
        ...


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    least_gain: float = 0.02
    least_pairs: int = 3
    most_pairs: int = 10
    finalists: int = 2  # choices of a level that are measured in pairs
    passes: int = 2  # walks over the lossless levels, because they depend on one another


class LevelResult(msgspec.Struct, frozen=True, kw_only=True):
    level: str
    what: str
    lossy: bool
    walk: int
    outcome: Outcome
    choice: str
    reason: str
    setting: Setting  # after the level
    tried: dict[str, float] = {}  # first score of each choice, as a multiple of the current one
    predicted: float | None = None
    gain: float | None = None  # measured, and its interval
    low: float | None = None
    high: float | None = None
    gate: Gate | None = None
    figures: dict[str, float] = {}  # of the setting after the level, where it was measured
    before: dict[str, float] = {}  # of the setting before it


class Noise(msgspec.Struct):
    """The spread of ratios of pairs, pooled over all comparisons: three pairs alone may agree by chance."""

    squares: float = 0.0
    freedom: int = 0

    def add(self, logarithms: Sequence[float]) -> None:
        if len(logarithms) > 1:
            self.squares += statistics.variance(logarithms) * (len(logarithms) - 1)
            self.freedom += len(logarithms) - 1

    def interval(self, logarithms: Sequence[float]) -> tuple[float, float, float]:
        """Return the geometric mean of ratios and its interval, from the larger of the own and the pooled spread."""
        mean = statistics.fmean(logarithms)
        pooled = math.sqrt(self.squares / self.freedom) if self.freedom else 0.0
        own = statistics.stdev(logarithms) if len(logarithms) > 1 else math.inf
        half = min(_QUANTILE * max(own, pooled) / math.sqrt(len(logarithms)), 700.0 - abs(mean))
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


class SettingComparison(msgspec.Struct, frozen=True):
    gain: float
    low: float
    high: float
    before: dict[str, float]
    after: dict[str, float]


def walk_levels(
    start: Setting,
    levels: Sequence[Level],
    machine: TuningMachine,
    rules: Rules | None = None,
    *,
    on_result: Callable[[LevelResult], None] = lambda _result: None,
) -> list[LevelResult]:
    """Walk the levels and return a result for each. Levels that the machine has no time for are skipped."""
    rules = rules or Rules()
    found: list[LevelResult] = []
    setting = dict(start)
    numbers = _numbers(0)
    noise: Noise | None = None

    def run(level: Level, walk: int) -> bool:
        nonlocal setting, noise
        try:
            if noise is None and not level.skip:
                noise = calibrate(setting, machine, numbers)
            result = try_level(level, setting, machine, rules, walk=walk, numbers=numbers, noise=noise)
        except OutOfTimeError:
            result = _skipped(level, walk, setting, OUT_OF_TIME)
        on_result(result)
        found.append(result)
        setting = dict(result.setting)
        return result.outcome == "kept"

    lossless = [level for level in levels if not level.lossy]
    changed = [run(level, 1) for level in (*lossless, *(level for level in levels if level.lossy))]
    # Last, so that a short time is spent on what was never tried, and because other weights want other threads.
    again = [level for level in lossless if not level.skip and len(level.choices) > 1]
    for walk in range(2, rules.passes + 1):
        if not any(changed):
            break
        changed = [run(level, walk) for level in again]
    return found


OUT_OF_TIME: Final = "out of time: raise --minutes, or run again with the same --state to go on"


def try_level(
    level: Level,
    current: Setting,
    machine: TuningMachine,
    rules: Rules,
    *,
    walk: int = 1,
    numbers: Iterator[int] | None = None,
    noise: Noise | None = None,
) -> LevelResult:
    numbers = _numbers(0) if numbers is None else numbers
    noise = Noise() if noise is None else noise
    if level.skip:
        return _skipped(level, walk, current, level.skip)
    settings = {choice.label: {**current, **choice.options} for choice in level.choices}
    reasons: list[str] = []
    for label, setting in list(settings.items()):
        if setting == current:
            del settings[label]
        elif (why := machine.impossible(setting)) is not None:
            reasons.append(f"{label}: {why}")
            del settings[label]
    if not settings:
        why = "; ".join(reasons) or "the current setting has it already"
        return _skipped(level, walk, current, why)
    # One look at each choice, then pairs for the best.
    tried: dict[str, float] = {}
    if len(settings) > 1:
        number = next(numbers)
        base = machine.measure(current, number).score
        tried = {label: machine.measure(setting, number).score / base for label, setting in settings.items()}
    order = sorted(settings, key=lambda label: _interest(level, machine, settings[label], tried.get(label, 1.0)))
    last: LevelResult | None = None
    for label in order[: rules.finalists]:
        setting = settings[label]
        compared = compare_settings(level, current, setting, machine, rules, numbers, noise)
        reason, gate = _verdict(level, current, setting, compared, machine, rules)
        result = LevelResult(
            level=level.name,
            what=level.what,
            lossy=level.lossy,
            walk=walk,
            outcome="rolled back" if reason else "kept",
            choice=label,
            reason=reason or _praise(level, compared, gate, machine, current, setting),
            setting=dict(current) if reason else setting,
            tried=tried,
            predicted=machine.predict(current, setting),
            gain=compared.gain,
            low=compared.low,
            high=compared.high,
            gate=gate,
            figures=compared.before if reason else compared.after,
            before=compared.before,
        )
        if not reason:
            return result
        # What the gate refused says more than what was only slow.
        last = result if last is None or (gate is not None and last.gate is None) else last
    assert last is not None
    return last


def _interest(level: Level, machine: TuningMachine, setting: Setting, score: float) -> tuple[float, float]:
    return (machine.memory(setting), -score) if level.aim == "memory" else (-score, machine.memory(setting))


def compare_settings(
    level: Level,
    current: Setting,
    setting: Setting,
    machine: TuningMachine,
    rules: Rules,
    numbers: Iterator[int],
    noise: Noise,
) -> SettingComparison:
    """Measure pairs until the interval decides, or the most pairs are measured."""
    ratios: list[float] = []
    befores: list[Sample] = []
    afters: list[Sample] = []
    gain, low, high = 1.0, 0.0, math.inf
    wanted = 1.0 + rules.least_gain if level.aim == "speed" else _SLOWER
    for pair in range(rules.most_pairs):
        number = next(numbers)
        # The order alternates, so that a drift of the machine favours neither.
        for each in (current, setting) if pair % 2 == 0 else (setting, current):
            sample = machine.measure(each, number)
            (befores if each is current else afters).append(sample)
        ratios.append(math.log(max(afters[-1].score, 1e-12) / max(befores[-1].score, 1e-12)))
        gain, low, high = noise.interval(ratios)
        if len(ratios) >= rules.least_pairs and (
            high < wanted or (low > 1.0 and gain >= wanted and high < _WIDE * low)
        ):
            break
        if level.aim == "speed" and len(ratios) >= _FUTILE and gain < 1.0 + rules.least_gain / 2.0:
            break
        if level.aim == "memory" and len(ratios) >= rules.least_pairs and low > wanted:
            break
    noise.add(ratios)
    return SettingComparison(gain, low, high, _medians(befores), _medians(afters))


def calibrate(setting: Setting, machine: TuningMachine, numbers: Iterator[int]) -> Noise:
    """Measure a setting against itself."""
    noise = Noise()
    ratios: list[float] = []
    for _ in range(_CALIBRATION):
        number = next(numbers)
        one, other = machine.measure(setting, number).score, machine.measure(setting, number).score
        ratios.append(math.log(max(other, 1e-12) / max(one, 1e-12)))
    noise.add(ratios)
    return noise


def _verdict(
    level: Level, current: Setting, setting: Setting, compared: SettingComparison, machine: TuningMachine, rules: Rules
) -> tuple[str, Gate | None]:
    """Return why the level is rolled back, empty if it is kept, and the gate's result."""
    interval = f"{compared.low:.2f} to {compared.high:.2f} times"
    if level.aim == "memory":
        if machine.memory(setting) >= 0.99 * machine.memory(current):
            return "it saves no memory", None
        if compared.gain < _SLOWER:
            return f"it saves memory and is slower: {interval}", None
    elif compared.high < 1.0:
        return f"slower: {interval}", None
    elif compared.low <= 1.0 or compared.gain < 1.0 + rules.least_gain:
        return f"no gain of {rules.least_gain:.0%} above the noise: {interval}", None
    if not level.lossy:
        return "", None
    gate = machine.gate(setting)
    return ("" if gate.passed else f"the gate failed: {gate.reason}"), gate


def _praise(
    level: Level,
    compared: SettingComparison,
    gate: Gate | None,
    machine: TuningMachine,
    current: Setting,
    setting: Setting,
) -> str:
    if level.aim == "memory":
        text = f"memory {machine.memory(setting) / max(machine.memory(current), 1.0):.2f} times, speed unchanged"
    else:
        text = f"{compared.gain:.2f} times ({compared.low:.2f} to {compared.high:.2f})"
    return f"{text}; gate: {gate.reason}" if gate is not None else text


def _skipped(level: Level, walk: int, setting: Setting, why: str) -> LevelResult:
    return LevelResult(
        level=level.name,
        what=level.what,
        lossy=level.lossy,
        walk=walk,
        outcome="skipped",
        choice="",
        reason=why,
        setting=dict(setting),
    )


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    names = [name for name in samples[0].figures if all(name in sample.figures for sample in samples)]
    found = {name: statistics.median(sample.figures[name] for sample in samples) for name in names}
    return {"score": statistics.median(sample.score for sample in samples), **found}


def _numbers(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1
