"""Drift: how the traffic of one span of days differs from that of another, and whether that is more than chance. Pure.

A mix is a count by group (language, topic, length). Its drift is the total variation distance: the share of requests
that would have to move to another group for both spans to be alike. Two samples of the same traffic are never exactly
alike, so each drift comes with what samples of these sizes would show by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

OTHER: Final = "other"
MOST_GROUPS: Final = 64  # of a dimension in a day
LEAST_DRIFT: Final = 0.1  # from which on a mix counts as changed
_Z: Final = 1.96


class MeanSums(msgspec.Struct):
    """The sums behind a mean and its error."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    def merge(self, other: MeanSums) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def variance(self) -> float:
        """Return the variance of the mean."""
        if self.count < 2:
            return math.inf
        mean = self.total / self.count
        return max(0.0, self.squares / self.count - mean * mean) / (self.count - 1)


class DailyTraffic(msgspec.Struct):
    """The traffic of a day, or of several."""

    requests: int = 0
    mixes: dict[str, dict[str, int]] = {}  # requests by dimension and group
    means: dict[str, MeanSums] = {}  # prompt and answer tokens, cost
    quality: dict[str, MeanSums] = {}  # agreement with a better variant, by the variant that answered
    facts: dict[str, MeanSums] = {}  # share of an answer's facts that its sources have, by variant

    def count(self, dimension: str, group: str, number: int = 1) -> None:
        groups = self.mixes.setdefault(dimension, {})
        if group not in groups and len(groups) >= MOST_GROUPS:
            group = OTHER
        groups[group] = groups.get(group, 0) + number

    def note(self, name: str, value: float) -> None:
        self.means.setdefault(name, MeanSums()).add(value)

    def note_quality(self, variant: str, value: float) -> None:
        self.quality.setdefault(variant, MeanSums()).add(value)

    def note_facts(self, variant: str, value: float) -> None:
        self.facts.setdefault(variant, MeanSums()).add(value)

    def merge(self, other: DailyTraffic) -> None:
        self.requests += other.requests
        for dimension, groups in other.mixes.items():
            for group, number in groups.items():
                self.count(dimension, group, number)
        for mine, theirs in ((self.means, other.means), (self.quality, other.quality), (self.facts, other.facts)):
            for name, sums in theirs.items():
                mine.setdefault(name, MeanSums()).merge(sums)


class MixDrift(msgspec.Struct, frozen=True):
    dimension: str
    drift: float  # share of requests, 0 to 1
    by_chance: float  # what two samples of the same traffic would show on average
    groups: tuple[tuple[str, float, float], ...]  # name, share before and after; the largest changes first

    @property
    def has_drifted(self) -> bool:
        return self.drift >= max(LEAST_DRIFT, 2.0 * self.by_chance)


class MeanChange(msgspec.Struct, frozen=True):
    name: str
    before: float
    after: float
    error: float  # half of the 95 % interval of the difference

    @property
    def has_drifted(self) -> bool:
        return abs(self.after - self.before) > self.error


class DriftReport(msgspec.Struct, frozen=True):
    before: int  # requests
    after: int
    mixes: tuple[MixDrift, ...]
    means: tuple[MeanChange, ...]
    quality: tuple[MeanChange, ...]
    facts: tuple[MeanChange, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "requests_before": self.before,
            "requests_after": self.after,
            "mixes": [
                {
                    "dimension": each.dimension,
                    "drift": round(each.drift, 4),
                    "by_chance": round(each.by_chance, 4),
                    "has_drifted": each.has_drifted,
                    "groups": [
                        {"group": group, "before": round(before, 4), "after": round(after, 4)}
                        for group, before, after in each.groups
                    ],
                }
                for each in self.mixes
            ],
            "means": [_mean_json(each) for each in self.means],
            "quality": [_mean_json(each) for each in self.quality],
            "facts": [_mean_json(each) for each in self.facts],
        }


def total_of(profiles: Iterable[DailyTraffic]) -> DailyTraffic:
    total = DailyTraffic()
    for each in profiles:
        total.merge(each)
    return total


def compare_traffic(before: DailyTraffic, after: DailyTraffic) -> DriftReport:
    """Compare two spans. Dimensions and means that one of them lacks are left out."""
    mixes = [
        mix_drift(name, before.mixes[name], after.mixes[name]) for name in sorted({*before.mixes} & {*after.mixes})
    ]
    return DriftReport(
        before.requests,
        after.requests,
        tuple(mixes),
        tuple(_mean_changes(before.means, after.means)),
        tuple(_mean_changes(before.quality, after.quality)),
        tuple(_mean_changes(before.facts, after.facts)),
    )


def mix_drift(dimension: str, before: Mapping[str, int], after: Mapping[str, int]) -> MixDrift:
    then, now = sum(before.values()), sum(after.values())
    if not then or not now:
        return MixDrift(dimension, 0.0, 1.0, ())
    groups: list[tuple[str, float, float]] = []
    drift = chance = 0.0
    for group in {*before, *after}:
        old, new = before.get(group, 0) / then, after.get(group, 0) / now
        pooled = (before.get(group, 0) + after.get(group, 0)) / (then + now)
        groups.append((group, old, new))
        drift += abs(new - old) / 2.0
        # The mean absolute value of a normal variable with the variance of the difference of two shares.
        chance += math.sqrt(2.0 / math.pi * pooled * (1.0 - pooled) * (1.0 / then + 1.0 / now)) / 2.0
    groups.sort(key=lambda each: (-abs(each[2] - each[1]), each[0]))
    return MixDrift(dimension, drift, chance, tuple(groups))


def _mean_changes(before: Mapping[str, MeanSums], after: Mapping[str, MeanSums]) -> Iterable[MeanChange]:
    for name in sorted({*before} & {*after}):
        old, new = before[name], after[name]
        if old.mean is not None and new.mean is not None:
            yield MeanChange(name, old.mean, new.mean, _Z * math.sqrt(old.variance + new.variance))


def _mean_json(change: MeanChange) -> dict[str, Any]:
    return {
        "name": change.name,
        "before": round(change.before, 4),
        "after": round(change.after, 4),
        "error": round(change.error, 4) if math.isfinite(change.error) else None,
        "has_drifted": change.has_drifted,
    }
