"""The loads that `headrace bench` puts on each server, and the metrics taken from its results.

docs/how-to/benchmark-a-server.md defines the metrics.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import places

from headrace.bench.results.benchmark_result import BenchmarkResult, RequestStats, read

OBJECTIVE_TPOT: Final = 200.0  # milliseconds
OBJECTIVES: Final = ("ttft:1500", f"tpot:{OBJECTIVE_TPOT:g}")  # of a chat, on two cores without AMX
PROMPT: Final = 256  # tokens, the chat template included
ANSWER: Final = 64
SHARED: Final = 1200  # tokens that prompts have in common
MOST_SECONDS: Final = 900.0  # of one load


class LoadError(Exception):
    """The load could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    flags: tuple[str, ...]
    metrics: Callable[[BenchmarkResult], dict[str, float]]
    quick: tuple[str, ...] = ()  # in place of the flags' counts, to see that everything works

    def chosen_flags(self, *, quick: bool) -> tuple[str, ...]:
        return self.quick if quick and self.quick else self.flags


def _at_once(users: int) -> Callable[[BenchmarkResult], dict[str, float]]:
    def metrics(result: BenchmarkResult) -> dict[str, float]:
        found = _latencies(result.figures, f"c{users}")
        found[f"c{users}-tokens"] = result.figures.output_throughput
        return found

    return metrics


def _latencies(figures: RequestStats, name: str) -> dict[str, float]:
    if figures.ttft is None or figures.itl is None or figures.completed < figures.requests:
        raise LoadError(f"{figures.failed} of {figures.requests} requests failed: {figures.errors}")
    return {
        f"{name}-ttft": figures.ttft.p50,
        f"{name}-ttft-p99": figures.ttft.p99,
        f"{name}-itl": figures.itl.p50,
        f"{name}-itl-p99": figures.itl.p99,
    }


def _later_turns(result: BenchmarkResult) -> dict[str, float]:
    found = [row.ttft * 1e3 for row in result.rows if row.turn > 0 and row.ok and row.ttft is not None]
    if not found:
        raise LoadError("no later turn was answered")
    return {"turns-ttft": median(found)}


def _shared(result: BenchmarkResult) -> dict[str, float]:
    return {"prefix-ttft": _latencies(result.figures, "x")["x-ttft"]}


def _goodput(result: BenchmarkResult) -> dict[str, float]:
    return {"goodput": max((stage.figures.goodput or 0.0 for stage in result.stages), default=0.0)}


def _closed(users: int, requests: int, prompt: int = PROMPT) -> tuple[str, ...]:
    """Start no request after 45 seconds; running ones get two minutes to finish."""
    return (
        *("--concurrency", str(users), "--requests", str(requests), "--seconds", "45", "--drain", "120"),
        *("--warmup", "2"),
        *("--input-tokens", str(prompt), "--output-tokens", str(ANSWER)),
    )


LOADS: Final = (
    Load("c1", _closed(1, 5), _at_once(1), _closed(1, 2)),
    Load("c8", _closed(8, 16), _at_once(8), _closed(8, 8)),
    Load("c32", _closed(32, 48, PROMPT // 2), _at_once(32), _closed(32, 32, PROMPT // 2)),
    Load(
        "turns",
        (
            *("--concurrency", "2", "--requests", "9", "--turns", "3", "--think", "0.2", "--warmup", "2"),
            *("--input-tokens", "200", "--output-tokens", "32"),
        ),
        _later_turns,
        ("--concurrency", "2", "--requests", "4", "--turns", "2", "--input-tokens", "64", "--output-tokens", "8"),
    ),
    Load(
        "prefix",
        (
            *("--concurrency", "2", "--requests", "8", "--prefixes", "1", "--prefix-tokens", str(SHARED)),
            *("--prefix-kind", "system", "--input-tokens", "64", "--output-tokens", "16", "--warmup", "2"),
        ),
        _shared,
        (
            *("--concurrency", "2", "--requests", "4", "--prefixes", "1", "--prefix-tokens", "200"),
            *("--prefix-kind", "system", "--input-tokens", "32", "--output-tokens", "8"),
        ),
    ),
    Load(
        "goodput",
        (
            *("--sweep", "0.5..", "--requests", "10", "--sweep-refine", "1", "--sweep-stages", "3", "--drain", "20"),
            *("--workload", "chat", "--scale", "0.5", "--warmup", "2", "--goodput", *OBJECTIVES),
        ),
        _goodput,
        (
            *("--rate", "0.5", "--requests", "4", "--drain", "30"),
            *("--workload", "chat", "--scale", "0.25", "--goodput", *OBJECTIVES),
        ),
    ),
)


def measure(load: Load, url: str, asked: Sequence[str], *, seed: int, quick: bool) -> dict[str, float]:
    """Measure one load. `asked`: additional flags for the server. Raises LoadError on failure or timeout."""
    with tempfile.TemporaryDirectory(prefix="headrace-serve-") as folder:
        out = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "headrace", "bench", url, "--json", str(out), "--seed", str(seed)),
            *("--token-mismatch", "off", "--no-live", *load.chosen_flags(quick=quick), *asked),
        ]
        places.LOGS.mkdir(parents=True, exist_ok=True)
        with (places.LOGS / "serve-bench.log").open("ab") as log:
            try:
                done = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=MOST_SECONDS)
            except subprocess.TimeoutExpired:
                raise LoadError(f"not done after {MOST_SECONDS:.0f} s") from None
        if not out.exists():
            raise LoadError(f"headrace bench ended with {done.returncode}")
        return load.metrics(read(out))
