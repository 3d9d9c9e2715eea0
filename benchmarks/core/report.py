"""Renders a results file as a Markdown page: bars, medians of every engine, machine, versions, command.

python benchmarks/core/report.py RESULTS.json [OUT.md]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bars import verdicts
from runs import rounds_of
from summary import Row, Summary

COLUMNS: Final = {
    "decode": "decode tok/s",
    "prefill-512": "TTFT 512, s",
    "prefill-2048": "TTFT 2,048, s",
    "batch-8": "8 at once, tok/s",
    "batch-8-ttft": "TTFT, s",
    "batch-32": "32 at once, tok/s",
    "batch-32-ttft": "TTFT, s",
    "start-ready": "start to ready, s",
    "start-first-token": "to first token, s",
    "batch-8-host": "host a step, s",
    "batch-8-host-share": "share",
    "batch-32-host": "host a step, s",
    "batch-32-host-share": "share",
    "cold": "TTFT 1,532, s",
    "cached": "with 1,500 cached, s",
    "chats-gap": "8 chats, p99 gap, s",
    "chats-gap-beside": "beside long prompts, s",
    "late-ttft": "TTFT 4,000 beside, s",
    "memory": "peak memory, MB",
    "memory-batch": "with batches, MB",
}
WORDS: Final = {True: "pass", False: "**fail**", None: "not judged"}


def table(results: dict[str, Any]) -> str:
    summary = Summary(results)
    shapes = list(dict.fromkeys(timing["shape"] for timing in results["timings"]))
    title = {"core": "The core", "engine": "The engine"}[results.get("board", "core")]
    lines = [f"# {title} against CPU peers", "", *_head(results), ""]
    for shape in shapes:
        lines += [f"## {shape}", "", *_bars(results, shape), "", *_medians(summary, shape), ""]
    lines += ["## Probes beside the timings", "", *_probes(summary), ""]
    if results["failures"]:
        lines += ["## What failed", "", *(_failure(failure) for failure in results["failures"]), ""]
    lines += ["## Configurations", ""]
    lines += [f"- {peer}: {text}" for peer, text in results["configuration"].items()]
    return "\n".join(lines)


def _head(results: dict[str, Any]) -> list[str]:
    machine = results["machine"]
    peaks = ", ".join(f"{kind} {rate / 1e9:,.0f}" for kind, rate in machine["peaks"].items())
    lines = [
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads used, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}; Headrace's instruction set: {machine['isa']}",
        f"- Peaks at the start, Gop/s: {peaks}",
        f"- Date: {results['started']} to {results['finished'] or '(not finished)'}; {rounds_of(results)}",
        f"- Command: `{results['command']}`",
        f"- Python {machine['python']}",
    ]
    for peer, versions in results["versions"].items():
        lines.append(f"- {peer}: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    return lines


def _bars(results: dict[str, Any], shape: str) -> list[str]:
    lines = ["| what | precision | bar | found | Headrace | best peer | |", "|---|---|---|---|---|---|---|"]
    found = verdicts(results, shape)
    for verdict in found:
        word = f"{WORDS[verdict.passed]}{f': {verdict.note}' if verdict.note else ''}"
        best = "" if verdict.best is None else f"{verdict.best.engine}: {_cell(verdict.best)}"
        lines.append(
            f"| {verdict.what} | {verdict.precision} | {verdict.bar} | {verdict.found} | {_cell(verdict.ours)} "
            f"| {best} | {word} |"
        )
    passed = sum(verdict.passed is True for verdict in found)
    return [*lines, "", f"{passed} of {len(found)} bars passed."]


def _medians(summary: Summary, shape: str) -> list[str]:
    metrics = [metric for metric in COLUMNS if any(key[0] == shape and key[2] == metric for key in summary.rows)]
    by_engine: dict[tuple[str, str], dict[str, Row]] = {}
    for (each, precision, metric), rows in summary.rows.items():
        if each == shape:
            for row in rows:
                by_engine.setdefault((precision, row.engine), {})[metric] = row
    lines = [
        "Medians [least to most] over the rounds:",
        "",
        f"| compared at | engine | {' | '.join(COLUMNS[metric] for metric in metrics)} |",
        f"|---|---|{'---|' * len(metrics)}",
    ]
    order = list(dict.fromkeys(precision for precision, _ in by_engine))
    for (precision, engine), rows in sorted(by_engine.items(), key=lambda entry: order.index(entry[0][0])):
        cells = " | ".join(_cell(rows.get(metric)) for metric in metrics)
        lines.append(f"| {precision} | {engine} | {cells} |")
    for precision in order:
        floors = [(metric, summary.floor((shape, precision, metric))) for metric in metrics]
        if all(value is None for _, value in floors):
            continue
        cells = " | ".join("" if value is None else _number(value) for _, value in floors)
        lines.append(f"| {precision} | *floor* | {cells} |")
    return lines


def _probes(summary: Summary) -> list[str]:
    lines = ["| | least | median | most |", "|---|---|---|---|"]
    for kind, values in summary.probe_spread().items():
        unit = 1.0 if kind == "load" else 1e9
        name = {"load": "load average", "bandwidth": "bandwidth, GB/s"}.get(kind, f"{kind}, Gop/s")
        lines.append(f"| {name} | {' | '.join(_number(value / unit) for value in values)} |")
    return lines


def _failure(failure: dict[str, Any]) -> str:
    where = ", ".join(str(failure[name]) for name in ("shape", "round") if name in failure)
    return f"- {failure.get('engine', failure['peer'])}{f' ({where})' if where else ''}: {failure['reason']}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    unit = 1e6 if row.metric.startswith("memory") else 1.0
    least, most = (value / unit for value in row.spread)
    spread = f" [{_number(least)} to {_number(most)}]" if len(row.values) > 1 else ""
    return f"{_number(row.median / unit)}{spread}"


def _number(value: float) -> str:
    """Format with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: report.py RESULTS.json [OUT.md]", file=sys.stderr)
        return 2
    page = table(json.loads(Path(sys.argv[1]).read_text())) + "\n"
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
