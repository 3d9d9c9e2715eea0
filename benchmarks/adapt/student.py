"""Distils a student on one surface: the teacher's answers to many orders teach a model of a tenth of its size.

    python benchmarks/adapt/student.py [--prompts N] [--epochs N] [--rate X] [--threads N] [--out FILE]

The teacher is mini with an adapter for the orders (500 examples, as in extraction.py), merged. The student is draft:
all of its weights are trained on the teacher's answers to unlabelled orders. Both then answer 200 unseen orders, one at
a time and in turns. An answer counts if it is the JSON record.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adapt.extraction import ASKED, HELD_OUT, TOKENS, TRAINED, is_record, write
from benchmarks.adapt.orders import examples
from headrace import LLM
from headrace.cli import main as headrace
from headrace.lab.comparison.paired_tests import share_interval

UNLABELLED_SEED: Final = 4


def run(*words: object) -> float:
    """Run a command; return its minutes of processor time."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    if code := headrace([str(word) for word in words]):
        raise SystemExit(code)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.002)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "examples.jsonl", *TRAINED)
        held_out = folder / "held-out.jsonl"
        write(held_out, *HELD_OUT)
        shared = ("--threads", options.threads, "--no-gate", "--held-out", held_out)
        taught = run(
            *("adapt", "mini", "--data", folder / "examples.jsonl", "--out", folder / "orders", "--epochs", 6),
            *("--rate", 0.002, "--merge", folder / "teacher", *shared),
        )
        unlabelled = [{"prompt": each["prompt"]} for each in examples(options.prompts, UNLABELLED_SEED)]
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in unlabelled), encoding="utf-8")
        learnt = run(
            *("adapt", "draft", "--full", "--data", folder / "prompts.jsonl", "--distil-from", folder / "teacher"),
            *("--distil", "both", "--out", folder / "student", "--epochs", options.epochs, "--rate", options.rate),
            *("--patience", 0, *shared),
        )
        seen = {each["prompt"] for each in unlabelled} | {each["prompt"] for each in examples(*TRAINED)}
        asked = [each for each in examples(*ASKED) if each["prompt"] not in seen]
        right: dict[str, int] = {}
        seconds: dict[str, list[float]] = {}
        models = {"teacher": str(folder / "teacher"), "student": str(folder / "student"), "draft as shipped": "draft"}
        opened = {name: LLM(model, threads=1, context=1024, prefix_cache=False) for name, model in models.items()}
        for each in asked:
            for name, llm in opened.items():
                begun = time.perf_counter()
                chat = [{"role": "user", "content": each["prompt"]}]
                (answer,) = llm.chat([chat], max_tokens=TOKENS, temperature=0.0)
                seconds.setdefault(name, []).append(time.perf_counter() - begun)
                right[name] = right.get(name, 0) + is_record(answer.text, str(each["completion"]))
        for llm in opened.values():
            llm.close()
    teacher = statistics.median(seconds["teacher"])
    lines = [
        f"`python benchmarks/adapt/student.py {shlex.join(sys.argv[1:])}`".replace(" `", "`"),
        "",
        f"The teacher took {taught:.1f} minutes of processor time, the student {learnt:.1f}, the teacher's answers to "
        f"{len(unlabelled):,} orders included. Asked: {len(asked)} orders that neither was trained on.",
        "",
        "| | right records | 95 % interval | median time of an answer | of the teacher's |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, count in right.items():
        low, high = share_interval(count, len(asked))
        median = statistics.median(seconds[name])
        lines.append(
            f"| {name} | {count / len(asked):.1%} | {low:.1%} to {high:.1%} | {1e3 * median:.1f} ms "
            f"| {median / teacher:.2f} |"
        )
    page = "\n".join(lines) + "\n"
    print(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
