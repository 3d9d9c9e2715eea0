"""Measures the degradation ladder: answers under overload (simulated) and answers quoted from sources (measured).

    python benchmarks/ladder.py                      both, and writes benchmarks/ladder/results.md
    python benchmarks/ladder.py serve [--loads 1,2,4] [--seconds 180] [--seeds 3]
    python benchmarks/ladder.py extract
    python benchmarks/ladder.py fit [--learn 5000]   fits the weights of extractive_answer.py again, and prints them

Runs in the environment that `make test` creates, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from msgspec.structs import replace

# Neither training nor this folder's parts are packages that are installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "ladder"))

import extraction
import serving

from headrace.bench.simulation.scenarios import ScenarioSetup, capacity
from headrace.bench.simulation.simulator import Hardware
from headrace.bench.simulation.synthetic_traffic import TrafficMix, generate
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.step_plan import SchedulerLimits
from headrace.gateway.degradation.ladder.extractive_answer import ExtractOptions

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "ladder" / "results.md"
LIMITS: Final = SchedulerLimits(max_sequences=32, max_rows=512, context=32_768)
KINDS: Final = ("full", "trimmed", "cut", "half", "stale", "extracted", "refused")


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one strategy at one load; means over the seeds."""

    load: float
    strategy: serving.Strategy
    useful: float
    whole: float
    quality: float
    goodput: float
    p50: float
    p99: float
    shares: dict[str, float]


def serve(options: argparse.Namespace, worth: serving.Worth) -> tuple[float, list[Row]]:
    policy, hardware = Policy(), Hardware()
    mix = TrafficMix(tenants=20, seconds=options.seconds, prefixes=2, deadlines=True)
    most = capacity(ScenarioSetup(mix=mix, hardware=hardware, limits=LIMITS, policy=policy, orders=["fair"]))
    found: list[Row] = []
    for load in options.loads:
        for strategy in serving.STRATEGIES:
            rows: list[Row] = []
            for seed in range(options.seeds):
                print(f"load {load:g}, {strategy}, seed {seed}", file=sys.stderr, flush=True)
                calls = list(generate(replace(mix, rate=load * most, seed=seed)))
                served, _ = serving.run(
                    calls, strategy, hardware=hardware, limits=LIMITS, traits=serving.Traits(), seed=seed
                )
                # Those that somebody waits for.
                waited_for = [each for each in served if not policy.surfaces[each.call.surface].background]
                rows.append(_row(load, strategy, waited_for, worth, policy, options.seconds))
            found.append(_mean(rows))
    return most, found


def _row(
    load: float,
    strategy: serving.Strategy,
    served: Sequence[serving.Served],
    worth: serving.Worth,
    policy: Policy,
    seconds: float,
) -> Row:
    values = [each.worth(worth) for each in served]
    whole = [value for value in values if value > 0.0]
    ttft = sorted(each.ttft for each in served if each.tokens)
    kinds = Counter(kind for each in served for kind in each.kinds)
    return Row(
        load,
        strategy,
        fmean(values),
        len(whole) / len(served),
        fmean(whole) if whole else 0.0,
        sum(each.good(policy) for each in served) / seconds,
        extraction.percentile(ttft, 0.5),
        extraction.percentile(ttft, 0.99),
        {kind: kinds[kind] / len(served) for kind in KINDS},
    )


def _mean(rows: Sequence[Row]) -> Row:
    means = {
        name: fmean(getattr(row, name) for row in rows)
        for name in ("useful", "whole", "quality", "goodput", "p50", "p99")
    }
    shares = {kind: fmean(row.shares[kind] for row in rows) for kind in KINDS}
    return Row(rows[0].load, rows[0].strategy, shares=shares, **means)


