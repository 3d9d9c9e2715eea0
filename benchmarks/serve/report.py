"""Renders results files as a Markdown page: bars, medians with spread, machine, versions, command.

    python benchmarks/serve/report.py RESULTS.json [MORE.json ...] [OUT.md]

Rounds of several files are combined; every round must have a turn of each compared server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))

from runs import rounds_of

UNITS: Final = {"memory": (2**20, "MiB"), "start": (1.0, "s"), "goodput": (1.0, "req/s")}
HIGHER_IS_BETTER: Final = frozenset({"c1-tokens", "c8-tokens", "c32-tokens", "goodput"})
TITLES: Final = {
    "c1": "one at a time",
    "c8": "8 at once",
    "c32": "32 at once",
    "turns-ttft": "TTFT of a conversation's later turns, p50",
    "prefix-ttft": "TTFT with a shared prefix, p50",
    "goodput": "goodput",
    "memory": "memory at the end (PSS)",
    "start": "start to first token",
}
WHAT: Final = {
    "ttft": "TTFT p50",
    "ttft-p99": "TTFT p99",
    "itl": "ITL p50",
    "itl-p99": "ITL p99",
    "tokens": "output tokens/s",
}
ITL_ALONE: Final = {"int4": 0.75, "int8": 0.9}


def bar_of(metric: str, precision: str) -> float | None:
    """Return the bar relative to the best peer (maximum for times and memory, minimum for rates), or None."""
    load, _, what = metric.partition("-")
    if metric in ("turns-ttft", "prefix-ttft"):
        return 0.4
    if what in ("ttft", "ttft-p99"):
        return 0.6
    if what == "itl":
        return ITL_ALONE.get(precision) if load == "c1" else 0.5
    return {"c8-tokens": 2.0, "c32-tokens": 2.5, "goodput": 2.5, "memory": 1.0, "start": 1.0}.get(metric)


def table(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        "# Servers side by side",
        "",
        f"- Machine: {machine.get('cpu', machine)}",
        f"- Date: {results['started']} to {results['finished'] or '(not finished)'}; {rounds_of(results)}",
        f"- Command: `{results['command']}`",
        "- Versions: " + "; ".join(f"{peer}: {_listed(found)}" for peer, found in results["versions"].items()),
        "",
    ]
    shapes = dict.fromkeys(timing["shape"] for timing in results["timings"])
    for shape in shapes:
        mine = [timing for timing in results["timings"] if timing["shape"] == shape]
        lines += [f"## {shape}", ""]
        for precision in dict.fromkeys(timing["precision"] for timing in mine):
            lines += _section(precision, [timing for timing in mine if timing["precision"] == precision])
    lines += ["## What was asked", "", "| load | `headrace bench` |", "|---|---|"]
    lines += [f"| {name} | `{flags}` |" for name, flags in results["loads"].items()]
    lines += ["", "| server | configuration |", "|---|---|"]
    lines += [f"| {peer} | {text} |" for peer, text in results["configuration"].items()]
    if results["failures"]:
        lines += ["", "## Failures", ""]
        lines += [f"- {each.get('server', each.get('peer'))}: {each['reason']}" for each in results["failures"]]
    return "\n".join(lines) + "\n"


def _section(precision: str, timings: list[dict[str, Any]]) -> list[str]:
    servers = list(dict.fromkeys(timing["server"] for timing in timings))
    servers.sort(key=lambda name: not name.startswith("headrace"))
    lines = [
        f"### {precision}",
        "",
        f"| | {' | '.join(servers)} | of the best peer | bar | |",
        "|---" * (len(servers) + 4) + "|",
    ]
    for metric in dict.fromkeys(timing["metric"] for timing in timings):
        cells: list[str] = []
        medians: dict[str, float] = {}
        for server in servers:
            values = [each["value"] for each in timings if each["server"] == server and each["metric"] == metric]
            if values:
                medians[server] = median(values)
            cells.append(cell(metric, values))
        lines.append(
            f"| {title(metric)} | {' | '.join(cells)} | {_verdict(metric, precision, of_best(metric, medians))} |"
        )
    return [*lines, ""]


def best_of(metric: str, medians: dict[str, float]) -> str | None:
    """Return the best peer for a metric."""
    peers = {server: value for server, value in medians.items() if not server.startswith("headrace")}
    return (max if metric in HIGHER_IS_BETTER else min)(peers, key=lambda name: peers[name]) if peers else None


def of_best(metric: str, medians: dict[str, float]) -> float | None:
    """Return our number relative to the best peer's; None if one is missing."""
    ours = next((value for server, value in medians.items() if server.startswith("headrace")), None)
    best = best_of(metric, medians)
    return None if ours is None or best is None or not medians[best] else ours / medians[best]


def _verdict(metric: str, precision: str, ratio: float | None) -> str:
    bar = bar_of(metric, precision)
    sign = "≥" if metric in HIGHER_IS_BETTER else "≤"
    shown = "" if bar is None else f"{sign} {bar:g}"
    if ratio is None:
        return f"- | {shown} | "
    word = ""
    if bar is not None:
        word = "pass" if (ratio >= bar if sign == "≥" else ratio <= bar) else "**fail**"
    return f"{ratio:.2f} | {shown} | {word}"


def title(metric: str) -> str:
    if metric in TITLES:
        return TITLES[metric]
    load, _, what = metric.partition("-")
    return f"{TITLES.get(load, load)}: {WHAT.get(what, what)}"


def cell(metric: str, values: list[float]) -> str:
    if not values:
        return "-"
    scale, unit = UNITS.get(metric, (1.0, "/s" if metric.endswith("tokens") else "ms"))
    middle, least, most = (value / scale for value in (median(values), min(values), max(values)))
    spread = f" ({least:.4g} to {most:.4g})" if len(values) > 1 else ""
    return f"{middle:.4g} {unit}{spread}"


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge several runs; the first describes them."""
    found = dict(runs[0])
    found["timings"] = [timing for run in runs for timing in run["timings"]]
    found["failures"] = [failure for run in runs for failure in run["failures"]]
    found["repeat"] = sum(run["repeat"] for run in runs)
    found["finished"] = runs[-1]["finished"]
    found["command"] = "`; `".join(run["command"] for run in runs)
    return found


def main() -> None:
    files = [Path(word) for word in sys.argv[1:]]
    page = table(together([json.loads(path.read_text()) for path in files if path.suffix == ".json"]))
    if files[-1].suffix == ".md":
        files[-1].write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
