"""Draws what tuning gained, level by level, from the committed results of `headrace tune --from naive`.

    python benchmarks/tuning/chart.py [RESULTS.json ...] [--out OUT.svg]

A panel for each model: how many times the first setting's speed after each level that was kept. The last bar is the
last setting against the first, measured in turns; the bars before it multiply the gains of their levels. Measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.chart import ROOT, STYLE, shown

RESULTS: Final = Path(__file__).resolve().parent
CHART: Final = ROOT / "docs" / "assets" / "ladder.svg"
WIDTH, LEFT, BAR, GAP = 800, 190, 16, 5


def steps(report: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the settings from the first to the last, and their speed as a multiple of the first one's."""
    found = [("naive", 1.0)]
    for result in report["results"]:
        if result["outcome"] == "kept" and result["level"] != "context":
            found.append((f"+ {result['level']}: {result['choice']}", found[-1][1] * result["gain"]))
    if report["overall"]:
        found[-1] = (found[-1][0], report["overall"]["gain"])
    return found


def chart(reports: dict[str, dict[str, Any]]) -> str:
    body: list[str] = []
    y = 0
    longest = max(multiple for report in reports.values() for _, multiple in steps(report))
    for name, report in reports.items():
        before, after = (report["overall"][side] for side in ("before", "after"))
        title = (
            f"{name}: {shown(before['tokens_per_s'])} to {shown(after['tokens_per_s'])} tokens/s, time to first token "
            f"{shown(1e3 * before['ttft_p50'])} to {shown(1e3 * after['ttft_p50'])} ms"
        )
        body.append(f'<text class="title" x="12" y="{y + 22}">{title}</text>')
        y += 34
        for row, (label, multiple) in enumerate(steps(report)):
            width = multiple / longest * (WIDTH - LEFT - 70)
            kind = "ours" if row else "other"
            body += [
                f'<text class="name" x="{LEFT - 8}" y="{y + 12}">{label}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 12}">{multiple:.1f} times</text>',
            ]
            y += BAR + GAP
    first = next(iter(reports.values()))
    where = f"{first['cpu']}, {first['isa'].upper()}, two cores"
    note = f"Output tokens/s against one thread, one request at a time, f32. {where}."
    height = y + 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="What each level of tuning gained">\n{STYLE}\n'
        f'<rect class="card" width="{WIDTH}" height="{height}"/>\n' + "\n".join(body) + f"\n"
        f'<text class="note" x="12" y="{height - 12}">{note}</text>\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", default=sorted(RESULTS.glob("*.json")))
    parser.add_argument("--out", type=Path, default=CHART)
    options = parser.parse_args()
    read = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    reports = {report["model"]: report for report in read}
    options.out.write_text(chart(reports), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
