"""Draws the chart in README.md from the committed results of the server benchmark.

    python benchmarks/chart.py [RESULTS.json [OUT.svg]]

Shows the median of each server's rounds at int8, one panel for each metric. Measures nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "serve" / "results" / "2026-11-23-milan-3.json"
CHART: Final = ROOT / "docs" / "assets" / "servers.svg"
PRECISION: Final = "int8"
# Metric, title, unit, factor from the stored unit. The last one is a comparison that Headrace loses.
PANELS: Final = (
    ("c32-tokens", "Output tokens/s, 32 clients (higher is better)", "", 1.0),
    ("c8-ttft", "Time to first token, 8 clients, p50 (lower is better)", " s", 0.001),
    ("prefix-ttft", "Time to first token, shared prefix, p50 (lower is better)", " s", 0.001),
    ("c32-ttft-p99", "Time to first token, 32 clients, p99 (lower is better)", " s", 0.001),
)
NAMES: Final = {"headrace": "Headrace", "llama.cpp": "llama.cpp", "openvino": "OpenVINO", "vllm": "vLLM"}
STYLE: Final = """<style>
svg { --card: #ffffff; --ink: #1d1d1b; --muted: #63625c; --ours: #1f6fbf; --other: #b9b8b0; background: var(--card);
  font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --card: #1e1e1c; --ink: #ecebe6; --muted: #a4a39b; --ours: #57a5f5;
  --other: #5c5b55; } }
.card { fill: var(--card); } text { fill: var(--ink); } .name, .note { fill: var(--muted); }
.title { font-weight: 600; font-size: 12px; }
.ours { fill: var(--ours); } .other { fill: var(--other); } .name { text-anchor: end; }
</style>"""
WIDTH, LEFT, BAR, GAP = 400, 86, 18, 6


def chart(results: dict[str, Any]) -> str:
    """An SVG with two panels in a row."""
    peers = [peer for peer in NAMES if any(timing["peer"] == peer for timing in results["timings"])]
    panel_height = 34 + len(peers) * (BAR + GAP) + 14
    rows = (len(PANELS) + 1) // 2
    height = rows * panel_height + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" role="img"'
        ' aria-label="Headrace beside llama.cpp, OpenVINO and vLLM">',
        STYLE,
        f'<rect class="card" width="{2 * WIDTH}" height="{height}"/>',
    ]
    for number, (metric, title, unit, factor) in enumerate(PANELS):
        x, y = number % 2 * WIDTH, number // 2 * panel_height
        parts.append(f'<text class="title" x="{x + 12}" y="{y + 22}">{title}</text>')
        values = {peer: factor * median(values_of(results, metric, peer)) for peer in peers}
        scale = (WIDTH - LEFT - 70) / max(values.values())
        for row, (peer, value) in enumerate(values.items()):
            top = y + 34 + row * (BAR + GAP)
            kind = "ours" if peer == "headrace" else "other"
            width = value * scale
            parts += [
                f'<text class="name" x="{x + LEFT - 8}" y="{top + 13}">{NAMES[peer]}</text>',
                f'<rect class="{kind}" x="{x + LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>',
                f'<text x="{x + LEFT + width + 6:.1f}" y="{top + 13}">{shown(value)}{unit}</text>',
            ]
    machine = results["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['isa'].upper()}"
    note = f"Shape of Qwen2.5 0.5B at {PRECISION}, {where}."
    parts += [f'<text class="note" x="12" y="{height - 12}">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def values_of(results: dict[str, Any], metric: str, peer: str) -> list[float]:
    return [
        timing["value"]
        for timing in results["timings"]
        if (timing["peer"], timing["precision"], timing["metric"]) == (peer, PRECISION, metric)
    ]


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else CHART
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(chart(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
