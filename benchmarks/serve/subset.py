"""Measures Headrace's server alone for five minutes, next to the committed results of it and the best peer.

python benchmarks/serve/subset.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "core"))

import convert
import loads
import servers
from loads import LOADS
from probes import Prober, describe
from report import HIGHER_IS_BETTER, bar_of, best_of, cell, of_best, title
from runs import listed, rounds_of
from servers import SERVERS

RESULTS: Final = Path(__file__).resolve().parent / "results"
SHAPE: Final = "qwen2.5-0.5b"
SUBSET: Final = ("c1", "c8", "prefix")
PRECISIONS: Final = ("int8", "int4")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure Headrace's server beside the committed reference.")
    parser.add_argument("--precisions", type=listed(PRECISIONS), default=list(PRECISIONS), help="of int8,int4")
    parser.add_argument("--loads", type=listed(SUBSET), default=list(SUBSET), help=f"of {','.join(SUBSET)}")
    parser.add_argument(
        "--reference", type=Path, help="results of run.py to compare with; default: the newest on this instruction set"
    )
    options = parser.parse_args()
    here = describe(Prober(servers.THREADS).machine)
    path = options.reference or _reference(here["isa"])
    reference = json.loads(path.read_text())
    print(f"reference: {path.stem}, {rounds_of(reference)}, {reference['started']}")
    _print_machines(here, reference["machine"])
    for precision in options.precisions:
        _compare(precision, options.loads, reference)
    return 0


def _reference(isa: str) -> Path:
    """Return the newest committed run on this instruction set, or else the newest of all."""
    runs = {path: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    whole = [path for path, results in runs.items() if _is_reference(results)]
    return max(whole, key=lambda path: (runs[path]["machine"]["isa"] == isa, runs[path]["started"]))


def _is_reference(results: dict[str, Any]) -> bool:
    """Whether a run finished and has peers at the compared precisions."""
    if results["finished"] is None:
        return False
    there = {(each["shape"], each["precision"], each["peer"] != "headrace") for each in results["timings"]}
    return all((SHAPE, precision, True) in there for precision in PRECISIONS)


def _print_machines(here: dict[str, Any], then: dict[str, Any]) -> None:
    """Print both machines' peak rates, which put the numbers below into proportion."""
    for name, machine in (("here", here), ("then", then)):
        peaks = ", ".join(f"{kind} {rate / 1e9:,.0f} Gop/s" for kind, rate in machine["peaks"].items())
        print(f"  {name}: {machine['cpu']}, {machine['threads']} threads, {machine['isa']}: {peaks}", flush=True)


def _compare(precision: str, wanted: list[str], reference: dict[str, Any]) -> None:
    server = next(each for each in SERVERS if each.peer == "headrace" and each.precision == precision)
    print(f"\n{SHAPE} {precision}: starting (weights are made and packed on first use)", flush=True)
    model = convert.model(SHAPE, server.form)
    with servers.started(server, model) as (running, first):
        now = {"start": first}
        for load in LOADS:
            if load.name in wanted:
                now |= loads.measure(load, running.url, running.flags, seed=1, quick=False)
        now["memory"] = float(running.memory())
    print(f"  {'':38} {'here':>12} {'then':>12} {'here/then':>10}   best peer then, ours of its; bar", flush=True)
    for metric, value in now.items():
        medians = _medians(reference, precision, metric)
        then, best, ratio = medians.get(server.name), best_of(metric, medians), of_best(metric, medians)
        bar = bar_of(metric, precision)
        line = f"  {title(metric):38} {cell(metric, [value]):>12}"
        if then is not None:
            line += f" {cell(metric, [then]):>12} {value / then:>9.2f}x"
        if best is not None and ratio is not None:
            line += f"   {best} {cell(metric, [medians[best]])}: {ratio:.2f}"
        if bar is not None:
            line += f"; {'at least' if metric in HIGHER_IS_BETTER else 'at most'} {bar:g}"
        print(line, flush=True)


def _medians(reference: dict[str, Any], precision: str, metric: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for each in reference["timings"]:
        if (each["shape"], each["precision"], each["metric"]) == (SHAPE, precision, metric):
            found.setdefault(each["server"], []).append(each["value"])
    return {name: median(values) for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
