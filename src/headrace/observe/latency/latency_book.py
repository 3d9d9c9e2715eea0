"""LatencyBook: durations, tokens and costs of requests by slice, for the last minutes, the hour and since the start.

A slice is a model, surface, tenant, endpoint, prompt length and route. Any coarser slice is a sum of these, so its
percentiles are as right as theirs. The number of slices is bounded: beyond it, requests count for the slice `other`.
Requests are added up a few dozen at a time, while that code is in the processor's caches, and before anyone reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headrace.observe.latency.sketch import Sketch

# In seconds, as docs/reference/metrics.md describes them.
LATENCIES: Final = ("ttft", "itl", "tpot", "queue", "prefill", "decode", "post", "tokenise", "hop", "e2e")
OTHER: Final = "other"
FORMER: Final = "former"  # tenants that have no label of their own any more
SLOT_S: Final = 60.0
_KEPT_S: Final = 11 * SLOT_S  # of slots
_TICK_S: Final = 10.0
_TICKS: Final = 60
_TOGETHER: Final = 32  # requests that are added up at once
_LENGTHS: Final = (0, 128, 512, 2048, 8192, 32_768)


class Slice(NamedTuple):
    model: str
    surface: str
    tenant: str
    endpoint: str
    length: str  # bucket of the prompt's tokens
    route: str  # how it was routed, or the cache that answered
    profile: str = "standard"  # that the request chose


DIMENSIONS: Final = Slice._fields


def length_bucket(tokens: int) -> str:
    """Return the smallest power of the list that the prompt does not exceed: `<=128`, `<=512`, ..., `>32768`."""
    for bound in _LENGTHS:
        if tokens <= bound:
            return f"<={bound}"
    return f">{_LENGTHS[-1]}"


class RequestSample(msgspec.Struct):
    """What is counted of one finished request. Latencies that do not apply are left out."""

    slice: Slice
    seconds: dict[str, float]
    gaps: Sequence[float] = ()  # between outputs, in seconds: `itl`
    stages: Mapping[str, float] = {}  # seconds of each
    failed: bool = False  # by a fault of the server
    good: bool = True  # met every objective of its surface
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    micros: int = 0  # its price
    machine_s: float = 0.0
    cache: str = ""  # that answered
    saved_s: float = 0.0
    saved_micros: int = 0
    ending: str = ""  # of a generated answer, and who limited its length, as answer_lengths writes it
    answer_tokens: float = 0.0  # of one of its choices


class Row(msgspec.Struct):
    """The sums of a slice."""

    requests: int = 0
    failed: int = 0
    good: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    micros: int = 0
    machine_s: float = 0.0
    saved: dict[str, list[float]] = {}  # requests, seconds and micros, by cache
    stages: dict[str, float] = {}  # seconds
    sketches: dict[str, Sketch] = {}
    lengths: dict[str, Sketch] = {}  # tokens of generated answers, by ending

    def add(self, sample: RequestSample) -> None:
        self.requests += 1
        self.failed += sample.failed
        self.good += sample.good
        self.prompt_tokens += sample.prompt_tokens
        self.cached_tokens += sample.cached_tokens
        self.output_tokens += sample.output_tokens
        self.drafted += sample.drafted
        self.accepted += sample.accepted
        self.micros += sample.micros
        self.machine_s += sample.machine_s
        stages, sketches = self.stages, self.sketches
        for name, seconds in sample.stages.items():
            stages[name] = stages.get(name, 0.0) + seconds
        for name, seconds in sample.seconds.items():
            sketch = sketches.get(name)
            if sketch is None:
                sketch = sketches[name] = Sketch()
            sketch.add(seconds)
        if sample.gaps:
            if "itl" not in sketches:
                sketches["itl"] = Sketch()
            sketches["itl"].extend(sample.gaps)
        if sample.cache:
            saved = self.saved.setdefault(sample.cache, [0, 0.0, 0])
            saved[0] += 1
            saved[1] += sample.saved_s
            saved[2] += sample.saved_micros
        if sample.ending:
            if sample.ending not in self.lengths:
                self.lengths[sample.ending] = Sketch()
            self.lengths[sample.ending].add(sample.answer_tokens)

    def merge(self, other: Row) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, seconds in other.stages.items():
            self.stages[name] = self.stages.get(name, 0.0) + seconds
        for name, sketch in other.sketches.items():
            self.sketches.setdefault(name, Sketch()).merge(sketch)
        for ending, sketch in other.lengths.items():
            self.lengths.setdefault(ending, Sketch()).merge(sketch)
        for cache, amounts in other.saved.items():
            saved = self.saved.setdefault(cache, [0, 0.0, 0])
            self.saved[cache] = [one + more for one, more in zip(saved, amounts, strict=True)]

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Return p50, p95 and p99 in milliseconds, and the count, of each latency."""
        found: dict[str, dict[str, float]] = {}
        for name in LATENCIES:
            if (sketch := self.sketches.get(name)) is not None and (count := sketch.count):
                p50, p95, p99 = (round(each * 1e3, 3) for each in sketch.quantiles((0.5, 0.95, 0.99)))
                found[name] = {"count": count, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}
        return found

    def pack(self) -> dict[str, Any]:
        sketches = {name: sketch.pack() for name, sketch in self.sketches.items()}
        lengths = {ending: sketch.pack() for ending, sketch in self.lengths.items()}
        return {
            **{name: getattr(self, name) for name in _SUMS},
            "stages": self.stages,
            "saved": self.saved,
            "sketches": sketches,
            "lengths": lengths,
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Row:
        row = cls(**{name: packed[name] for name in _SUMS})
        row.stages, row.saved = dict(packed["stages"]), {name: list(each) for name, each in packed["saved"].items()}
        row.sketches = {name: Sketch.unpack(each) for name, each in packed["sketches"].items()}
        # Hours that were stored before lengths were counted have none.
        row.lengths = {ending: Sketch.unpack(each) for ending, each in packed.get("lengths", {}).items()}
        return row


_SUMS: Final = (
    "requests",
    "failed",
    "good",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "drafted",
    "accepted",
    "micros",
    "machine_s",
)
Rows = dict[Slice, Row]


class Tick(msgspec.Struct):
    """Ten seconds of all traffic, for a chart."""

    at: float  # on the monotonic clock
    requests: int = 0
    failed: int = 0
    good: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: Sketch = msgspec.field(default_factory=Sketch)


class LatencyBook:
    """All of it belongs to one event loop."""

    def __init__(self, clock: Callable[[], float], *, most_slices: int = 512) -> None:
        self._clock = clock
        self._most = most_slices
        self._known: dict[Slice, Slice] = {}  # every slice of a request, to the one that it counts for
        self._waiting: list[tuple[float, RequestSample]] = []  # to be added up, with the times of their ends
        self._slots: deque[tuple[float, Rows]] = deque()
        self._total: Rows = {}
        self._ticks: deque[Tick] = deque(maxlen=_TICKS)
        self._new: Rows = {}  # not taken yet
        self.began = clock()

    def record(self, sample: RequestSample) -> None:
        """Take a finished request. The sample belongs to the book from now on."""
        self._waiting.append((self._clock(), sample))
        if len(self._waiting) >= _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for now, sample in waiting:
            self._add(now, sample)

    def _add(self, now: float, sample: RequestSample) -> None:
        rows = self._slot(now)
        known = self._known.get(sample.slice)
        key = self._bounded(sample.slice) if known is None else known
        row = rows.get(key)
        if row is None:
            row = rows[key] = Row()
        row.add(sample)
        ticks = self._ticks
        if not ticks or now - ticks[-1].at >= _TICK_S:
            ticks.append(Tick(now - now % _TICK_S))
        tick = ticks[-1]
        tick.requests += 1
        tick.failed += sample.failed
        tick.good += sample.good
        tick.prompt_tokens += sample.prompt_tokens
        tick.output_tokens += sample.output_tokens
        if (ttft := sample.seconds.get("ttft")) is not None:
            tick.ttft.add(ttft)

    @property
    def ticks(self) -> Sequence[Tick]:
        """The last ten minutes, oldest first."""
        self._add_up()
        return self._ticks

    def _bounded(self, slice: Slice) -> Slice:
        """Return the slice to count for. Beyond the bound, those of a model and surface are put together."""
        if len(self._known) < self._most:
            self._known[slice] = slice
            return slice
        coarse = Slice(slice.model, slice.surface, OTHER, OTHER, OTHER, OTHER)
        if coarse in self._known or len(self._known) < 2 * self._most:
            self._known[coarse] = coarse
            return coarse
        return Slice(OTHER, OTHER, OTHER, OTHER, OTHER, OTHER)

    def forget_tenant(self, label: str) -> None:
        """Count a tenant's past for the label `former`, so that sums over tenants never fall."""
        self._add_up()
        for slice in [slice for slice, known in self._known.items() if known.tenant == label]:
            del self._known[slice]
        for rows in (self._total, *(rows for _, rows in self._slots)):
            for slice in [slice for slice in rows if slice.tenant == label]:
                add_rows(rows, {slice._replace(tenant=FORMER): rows.pop(slice)})

    def _slot(self, now: float) -> Rows:
        slots = self._slots
        if not slots or now - slots[-1][0] >= SLOT_S:
            if slots:
                self._settle(slots[-1][1])
            slots.append((now, {}))
            while now - slots[0][0] > _KEPT_S:
                slots.popleft()
        return slots[-1][1]

    def _settle(self, rows: Rows) -> None:
        for sums in (self._total, self._new):
            add_rows(sums, rows)

    def take(self) -> Rows:
        """Return what was counted since the last call, in order to store it."""
        self._add_up()
        if self._slots and self._slots[-1][1]:
            self._settle(self._slots[-1][1])
            self._slots.append((self._clock(), {}))
        new, self._new = self._new, {}
        return new

    def put_back(self, rows: Rows) -> None:
        """Let the next `take` return these, too: they could not be stored."""
        add_rows(self._new, rows)

    def window(self, seconds: float) -> Iterator[tuple[Slice, Row]]:
        """Yield the rows of the last seconds, in whole slots of a minute. A slice may come several times."""
        self._add_up()
        now = self._clock()
        for began, rows in self._slots:
            if now - began < seconds + SLOT_S:
                yield from rows.items()

    def total(self) -> Iterator[tuple[Slice, Row]]:
        """Yield the rows since the start. A slice may come twice."""
        self._add_up()
        yield from self._total.items()
        if self._slots:
            yield from self._slots[-1][1].items()


def add_rows(sums: Rows, rows: Mapping[Slice, Row]) -> None:
    for slice, row in rows.items():
        if slice not in sums:
            sums[slice] = Row()
        sums[slice].merge(row)


def group(rows: Iterable[tuple[Slice, Row]], by: Sequence[str]) -> dict[tuple[str, ...], Row]:
    """Add rows up by some dimensions of their slices."""
    places = [DIMENSIONS.index(name) for name in by]
    found: dict[tuple[str, ...], Row] = {}
    for slice, row in rows:
        key = tuple(slice[place] for place in places)
        if key not in found:
            found[key] = Row()
        found[key].merge(row)
    return found
