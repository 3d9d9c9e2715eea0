"""CanaryEvidence: what one canary has shown so far, arm beside arm, and the sequential test of each measure.

The level alpha is shared by all measures, so that it holds for all of them together. Knows no routing and no storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from headrace.lab.online.sequential import MeanComparison, RateComparison, TailComparison, is_decided
from headrace.observe.latency.sketch import Sketch

Arm = Literal["control", "candidate"]
ARMS: Final[tuple[Arm, ...]] = ("control", "candidate")
DURATIONS: Final = ("ttft", "itl", "e2e")
RATES: Final = ("failures", "checks", "feedback", "quality")
MEASURES: Final = len(DURATIONS) + len(RATES) + 1  # and the cost


class CanaryBounds(msgspec.Struct, frozen=True, kw_only=True):
    alpha: float = 0.05
    slower: float = 0.1  # share
    dearer: float = 0.1  # share
    worse: float = 0.02  # quality, feedback, checks: from 0 to 1
    failures: float = 0.01


class ArmSums(msgspec.Struct):
    """The sums of one arm. Durations are in seconds."""

    requests: int = 0
    priced: int = 0
    micros: int = 0
    output_tokens: int = 0
    rates: dict[str, list[float]] = {}  # by measure: sum of values, number of values
    durations: dict[str, Sketch] = {}

    def note(self, measure: str, value: float) -> None:
        sums = self.rates.setdefault(measure, [0.0, 0.0])
        sums[0] += value
        sums[1] += 1.0

    def count(self, measure: str) -> int:
        return int(self.rates.get(measure, (0.0, 0.0))[1])

    def mean(self, measure: str) -> float | None:
        total, count = self.rates.get(measure, (0.0, 0.0))
        return total / count if count else None

    def as_json(self) -> dict[str, Any]:
        durations: dict[str, Any] = {}
        for name, sketch in self.durations.items():
            p50, p95 = (round(each * 1e3, 3) for each in sketch.quantiles((0.5, 0.95)))
            durations[name] = {"count": sketch.count, "p50_ms": p50, "p95_ms": p95}
        quality, feedback = self.mean("quality"), self.mean("feedback")
        return {
            "requests": self.requests,
            "failures": _rounded(self.mean("failures")),
            "failed_checks": _rounded(self.mean("checks")),
            "quality": None if quality is None else _rounded(1.0 - quality),
            "feedback": None if feedback is None else _rounded(1.0 - feedback),
            "micros_per_request": _rounded(self.micros / self.priced) if self.priced else None,
            "tokens_per_request": _rounded(self.output_tokens / self.priced) if self.priced else None,
            "latency": durations,
        }

    def pack(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "priced": self.priced,
            "micros": self.micros,
            "output_tokens": self.output_tokens,
            "rates": self.rates,
            "durations": {name: sketch.pack() for name, sketch in self.durations.items()},
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> ArmSums:
        durations: dict[str, Sketch] = {name: Sketch.unpack(each) for name, each in packed["durations"].items()}
        values: dict[str, Any] = {**packed, "durations": durations}
        return cls(**values)


class Verdict(msgspec.Struct, frozen=True):
    """One measure. Evidence is the wealth of a bet: it is at most 1 / alpha with probability 1 - alpha if untrue."""

    measure: str
    is_breached: bool  # the candidate is worse by more than the tolerance
    is_proven: bool  # it is not
    breach: float  # evidence
    proof: float

    def as_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "verdict": "breached" if self.is_breached else "proven" if self.is_proven else "open",
            "breach_evidence": _wealth(self.breach),
            "proof_evidence": _wealth(self.proof),
        }


class CanaryEvidence:
    def __init__(self, run: str, bounds: CanaryBounds) -> None:
        self.run = run
        self.bounds = bounds
        self.arms: dict[Arm, ArmSums] = {arm: ArmSums() for arm in ARMS}
        tolerances = {"failures": bounds.failures}
        self.rates = {name: RateComparison.of(tolerances.get(name, bounds.worse)) for name in RATES}
        self.durations = {name: TailComparison.of(bounds.slower) for name in DURATIONS}
        self.cost = MeanComparison(bounds.dearer)

    @property
    def level(self) -> float:
        """Return the level of each single test."""
        return self.bounds.alpha / MEASURES

    def note_rate(self, arm: Arm, measure: str, value: float) -> None:
        """Take a value from 0, good, to 1."""
        self.arms[arm].note(measure, value)
        comparison = self.rates[measure]
        (comparison.control if arm == "control" else comparison.candidate)(value)

    def note_quality(self, control: float, candidate: float) -> None:
        """Take the quality of both arms' answers to one request, 0 to 1."""
        self.arms["control"].note("quality", 1.0 - control)
        self.arms["candidate"].note("quality", 1.0 - candidate)
        self.rates["quality"].pair(1.0 - control, 1.0 - candidate)

    def note_seconds(self, arm: Arm, measure: str, seconds: float) -> None:
        sketches = self.arms[arm].durations
        if measure not in sketches:
            sketches[measure] = Sketch()
        sketches[measure].add(seconds)
        comparison = self.durations[measure]
        (comparison.control if arm == "control" else comparison.candidate)(seconds)

    def note_answer(self, arm: Arm, *, output_tokens: int, micros: int) -> None:
        """Take the size and the price of an answer. A free one, of a variant without a price, is not compared."""
        sums = self.arms[arm]
        sums.priced += 1
        sums.output_tokens += output_tokens
        sums.micros += micros
        if micros:
            (self.cost.control if arm == "control" else self.cost.candidate)(float(micros))

    def verdicts(self) -> list[Verdict]:
        level = self.level
        return [
            Verdict(name, is_decided(each.breach, level), is_decided(each.proof, level), each.breach, each.proof)
            for name, each in (*self.rates.items(), *self.durations.items(), ("cost", self.cost))
        ]

    def breaches(self) -> list[Verdict]:
        return [each for each in self.verdicts() if each.is_breached]

    @property
    def is_proven(self) -> bool:
        """True if every measure that has values is within its tolerance, beyond doubt."""
        seen = [each for each in self.verdicts() if self._has_values(each.measure)]
        return bool(seen) and all(each.is_proven for each in seen)

    def _has_values(self, measure: str) -> bool:
        sums = self.arms["candidate"]
        return measure in sums.rates or measure in sums.durations or (measure == "cost" and sums.micros > 0)

    def pack(self) -> bytes:
        return msgspec.json.encode(
            {
                "run": self.run,
                "arms": {arm: sums.pack() for arm, sums in self.arms.items()},
                "rates": {name: each for name, each in self.rates.items()},
                "durations": {name: each.pack() for name, each in self.durations.items()},
                "cost": self.cost,
            }
        )

    @classmethod
    def unpack(cls, run: str, bounds: CanaryBounds, data: bytes | None) -> CanaryEvidence:
        """Return the saved evidence; empty without any of this run, in this form and with these tolerances."""
        found = cls(run, bounds)
        try:
            packed = msgspec.json.decode(data or b"", type=dict[str, Any])
            if packed.get("run") != run:
                return found
            rates = msgspec.convert(packed["rates"], dict[str, RateComparison])
            cost = msgspec.convert(packed["cost"], MeanComparison)
            durations = {name: TailComparison.of(bounds.slower) for name in DURATIONS}
            for name, each in durations.items():
                each.unpack(packed["durations"][name])
            arms: dict[Arm, ArmSums] = {arm: ArmSums.unpack(packed["arms"][arm]) for arm in ARMS}
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            return found
        if any(found.rates[name].tolerance != each.tolerance for name, each in rates.items() if name in found.rates):
            return found
        if cost.tolerance != bounds.dearer:
            return found
        found.rates |= rates
        found.cost = cost
        found.durations, found.arms = durations, arms
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "control": self.arms["control"].as_json(),
            "candidate": self.arms["candidate"].as_json(),
            "needed_evidence": round(1.0 / self.level, 1),
            "measures": [each.as_json() for each in self.verdicts() if self._has_values(each.measure)],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _wealth(logarithm: float) -> float:
    return round(math.exp(min(logarithm, 30.0)), 2)
