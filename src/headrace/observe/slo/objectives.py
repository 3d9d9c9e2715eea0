"""Objectives: what share of requests was good enough, how fast the error budget burns, and when to alert.

An objective such as `ttft_p95_ms = 300` allows 5 % of requests to be slower; `availability = 0.999` allows 0.1 % to
fail. The burn rate is the share of bad events by what is allowed: at 1 the budget lasts exactly its window. An alert
needs a high rate over a long and a short window, so it neither fires for a moment nor stays when all is well again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from headrace.observe.latency.latency_book import RequestSample

_KEPT_S: Final = 3 * 86_400.0
_SLOT_S: Final = 60.0
WINDOWS: Final[Mapping[str, float]] = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "6h": 21_600.0, "3d": 259_200.0}


class BurnRule(NamedTuple):
    severity: str
    long: str
    short: str
    rate: float


# The windows and rates of Google's SRE workbook, for a budget of 30 days.
BURN_RULES: Final = (
    BurnRule("page", "1h", "5m", 14.4),
    BurnRule("page", "6h", "30m", 6.0),
    BurnRule("ticket", "3d", "6h", 1.0),
)
_LEAST_EVENTS: Final = 20  # in the short window, before an alert can fire


class SloOptions(Protocol):
    """A section [slo.NAME] of the configuration."""

    @property
    def surface(self) -> str | None: ...

    @property
    def availability(self) -> float | None: ...


class Objective(NamedTuple):
    slo: str
    surface: str
    name: str  # the key of the configuration: ttft_p95_ms, availability
    latency: str  # as in LATENCIES; empty for availability
    threshold_s: float
    target: float  # share of good events

    @property
    def key(self) -> tuple[str, str]:
        return (self.slo, self.name)


_LATENCY_KEYS: Final = ("ttft_p95_ms", "ttft_p99_ms", "itl_p95_ms", "itl_p99_ms", "e2e_p95_ms", "e2e_p99_ms")


def objectives_of(sections: Mapping[str, SloOptions]) -> list[Objective]:
    found: list[Objective] = []
    for slo, section in sections.items():
        surface = section.surface or slo
        for key in _LATENCY_KEYS:
            milliseconds: float | None = getattr(section, key)
            if milliseconds is not None:
                latency, percentile, _ = key.split("_")
                found.append(
                    Objective(slo, surface, key, latency, milliseconds / 1e3, int(percentile.removeprefix("p")) / 100)
                )
        if section.availability is not None:
            found.append(Objective(slo, surface, "availability", "", 0.0, section.availability))
    return found


class StoredSlot(NamedTuple):
    """A minute of an objective, to survive a restart."""

    slo: str
    objective: str
    began: int  # in seconds since 1970
    good: int
    total: int


class _Events:
    """Good and all events of one objective, by the minute, for three days."""

    __slots__ = ("good", "saved", "slots", "total")

    def __init__(self) -> None:
        self.slots: deque[list[float]] = deque()  # when it began, good, total
        self.good = 0
        self.total = 0
        self.saved = 0.0  # when the newest slot began that `take_slots` returned

    def add(self, now: float, good: int, total: int) -> None:
        self.good += good
        self.total += total
        slots = self.slots
        if not slots or now - slots[-1][0] >= _SLOT_S:
            slots.append([now - now % _SLOT_S, 0, 0])
            while now - slots[0][0] > _KEPT_S:
                slots.popleft()
        slots[-1][1] += good
        slots[-1][2] += total

    def over(self, now: float, seconds: float) -> tuple[float, float]:
        """Return good and all events of the last seconds, in whole minutes."""
        good = total = 0.0
        for began, some_good, some in reversed(self.slots):
            if now - began > seconds:
                break
            good += some_good
            total += some
        return good, total


class Alert(NamedTuple):
    objective: Objective
    severity: str  # page or ticket
    fires: bool  # False: it is over
    burn_rate: float
    window: str


class Objectives:
    """All of it belongs to one event loop."""

    def __init__(
        self, objectives: Iterable[Objective], clock: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._epoch = wall() - clock()  # constant, so that a slot that is stored twice has one time
        self._by_surface: dict[str, list[tuple[Objective, _Events]]] = {}
        self._firing: dict[tuple[str, str], str] = {}  # severity
        for objective in objectives:
            self._by_surface.setdefault(objective.surface, []).append((objective, _Events()))

    def judge(self, sample: RequestSample) -> bool:
        """Count a request that the server was to answer. Return whether it met all its objectives."""
        found = self._by_surface.get(sample.slice.surface)
        is_good = not sample.failed
        if found is None:
            return is_good
        now = self._clock()
        for objective, events in found:
            if not objective.latency:
                events.add(now, 0 if sample.failed else 1, 1)
            elif objective.latency == "itl":
                total = len(sample.gaps)
                if total:
                    limit = objective.threshold_s
                    good = sum([gap <= limit for gap in sample.gaps])
                    events.add(now, good, total)
                    is_good = is_good and good >= objective.target * total
            elif (seconds := sample.seconds.get(objective.latency)) is not None:
                met = seconds <= objective.threshold_s
                events.add(now, int(met), 1)
                is_good = is_good and met
        return is_good

    def events(self) -> list[tuple[Objective, int, int]]:
        """Return good and all events of each objective since the start."""
        return [(objective, events.good, events.total) for objective, events in self._all()]

    def _all(self) -> list[tuple[Objective, _Events]]:
        return [each for every in self._by_surface.values() for each in every]

    def take_slots(self) -> list[StoredSlot]:
        """Return the slots that may have changed since the last call."""
        found: list[StoredSlot] = []
        for objective, events in self._all():
            for began, good, total in events.slots:
                if began >= events.saved:
                    found.append(StoredSlot(*objective.key, round(began + self._epoch), int(good), int(total)))
            if events.slots:
                events.saved = events.slots[-1][0]
        return found

    def restore(self, slots: Iterable[StoredSlot]) -> None:
        """Add what was counted before this process began, oldest first."""
        now = self._clock()
        known = {objective.key: events for objective, events in self._all()}
        earlier: dict[tuple[str, str], list[list[float]]] = {}
        for slot in slots:
            began = slot.began - self._epoch
            if (slot.slo, slot.objective) in known and 0.0 <= now - began <= _KEPT_S:
                earlier.setdefault((slot.slo, slot.objective), []).append([began, slot.good, slot.total])
        for key, found in earlier.items():
            known[key].slots.extendleft(reversed(found))

    def evaluate(self) -> list[Alert]:
        """Return the alerts that begin or end now."""
        now = self._clock()
        changes: list[Alert] = []
        for objective, events in self._all():
            before = self._firing.get(objective.key)
            rule, rate = _firing_rule(objective, events, now)
            severity = None if rule is None else rule.severity
            if severity == before:
                continue
            if rule is not None:
                self._firing[objective.key] = rule.severity
                changes.append(Alert(objective, rule.severity, True, rate, rule.long))
            elif before is not None:
                del self._firing[objective.key]
                changes.append(Alert(objective, before, False, burn_rate(objective, events.over(now, 3600.0)), "1h"))
        return changes

    def paging(self) -> set[str]:
        """Return the SLOs with an objective that pages now."""
        return {slo for (slo, _), severity in self._firing.items() if severity == "page"}

    def as_json(self) -> list[dict[str, Any]]:
        now = self._clock()
        found: list[dict[str, Any]] = []
        for objective, events in self._all():
            good, total = events.over(now, _KEPT_S)
            share = good / total if total else None
            allowed = 1.0 - objective.target
            found.append(
                {
                    "slo": objective.slo,
                    "surface": objective.surface,
                    "objective": objective.name,
                    "threshold_ms": round(objective.threshold_s * 1e3, 3) if objective.latency else None,
                    "target": objective.target,
                    "attainment": None if share is None else round(share, 6),
                    "events": int(total),
                    "budget_left": None if share is None else round(1.0 - (1.0 - share) / allowed, 4),
                    "burn_rate": {
                        name: round(burn_rate(objective, events.over(now, seconds)), 3)
                        for name, seconds in WINDOWS.items()
                    },
                    "alert": self._firing.get(objective.key),
                }
            )
        return found


def burn_rate(objective: Objective, counted: tuple[float, float]) -> float:
    good, total = counted
    return (1.0 - good / total) / (1.0 - objective.target) if total else 0.0


def _firing_rule(objective: Objective, events: _Events, now: float) -> tuple[BurnRule | None, float]:
    for rule in BURN_RULES:
        short = events.over(now, WINDOWS[rule.short])
        if short[1] < _LEAST_EVENTS or burn_rate(objective, short) < rule.rate:
            continue
        rate = burn_rate(objective, events.over(now, WINDOWS[rule.long]))
        if rate >= rule.rate:
            return rule, rate
    return None, 0.0
