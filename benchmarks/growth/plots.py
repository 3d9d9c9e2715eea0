"""Draws the results of run.py: one SVG per kind, next to the results file.

python benchmarks/growth/plots.py benchmarks/growth/results/NAME.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from headrace.bench.report.plot import Axis, AxisUnit, Plot

STYLE: Final = """<style>
svg { --card: #ffffff; --ink: #1d1d1b; --muted: #63625c; --line: #dddcd5; --base: #8b8a83; background: var(--card);
  font: 12px system-ui, sans-serif; --c0: #1f6fbf; --c1: #c4560f; }
@media (prefers-color-scheme: dark) { svg { --card: #1e1e1c; --ink: #ecebe6; --muted: #a4a39b; --line: #33332f;
  --base: #6d6c66; --c0: #57a5f5; --c1: #e8793a; } }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } text { fill: var(--ink); } .tick, .name { fill: var(--muted); }
.label { fill: var(--c); } .grid, .stub { stroke: var(--line); } .base { stroke: var(--base); }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .dots { stroke: var(--c); stroke-linecap: round; fill: none; }
</style>"""

Timing = dict[str, Any]


def main() -> None:
    path = Path(sys.argv[1])
    timings: list[Timing] = json.loads(path.read_text())["timings"]
    for name, svg in drawings(timings).items():
        target = path.with_name(f"{path.stem}-{name}.svg")
        target.write_text(svg)
        print(target)


def drawings(timings: list[Timing]) -> dict[str, str]:
    found: dict[str, str] = {}
    if lengths := [each for each in timings if each["kind"] == "prompt"]:
        found["prompt"] = _lines(lengths, "ttft_s", "prompt tokens", "seconds to the first token", "s")
    if streams := [each for each in timings if each["kind"] == "streams"]:
        found["streams"] = _lines(streams, "tokens_per_s", "streams at once", "output tokens/s, of all", "number")
        found["token"] = _lines(streams, "token_s", "streams at once", "seconds a token, of each", "s")
    return found


def _lines(timings: list[Timing], value: str, x_title: str, y_title: str, unit: AxisUnit) -> str:
    """Draw with logarithmic axes, where proportional growth is a straight line."""
    xs, ys = [float(each["at"]) for each in timings], [float(each[value]) for each in timings]
    across = Axis(kind="log", low=min(xs), high=max(xs), title=x_title, unit="count", at=tuple(sorted(set(xs))))
    down = Axis(kind="log", low=min(ys) / 1.2, high=max(ys) * 1.2, title=y_title, unit=unit)
    plot = Plot(x=across, y=down, about=y_title)
    weights = list(dict.fromkeys(each["weights"] for each in timings))
    plot.room_for(weights)
    for series, name in enumerate(weights):
        mine = sorted((each["at"], each[value]) for each in timings if each["weights"] == name)
        plot.line([x for x, _ in mine], [y for _, y in mine], series=series, name=name, label=name)
        plot.dots([x for x, _ in mine], [y for _, y in mine], series=series, radius=3.0)
    drawn = str(plot.render())
    head, rest = drawn.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{STYLE}{rest}\n'


if __name__ == "__main__":
    main()
