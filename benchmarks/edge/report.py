"""Renders a results file as a Markdown page: bars, medians of every server, machine, versions, command.

python benchmarks/edge/report.py RESULTS.json [OUT.md]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent))

from runs import rounds_of

COLUMNS: Final = {
    "whole": ("p50_ms", "p99_ms", "cpu_us_per_request", "client_lag_p99_ms", "failed", "unfinished"),
    "streamed": ("p50_ms", "p99_ms", "cpu_us_per_request", "client_lag_p99_ms", "failed", "unfinished"),
    "chunks": ("cpu_us_per_chunk", "chunks", "bytes_per_chunk"),
    "streams": (
        *("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "cpu_share", "cpu_us_per_chunk", "chunks_per_s"),
        *("delivered", "client_late_p99_ms"),
    ),
    "memory": ("first_mib", "last_mib", "grown_mib", "requests", "cpu_us_per_request"),
}
TITLES: Final = {
    "whole": "Short chats at 200 a second, whole",
    "streamed": "Short chats at 200 a second, streamed",
    "chunks": "CPU of a streamed chunk, 32 streams",
    "streams": "1,000 streams at 20 tokens/s",
    "memory": "Memory",
}
FLAT: Final = 0.05  # that memory may grow by between the two counts: what an allocator does


def table(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        "# What the gateway costs",
        "",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']}; the server on one core, the client on the other",
        f"- Date: {results['started']} to {results['finished'] or '(not finished)'}; {rounds_of(results)}",
        f"- Command: `{results['command']}`",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in results['versions'].items())}",
        "",
        "| what | bar | found | |",
        "|---|---|---|---|",
        *(f"| {what} | {bar} | {_cell(found)} | {_word(passed)} |" for what, bar, found, passed in bars(results)),
        "",
    ]
    for kind, columns in COLUMNS.items():
        turns = [turn for turn in results["turns"] if turn["kind"] == kind]
        if not turns:
            continue
        lines += [f"## {TITLES[kind]}", "", f"| server | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for server in dict.fromkeys(turn["server"] for turn in turns):
            values = [median(turn[column] for turn in turns if turn["server"] == server) for column in columns]
            lines.append(f"| {server} | {' | '.join(map(_cell, values))} |")
        lines.append("")
    if results["failures"]:
        lines += ["## What failed", ""]
        lines += [f"- {failure['server']}: {failure['reason']}" for failure in results["failures"]]
    return "\n".join(lines)


def bars(results: dict[str, Any]) -> list[tuple[str, str, float | None, bool | None]]:
    """Return each bar with the measured value and whether it passes; None if not measured."""
    found: list[tuple[str, str, float | None, bool | None]] = []

    def judge(what: str, bar: str, values: list[float], most: float) -> None:
        value = median(values) if values else None
        found.append((what, bar, value, None if value is None else not math.isnan(value) and value <= most))

    for kind in ("whole", "streamed"):
        for metric, most in (("p50_ms", 1.0), ("p99_ms", 3.0)):
            name = metric.partition("_")[0]
            judge(f"time added to a {kind} chat, {name}", f"≤ {most:g} ms", added(results, kind, metric), most)
            if any(turn["server"] == "litellm" for turn in results["turns"]):
                values = added(results, kind, metric, "litellm")
                found.append((f"the same by LiteLLM, {name}", "", median(values) if values else None, None))
    judge("CPU of a streamed chunk", "≤ 30 µs", _values(results, "chunks", "cpu_us_per_chunk"), 30.0)
    nominal = 1e3 / results["sizes"]["tokens_per_s"]
    count = results["sizes"]["streams"]
    judge(
        f"ITL p99 of {count:,} streams",
        f"≤ {2 * nominal:g} ms",
        _values(results, "streams", "itl_p99_ms"),
        2 * nominal,
    )
    judge(
        "undelivered share of these streams' tokens",
        "≤ 2%",
        [1 - each for each in _values(results, "streams", "delivered")],
        0.02,
    )
    first = _values(results, "memory", "first_mib")
    grown = _values(results, "memory", "grown_mib")
    share = [after / before for after, before in zip(grown, first, strict=True)]
    requests = results["sizes"]["memory_last"]
    judge(f"memory grown by {requests:,} requests", f"≤ {FLAT:.0%} of it", share, FLAT)
    return found


def added(results: dict[str, Any], kind: str, metric: str, server: str = "headrace") -> list[float]:
    """Return the difference to the echo server in the same round."""
    floors = {turn["round"]: turn[metric] for turn in results["turns"] if _is(turn, kind, "echo")}
    return [
        turn[metric] - floors[turn["round"]]
        for turn in results["turns"]
        if _is(turn, kind, server) and turn["round"] in floors
    ]


def _values(results: dict[str, Any], kind: str, metric: str) -> list[float]:
    return [turn[metric] for turn in results["turns"] if _is(turn, kind, "headrace")]


def _is(turn: dict[str, Any], kind: str, server: str) -> bool:
    return turn["kind"] == kind and turn["server"] == server


def _word(passed: bool | None) -> str:
    return {True: "pass", False: "**fail**", None: ""}[passed]


def _cell(value: float | None) -> str:
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "none"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.3g}"


def main() -> None:
    page = table(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(page + "\n")
    else:
        print(page)


if __name__ == "__main__":
    main()
