"""Measures every combination of what `headrace tune` may choose, and compares the best one with what the tuner chose.

    python benchmarks/tuning/sweep.py TUNED.json MODEL --prompts questions.jsonl [--rounds N] [--scale X] [--out FILE]

TUNED.json is the result of `headrace tune --from naive --json` for the same model and traffic; pass the same workload.
Combinations are measured in random order, once a round. Choices that the gate refused and sizes of the context are left
out: they are not faster but wrong, or smaller. The best few of the sweep and the tuner's setting are then measured in
turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from headrace.bench.evaluation.documents import read_documents
from headrace.bench.tuning.engine_machine import EngineMachine
from headrace.bench.tuning.levels import TuningInputs, naive_setting, tuning_levels
from headrace.bench.tuning.search import Setting
from headrace.bench.tuning.tuning_traffic import tuning_traffic
from headrace.engine.executors.default_sizes import usable_cores
from headrace.models.model_folder import find_model, open_model

FINALISTS: Final = 4
TURNS: Final = 8


def combinations(start: Setting, levels: list[Any], refused: set[str], tuned: Setting) -> Iterator[Setting]:
    """Yield the first setting with every choice of every level, in the context that the tuner chose."""
    kept = {name: tuned[name] for name in ("context", "kv_tokens")}
    choices: list[list[dict[str, Any]]] = []
    for level in levels:
        if level.skip or level.name == "context":
            continue
        wanted = [choice.options for choice in level.choices if f"{level.name}: {choice.label}" not in refused]
        choices.append([{}, *wanted])
    seen: set[str] = set()
    for some in itertools.product(*choices):
        setting = {**start, **kept}
        for options in some:
            setting |= options
        key = json.dumps(setting, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tuned", type=Path)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--workload", default="extract")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, help="combinations, drawn at random; default: all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = json.loads(options.tuned.read_text(encoding="utf-8"))
    folder = open_model(find_model(options.model))
    sizes = {"requests": options.requests, "users": options.users, "scale": options.scale, "seed": 0}
    traffic = tuning_traffic(None, options.workload, **sizes)
    inputs = TuningInputs(
        spec=folder.spec,
        traffic=traffic.profile,
        cores=usable_cores(),
        stored=False,
        gate=True,
        users=traffic.at_once,
    )
    prompts = read_documents(options.prompts)
    start = naive_setting(inputs)
    machine = EngineMachine(
        options.model, traffic, objectives={}, reference=start, prompts=prompts, job_prompts=prompts
    )
    refused = {
        f"{result['level']}: {result['choice']}"
        for result in report["results"]
        if result["gate"] is not None and not result["gate"]["passed"]
    }
    settings = [
        setting
        for setting in combinations(start, tuning_levels(inputs), refused, report["final"])
        if machine.impossible(setting) is None
    ]
    if options.most is not None and options.most < len(settings):
        settings = random.Random(1).sample(settings, options.most)
    began = time.monotonic()
    scores: list[list[float]] = [[] for _ in settings]
    for number in range(options.rounds):
        for place in random.Random(number).sample(range(len(settings)), len(settings)):
            scores[place].append(machine.measure(settings[place], number).score)
    swept_s = time.monotonic() - began
    best = sorted(range(len(settings)), key=lambda place: -statistics.median(scores[place]))[:FINALISTS]
    finalists = [report["final"], *(settings[place] for place in best)]
    turns: list[list[float]] = [[] for _ in finalists]
    for number in range(TURNS):
        for place in random.Random(number).sample(range(len(finalists)), len(finalists)):
            turns[place].append(machine.measure(finalists[place], 1000 + number).score)
    tuned, *others = (statistics.median(each) for each in turns)
    winner = turns[1 + others.index(max(others))]
    ratio = statistics.median(mine / other for mine, other in zip(turns[0], winner, strict=True))
    lines = [
        f"`python benchmarks/tuning/sweep.py {shlex.join(sys.argv[1:])}`",
        "",
        f"{len(settings)} combinations, {options.rounds} rounds: {swept_s:.0f} s. "
        f"The tuner took {report['seconds']:.0f} s for {report['measurements']} measurements.",
        "",
        f"| setting | tokens/s, median of {TURNS} turns |",
        "|---|---:|",
        f"| the tuner's: {shown(report['final'])} | {tuned:,.1f} |",
    ]
    for setting, score in zip(finalists[1:], others, strict=True):
        lines.append(f"| of the sweep: {shown(setting)} | {score:,.1f} |")
    lines += ["", f"The tuner's setting has {ratio:.1%} of the speed of the sweep's best."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


def shown(setting: Setting) -> str:
    names = ("batching", "max_sequences", "threads", "prefix_cache", "max_rows", "speculation", "weights", "kv")
    return ", ".join(f"{name} {setting[name]}" for name in names)


if __name__ == "__main__":
    main()
