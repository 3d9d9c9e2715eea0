"""Measures what speculation gains: with drafts of known acceptance, and with the bundled draft model for mini.

    python benchmarks/speculation.py replay MODEL [--weights int8] [--streams 1] [--repeat 3]
    python benchmarks/speculation.py mini [--weights bf16] [--streams 1] [--questions 40] [--repeat 3]

`replay` generates first, then drafts what was generated, each token correct with a given probability. `mini` answers
held-out questions of every task without drafts, with n-gram drafts and with the draft model. Methods alternate within a
round; the tables have medians over the rounds. Outputs must be the same tokens. Runs in the environment of `make test`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # training is no package that is installed

from headrace import LLM
from headrace.engine.speculation.drafters import ReplayDrafter
from headrace.engine.speculation.speculator import Speculator

ACCEPTANCES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PROMPT: Final = 32  # tokens
NEW: Final = 128


@dataclass(frozen=True, slots=True)
class Run:
    outputs: list[list[int]]
    rate: float  # tokens per second after the first ones
    drafted: int
    held: int


def run_of(llm: LLM, prompts: list[list[int]], streams: int, **wanted: Any) -> Run:
    """Run all prompts, `streams` at a time."""
    outputs: list[list[int]] = []
    seconds, drafted, held = 0.0, 0, 0
    for start in range(0, len(prompts), streams):
        began = time.perf_counter()
        found = [each.completions[0] for each in llm.generate(prompts[start : start + streams], **wanted)]
        seconds += time.perf_counter() - began - max(each.usage.prefill_s for each in found)
        outputs += [each.tokens for each in found]
        drafted += sum(each.usage.drafted for each in found)
        held += sum(each.usage.accepted for each in found)
    return Run(outputs, (sum(map(len, outputs)) - len(outputs)) / seconds, drafted, held)


def show(title: str, ways: dict[str, list[Run]]) -> None:
    """Build a table of the methods; the first is without drafts."""
    plain, *others = ways
    wanted = ways[plain][0].outputs
    for name in others:
        if any(run.outputs != wanted for run in ways[name]):
            raise SystemExit(f"{name}: the output is another")
    base = median(run.rate for run in ways[plain])
    print(title)
    print("| drafts | tokens/s | speed-up | held |\n|---|---:|---:|---:|")
    for name, runs in ways.items():
        rate = median(run.rate for run in runs)
        drafted = sum(run.drafted for run in runs)
        held = f"{sum(run.held for run in runs) / drafted:.0%} of {drafted:,}" if drafted else ""
        print(f"| {name} | {rate:,.1f} | {rate / base:.2f} | {held} |", flush=True)


def replay(options: argparse.Namespace) -> None:
    llm = LLM(options.model, weights=options.weights, threads=options.threads, speculation="none", prefix_cache=False)
    draw = random.Random(options.seed)
    last = min(100_000, llm.tokenizer.vocab_size)
    prompts = [[draw.randrange(300, last) for _ in range(PROMPT)] for _ in range(options.streams)]
    wanted: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True, "surface": "chat"}
    known = run_of(llm, prompts, options.streams, **wanted).outputs
    ways: dict[str, list[Run]] = {"none": []} | {f"{share:.0%} right": [] for share in ACCEPTANCES}
    for _ in range(options.repeat):
        for name, share in zip(ways, (None, *ACCEPTANCES), strict=True):
            llm.opened.engine.speculator = None if share is None else Speculator(Known(known, share))
            ways[name].append(run_of(llm, prompts, options.streams, **wanted))
    title = f"{Path(options.model).name}, {options.weights}, {options.streams} streams, prompt {PROMPT}, {NEW} new"
    show(title, ways)


class Known(ReplayDrafter):
    """Drafts the known outputs by the order of requests, because their ids change in every run."""

    def __init__(self, outputs: list[list[int]], acceptance: float) -> None:
        super().__init__({}, acceptance)
        self._left = list(outputs)
        self._by_request: dict[str, list[int]] = {}

    def propose(self, sequence: Any, most: int) -> list[int]:
        id = sequence.request.id
        if id not in self._by_request:
            begun = sequence.tokens[len(sequence.request.prompt) :]
            found = next((each for each in self._left if each[: len(begun)] == begun), [])
            self._by_request[id] = found
            if found:
                self._left.remove(found)
            self._outputs = {**self._outputs, id: [found]}
        return super().propose(sequence, most)


def mini(options: argparse.Namespace) -> None:
    from training.evaluate import chosen_questions, learnt_facts, prompts_of
    from training.rows import load_tasks

    ways: dict[str, dict[str, Any]] = {
        "none": {"speculation": "none"},
        "ngram": {"speculation": "ngram"},
        "draft": {"speculation": "model", "draft_model": "draft"},
    }
    llms = {
        name: LLM("mini", weights=options.weights, threads=options.threads, prefix_cache=False, **way)
        for name, way in ways.items()
    }
    questions = chosen_questions(load_tasks(), options.questions, seed=3, learnt=learnt_facts())
    prompts = prompts_of(llms["none"].opened.folder, questions)
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(options.repeat):
        for name, llm in llms.items():
            runs[name].append(run_of(llm, prompts, options.streams, max_tokens=192, surface="chat"))
    show(f"mini, {options.weights}, {options.streams} streams, {len(prompts)} held-out questions", runs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what speculation gains.")
    commands = parser.add_subparsers(dest="command", required=True)
    run: dict[str, Callable[[argparse.Namespace], None]] = {"replay": replay, "mini": mini}
    for name in run:
        command = commands.add_parser(name)
        if name == "replay":
            command.add_argument("model")
        else:
            command.add_argument("--questions", type=int, default=40, help="of each task")
        command.add_argument("--weights", default="int8" if name == "replay" else "bf16")
        command.add_argument("--streams", type=int, default=1)
        command.add_argument("--threads", type=int)
        command.add_argument("--repeat", type=int, default=3)
        command.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    run[options.command](options)


if __name__ == "__main__":
    main()
