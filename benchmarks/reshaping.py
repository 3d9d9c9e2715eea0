"""Gives mini fewer heads and neurons, heals the results, and measures each against mini on its own answers.

    python benchmarks/reshaping.py [--examples N] [--epochs N] [--sample N] [--heal NAMES] [--threads N] [--out FILE]

Calibrates and heals on conversations of mini's training tasks, of which none is measured on.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # training is no package that is installed

from benchmarks.quality import MODEL, answers, show
from headrace.bench.evaluation.evaluation import EvaluationOptions, evaluate_variants
from headrace.bench.evaluation.evaluation_table import markdown
from headrace.cli import main as headrace
from headrace.variant import Variant
from training.rows import load_tasks, pool
from training.tokenizer import messages_of

SHAPES: Final = {
    "kv-1": ["--kv-heads", "1"],
    "heads-3": ["--heads", "3"],
    "neurons-768": ["--neurons", "768"],
    "heads-3-neurons-768": ["--heads", "3", "--neurons", "768"],
}


def seconds() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def timed(arguments: list[str], took: dict[str, float], name: str) -> None:
    print(name, file=sys.stderr)
    begin = seconds()
    if headrace(arguments):
        raise SystemExit(f"headrace {shlex.join(arguments)} failed")
    took[name] = seconds() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Fewer heads and neurons, with and without healing.")
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.0005)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--heal", default=",".join(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = answers(options.sample, options.threads)
    took: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "examples.jsonl"
        plain = [each for each in pool(load_tasks(), 7, 0, 2 * options.examples) if not each.tools]
        lines = [
            json.dumps({"messages": messages_of(each.turns)}) for each in plain if each.turns[-1].role == "assistant"
        ]
        data.write_text("\n".join(lines[: options.examples]) + "\n")
        names: list[str] = []
        for name, flags in SHAPES.items():
            made = folder / name
            timed(["reshape", MODEL, str(made), *flags, "--calibrate", str(data)], took, name)
            names.append(name)
            if name not in options.heal.split(","):
                continue
            healed = f"{name}-healed"
            flags = [
                "--full",
                "--distil-from",
                MODEL,
                "--data",
                str(data),
                "--epochs",
                str(options.epochs),
                "--no-gate",
            ]
            flags += ["--rate", str(options.rate), "--threads", str(options.threads), "--out", str(folder / healed)]
            timed(["adapt", str(made), *flags], took, healed)
            names.append(healed)
        report = evaluate_variants(
            measured,
            [Variant.of(str(folder / name), weights="bf16", threads=options.threads, cache=False) for name in names],
            source="answers to held-out questions",
            reference=Variant.of(MODEL, weights="bf16", threads=options.threads),
            options=EvaluationOptions(speed=True),
            watch=show,
        )
    text = "\n\n".join(
        [
            f"`python benchmarks/reshaping.py {shlex.join(sys.argv[1:])}`",
            "Processor seconds: " + ", ".join(f"{name} {spent:.0f}" for name, spent in took.items()) + ".",
            markdown(report).strip(),
        ]
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
