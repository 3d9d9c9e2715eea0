"""Simulates single embeddings that arrive in bursts, with and without a window in which steps wait for more of them.

    python benchmarks/gather_window.py [--fixed-ms 5] [--row-ms 0.1]

The scheduler is the real one; a step takes a fixed time and a time for each of the 14 rows of a text. The table has the
latency, the steps and the time of computation of a request. Runs in the environment of `make test`.
"""

from __future__ import annotations

import argparse
import random

from msgspec.structs import replace

from headrace.engine.interface.request import GenerationRequest
from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_plan import SchedulerLimits, ShareOutcome
from headrace.engine.scheduling.step_time import StepTimeModel
from headrace.surfaces import SURFACES

TOKENS = 14
WINDOWS_MS = (0, 2, 4, 8)
NEVER = 1e9


def bursts(rng: random.Random, count: int, size: int, gap: float, pause: float) -> list[float]:
    """Return arrival times: `size` requests about `gap` seconds apart, then about `pause` seconds nothing."""
    now, found = 0.0, list[float]()
    for _ in range(count):
        for _ in range(size):
            found.append(now)
            now += rng.expovariate(1 / gap)
        now += rng.expovariate(1 / pause)
    return found


class Simulation:
    def __init__(self, arrivals: list[float], window: float, fixed: float, row: float) -> None:
        surfaces = {name: replace(surface, gather=window) for name, surface in SURFACES.items()}
        limits = SchedulerLimits(causal=False, max_sequences=64)
        self.scheduler = Scheduler(
            BlockManager(4096), limits, Policy(surfaces=surfaces), StepTimeModel(fixed, row, 0.0)
        )
        self._fixed, self._row = fixed, row
        self._due = list(enumerate(arrivals))[::-1]
        self.latencies: list[float] = []
        self.steps, self.busy = 0, 0.0

    def run(self) -> None:
        now = 0.0
        while self._due or not self.scheduler.idle:
            self._admit(now)
            pause = self.scheduler.gather(now)
            if pause:
                now = min(now + pause, max(self._next(), now + 1e-6))
                continue
            plan = self.scheduler.plan(now)
            if plan is None:
                now = self._next()
                continue
            seconds = self._fixed + self._row * plan.rows
            now += seconds
            self._admit(now)  # while the step runs
            for event in self.scheduler.settle(plan, [ShareOutcome() for _ in plan.shares], now, seconds):
                self.latencies.append(now - event.sequence.request.arrival)
            self.steps += 1
            self.busy += seconds

    def _next(self) -> float:
        return self._due[-1][1] if self._due else NEVER

    def _admit(self, until: float) -> None:
        while self._due and self._due[-1][1] <= until:
            number, at = self._due.pop()
            prompt = tuple((number * 31 + place) % 5000 for place in range(TOKENS))
            request = GenerationRequest(id=str(number), prompt=prompt, kind="embed", surface="batch", arrival=at)
            self.scheduler.admit(request, at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed-ms", type=float, default=5.0)
    parser.add_argument("--row-ms", type=float, default=0.1)
    options = parser.parse_args()
    rng = random.Random(2)
    loads = {
        "8 in a burst, 0.3 ms apart": bursts(rng, 500, 8, 0.3e-3, 0.05),
        "8 in a burst, 1 ms apart": bursts(rng, 500, 8, 1e-3, 0.05),
        "4 in a burst, 1 ms apart": bursts(rng, 800, 4, 1e-3, 0.02),
        "one by one, 50 a second": bursts(rng, 3000, 1, 1e-9, 1 / 50),
        "one by one, 300 a second": bursts(rng, 3000, 1, 1e-9, 1 / 300),
    }
    print("| arrivals | window | p50 | p95 | steps a request | computation a request |\n|---|---:|---:|---:|---:|---:|")
    for name, arrivals in loads.items():
        for window in WINDOWS_MS:
            found = Simulation(arrivals, window / 1e3, options.fixed_ms / 1e3, options.row_ms / 1e3)
            found.run()
            latencies, count = sorted(found.latencies), len(arrivals)
            middle, tail = (1e3 * latencies[int(share * count)] for share in (0.5, 0.95))
            computed = 1e3 * found.busy / count
            print(
                f"| {name} | {window} ms | {middle:.1f} ms | {tail:.1f} ms | {found.steps / count:.2f} "
                f"| {computed:.2f} ms |"
            )


if __name__ == "__main__":
    main()
