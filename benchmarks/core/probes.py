"""Probes the machine next to every timing, and computes the floors of each round.

A short probe surrounds every timing, because shared machines change speed by a factor within minutes. A longer one per
round gives `headrace inspect`'s floors.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any, Final

import headrace._core as _core
from headrace.bench.machine import PEAKS, Machine, bandwidth, probe_machine
from headrace.bench.roofline import best_peak, floor, operations
from headrace.engine.executors.cpu_executor import usable_cores
from headrace.models.precision import parse_plan
from headrace.models.spec import ModelSpec
from headrace.models.step_work import decode_bytes

SECONDS: Final = 0.2  # of one probe, all that it measures together
QUIET: Final = 0.3  # seconds before a probe in which the engine's threads go to sleep
MEBIBYTES: Final = 512  # beyond every cache, as the weights are
PREFILLS: Final = (512, 2048)  # tokens

Probe = dict[str, float]


class Prober:
    def __init__(self, threads: int) -> None:
        self._pool = _core.Pool(threads)
        self.machine = probe_machine(self._pool)
        self._kinds = [kind for kind in PEAKS if self.machine.peaks[kind]]
        self._seconds = SECONDS / (len(self._kinds) + 1)

    def probe(self) -> Probe:
        """Measure operations and bytes per second in one short run each, and the load by other programs."""
        time.sleep(QUIET)
        found = {kind: _core.measure_peak(self._pool, kind, self._seconds) for kind in self._kinds}
        found["bandwidth"] = _core.measure_bandwidth(self._pool, MEBIBYTES, self._seconds)
        found["load"] = os.getloadavg()[0]
        return found

    def floors(self, spec: ModelSpec, precisions: list[str]) -> list[dict[str, Any]]:
        """Return the current floors per precision, as in `headrace inspect`."""
        self.machine = probe_machine(self._pool)
        found: list[dict[str, Any]] = []
        for precision in precisions:
            plan = parse_plan(precision)
            read = decode_bytes(spec, plan)
            rate = bandwidth(self._pool, read)
            least = floor(spec, plan, self.machine, rate)
            entry: dict[str, Any] = {
                "precision": precision,
                "weights": least.precision,
                "decode_bytes": read,
                "bandwidth": rate,
                "peak": least.peak,
                "decode": 1e3 / least.decode_ms,  # tokens/s
            }
            for tokens in PREFILLS:
                entry[f"operations-{tokens}"] = operations(spec, tokens)
                entry[f"prefill-{tokens}"] = max(read / rate, operations(spec, tokens) / least.peak)  # seconds
            found.append(entry)
        return found


def share_of_moment(metric: str, value: float, floor_entry: dict[str, Any], probes: list[Probe]) -> float | None:
    """Return a timing's share of what its probes found; None if the metric has no floor."""
    if metric == "decode":
        return value * floor_entry["decode_bytes"] / _mean([probe["bandwidth"] for probe in probes])
    if metric.startswith("prefill-"):
        format_name = parse_plan(floor_entry["precision"]).default.format
        peaks = [best_peak(_as_machine(probe), format_name) for probe in probes]
        return floor_entry[f"operations-{metric.removeprefix('prefill-')}"] / value / _mean(peaks)
    return None


def describe(machine: Machine) -> dict[str, Any]:
    return {
        "cpu": machine.cpu,
        "cores": usable_cores(),
        "threads": machine.threads,
        "isa": machine.isa,
        "memory": machine.memory,
        "peaks": {kind: rate for kind, rate in machine.peaks.items() if rate},
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _as_machine(probe: Probe) -> Machine:
    return Machine(cpu="", threads=0, isa="", memory=0, peaks={kind: probe.get(kind, 0.0) for kind in PEAKS})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