def serving_page(most: float, rows: Sequence[Row], options: argparse.Namespace, worth: serving.Worth) -> str:
    traits = serving.Traits()
    sourced = ", ".join(f"{share:.0%} of {name}" for name, share in traits.sourced.items())
    about = (
        f"The engine's own scheduler and step-time model on simulated hardware that serves {most:.2f} requests a "
        f"second, with 20 tenants and the traffic of `headrace simulate`; {options.seconds:g} s of arrivals, means "
        f"over {options.seeds} seeds. Every request that somebody waits for has a deadline of 3 s + 0.15 s for each "
        "token of its answer; a client that is refused does not come again. The gateway's pressure, ladder and steps "
        "are the code that ships; no model runs and no text is made.",
        "**useful** is the mean worth of all requests: 0 for one that is refused or not whole by its deadline, else "
        "the product of what was done to it. A full answer is worth 1, an extracted one "
        f"{worth.extracted:.2f} (measured, "
        f"below), a trimmed one {worth.trimmed:g}, one that was cut {worth.cut:g}, one of the half variant "
        f"{worth.half:g}, a stale one {worth.stale:g}: these four are declared and not measured.",
        "**in time**: share of the requests with a whole answer by its deadline, whatever its worth; **quality**: mean "
        "worth of those. **goodput**: requests a second that meet every objective of their surface, degraded ones "
        "included. TTFT is that of generated answers, in seconds; stale and extracted ones take milliseconds.",
        f"Declared too: sources come with {sourced}; a cache has an expired answer for {traits.repeated:.0%}; "
        f"{traits.declines:.0%} decline every step. `half` is a variant of half the cost on the same machine.",
    )
    heads = ("load", "strategy", "useful", "in time", "quality", "goodput /s", "TTFT p50", "p99", *KINDS)
    cells = [
        (
            f"{row.load:g}x",
            row.strategy,
            f"{row.useful:.3f}",
            f"{row.whole:.0%}",
            f"{row.quality:.2f}",
            f"{row.goodput:.2f}",
            f"{row.p50:.2f}",
            f"{row.p99:.1f}",
            *(f"{row.shares[kind]:.0%}" if row.shares[kind] else "" for kind in KINDS),
        )
        for row in rows
    ]
    strategies = [f"- `{name}`: {what}" for name, what in serving.STRATEGIES.items()]
    return _page("Under overload (simulated)", *about, table(heads, cells), "\n".join(strategies))


def extract() -> tuple[extraction.Counted, str]:
    options = ExtractOptions()
    held = extraction.held_out()
    counted = extraction.count(held, options)
    seconds = extraction.speed(options)
    shipped = json.loads((ROOT / "training" / "evaluation.json").read_text())["precisions"][0]["tasks"]["reading"]
    about = (
        f"The reading task's {len(held)} held-out questions (`training/corpus/reading.py`): {counted.there} have their "
        f"answer in the sources, {counted.absent} do not. Weights and threshold were fitted on questions of the "
        "training half alone. The corpus is synthetic and English, and its passages are one to three plain sentences "
        "with near misses among them: real documents will differ."
    )
    missed = (
        "What is missed is mostly a question in other words than its sentence (`Who is in charge of ...?`, `... is run "
        "by ...`); where the answer is not there, what is quoted says another thing of the right kind about the right "
        f"subject. For comparison, the bundled `mini` in bf16 has {shipped['right']} of {shipped['of']} right "
        "(`training/evaluation.json`)."
    )
    heads = (
        "quotes at most",
        "right in all",
        "right passages cited",
        "exact sentences",
        "something else quoted",
        "nothing quoted",
        "rightly said not to be there",
    )
    cells = [
        (str(quotes), *_shares(extraction.count(held, replace(options, quotes=quotes))))
        for quotes in sorted({1, options.quotes})
    ]
    least = [(f"{share:g}", *_shares(each)) for share, each in extraction.thresholds(held, options)]
    spent = (
        f"Time for 20 sources of 196 words, of the processor: {1e3 * seconds[0]:.1f} ms at best, "
        f"{1e3 * seconds[len(seconds) // 2]:.1f} ms at the median, while the load average was {os.getloadavg()[0]:.1f} "
        f"on {os.cpu_count()} cores."
    )
    return counted, _page(
        "Answers quoted from sources (measured)",
        about,
        table(heads, cells),
        missed,
        f"By the least confidence, with {options.quotes} quotes at most ({options.least:g} ships):",
        table(("least confidence", *heads[1:]), least),
        spent,
    )


def _shares(counted: extraction.Counted) -> tuple[str, ...]:
    of_there = (counted.cited, counted.exact, counted.wrong, counted.silent)
    return (
        f"{counted.right:.1%}",
        *(f"{count / counted.there:.1%}" for count in of_there),
        f"{counted.declined / counted.absent:.1%}",
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _page(title: str, *parts: str) -> str:
    wrapped = [part if "\n" in part else textwrap.fill(part, 120, break_on_hyphens=False) for part in parts]
    return "\n\n".join((f"## {title}", *wrapped)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the degradation ladder.")
    parser.add_argument("what", nargs="?", choices=("all", "serve", "extract", "fit"), default="all")
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 2.0, 4.0])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learn", type=int, default=5000, help="questions to fit on")
    options = parser.parse_args()
    if options.what == "fit":
        print(extraction.fit(extraction.to_learn(options.learn), ExtractOptions()))
        return
    counted, page = extract()
    worth = serving.Worth(extracted=round(counted.right, 2))
    pages = [page] if options.what in ("all", "extract") else []
    if options.what in ("all", "serve"):
        most, rows = serve(options, worth)
        pages.insert(0, serving_page(most, rows, options, worth))
    text = "\n".join(pages)
    print(text)
    if options.what == "all":
        command = shlex.join(["python", "benchmarks/ladder.py", *sys.argv[1:]])
        RESULTS.write_text(f"# The degradation ladder\n\nCommand: `{command}`\n\n{text}")


if __name__ == "__main__":
    main()
