"""SemanticTrial: how often the semantic cache's answers are wrong, by the similarity of the questions, and which
threshold keeps the bound. Counts only; keeps no texts.

While a tenant's mode serves nothing (`record`), every answer that the cache had is compared with what the model said,
so the counts are those of a sample without selection. Hits that were served and checked are counted apart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.semantic.semantic_cache import SemanticComparison
from headrace.gateway.caches.semantic.thresholds import wilson_interval
from headrace.lab.online.lab_store import LabStore

log: Final = logging.getLogger(__name__)

BUCKETS: Final = 50  # of scores from 0 to 1
_DAY_S: Final = 86_400
_DAYS: Final = 63  # kept
_SAVE_S: Final = 60.0
_NAME: Final = "semantic trial"
_Z: Final = 1.96
_RIGHT, _WRONG, _UNSURE = 0, 1, 2


class TrialDay(msgspec.Struct):
    """Counts of one day, or of several."""

    scores: dict[int, list[int]] = {}  # right, wrong and unclear, by bucket
    learned: list[int] = msgspec.field(default_factory=lambda: [0, 0])  # right and wrong that would have been served
    checked: list[int] = msgspec.field(default_factory=lambda: [0, 0])  # of hits that were served

    def take(self, comparison: SemanticComparison) -> None:
        same = comparison.same
        if comparison.was_served:
            if same is not None:
                self.checked[not same] += 1
            return
        if not comparison.is_trial:
            return  # only what was not served is compared then: a sample of the doubtful
        bucket = min(BUCKETS - 1, max(0, int(comparison.score * BUCKETS)))
        self.scores.setdefault(bucket, [0, 0, 0])[_UNSURE if same is None else _RIGHT if same else _WRONG] += 1
        if same is not None and comparison.would_serve:
            self.learned[not same] += 1

    def merge(self, other: TrialDay) -> None:
        for bucket, counts in other.scores.items():
            mine = self.scores.setdefault(bucket, [0, 0, 0])
            mine[:] = [one + more for one, more in zip(mine, counts, strict=True)]
        for mine, theirs in ((self.learned, other.learned), (self.checked, other.checked)):
            mine[:] = [one + more for one, more in zip(mine, theirs, strict=True)]


class ServedShare(msgspec.Struct, frozen=True):
    """What a threshold, or the learned ones, would have served."""

    served: int
    wrong: int
    compared: int  # all clear comparisons

    @property
    def wrong_most(self) -> float:
        """Return the upper end of the 95 % interval."""
        return wilson_interval(self.wrong, self.served)[1]

    def as_json(self) -> dict[str, Any]:
        return {
            "served": self.served,
            "share": round(self.served / self.compared, 4) if self.compared else None,
            "wrong": self.wrong,
            "wrong_share": round(self.wrong / self.served, 4) if self.served else None,
            "wrong_most": round(self.wrong_most, 4) if self.served else None,
        }


class TrialReport(msgspec.Struct, frozen=True):
    delta: float
    compared: int
    unsure: int
    thresholds: tuple[tuple[float, ServedShare], ...]  # ascending; scores from the threshold on are served
    learned: ServedShare
    checked: ServedShare

    @classmethod
    def of(cls, sums: TrialDay, delta: float) -> TrialReport:
        clear = {bucket: counts[:2] for bucket, counts in sums.scores.items()}
        compared = sum(map(sum, clear.values()))
        thresholds: list[tuple[float, ServedShare]] = []
        served = wrong = 0
        for bucket in sorted(clear, reverse=True):
            served += sum(clear[bucket])
            wrong += clear[bucket][_WRONG]
            thresholds.append((bucket / BUCKETS, ServedShare(served, wrong, compared)))
        return cls(
            delta,
            compared,
            sum(counts[_UNSURE] for counts in sums.scores.values()),
            tuple(reversed(thresholds)),
            ServedShare(sum(sums.learned), sums.learned[_WRONG], compared),
            ServedShare(sum(sums.checked), sums.checked[_WRONG], sum(sums.checked)),
        )

    @property
    def best(self) -> tuple[float, ServedShare] | None:
        """Return the lowest threshold that keeps the bound with 95 % confidence."""
        return next((each for each in self.thresholds if each[1].wrong_most <= self.delta), None)

    @property
    def needed(self) -> int:
        """Return how many answers, all of them right, show that the bound is kept."""
        return math.ceil(_Z * _Z * (1.0 - self.delta) / self.delta) if self.delta else 0

    @property
    def advice(self) -> str:
        if not self.compared:
            return "No answers have been compared. Set cache.semantic.mode to record for tenants that ask alike."
        found = self.best
        if found is None:
            return (
                f"No threshold is shown to keep {_percent(self.delta)} wrong answers. Keep the mode record: it takes "
                f"{self.needed} right answers in a row above a threshold to show it, and there are {self.compared}."
            )
        threshold, served = found
        text = (
            f"threshold = {threshold:g} serves {_percent(served.served / served.compared)} of the questions that have "
            f"a neighbour; {_percent(served.wrong / served.served)} of these answers are wrong, at most "
            f"{_percent(served.wrong_most)}."
        )
        learned = self.learned
        if learned.served and learned.wrong_most <= self.delta and learned.served >= served.served:
            return text + (
                f" The learned thresholds serve {_percent(learned.served / learned.compared)} and keep the bound, too: "
                "leave threshold unset and set mode to share."
            )
        return text + " Set it, and mode to share."

    def as_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "delta": self.delta,
            "compared": self.compared,
            "unsure": self.unsure,
            "learned": self.learned.as_json(),
            "checked_hits": self.checked.as_json(),
            "thresholds": [{"threshold": threshold, **each.as_json()} for threshold, each in self.thresholds],
            "best": None if best is None else best[0],
            "advice": self.advice,
        }


class SemanticTrial:
    """All of it belongs to one event loop."""

    def __init__(self, store: LabStore, *, delta: float, clock: Callable[[], float] = time.time) -> None:
        self.days: dict[int, TrialDay] = {}  # by day since 1970
        self._store = store
        self._delta = delta
        self._clock = clock
        self._has_changed = False

    def take(self, comparison: SemanticComparison) -> None:
        day = int(self._clock() // _DAY_S)
        if day not in self.days:
            self.days[day] = TrialDay()
            for old in [each for each in self.days if each <= day - _DAYS]:
                del self.days[old]
        self.days[day].take(comparison)
        self._has_changed = True

    def report(self, days: int = 7) -> TrialReport:
        """Sum up the last days."""
        first = int(self._clock() // _DAY_S) - days + 1
        return TrialReport.of(total_of(each for day, each in self.days.items() if day >= first), self._delta)

    def as_json(self, days: int) -> dict[str, Any]:
        return {"object": "semantic_trial", "days": days, **self.report(days).as_json()}

    async def run(self) -> None:
        """Load what was saved, then save until cancelled."""
        await self.load()
        while True:
            await asyncio.sleep(_SAVE_S)
            try:
                await self.save()
            except ApiError as error:
                log.warning("the semantic cache's trial was not saved: %s", error)

    async def load(self) -> None:
        try:
            saved = msgspec.json.decode(await self._store.load(_NAME) or b"{}", type=dict[int, TrialDay])
        except (ApiError, msgspec.MsgspecError) as error:
            log.warning("the semantic cache's trial cannot be read: %s", error)
            return
        for day, counts in saved.items():
            self.days.setdefault(day, TrialDay()).merge(counts)

    async def save(self) -> None:
        if self._has_changed:
            self._has_changed = False
            await self._store.save(_NAME, msgspec.json.encode(self.days))


def total_of(days: Iterable[TrialDay]) -> TrialDay:
    total = TrialDay()
    for day in days:
        total.merge(day)
    return total


def shown_thresholds(report: Mapping[str, Any], most: int = 12) -> list[dict[str, Any]]:
    """Return rows of a report for people: at most so many thresholds, the best one among them."""
    rows: list[dict[str, Any]] = list(report["thresholds"])
    step = max(1, math.ceil(len(rows) / most))
    return [row for place, row in enumerate(rows) if place % step == 0 or row["threshold"] == report["best"]]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
