"""Compares each decoder's tiny model of the tests with transformers, and writes the table.

    python benchmarks/architectures.py [--only NAME,NAME] [--out FILE]
    python benchmarks/architectures.py --speed [--only qwen3-vl,lfm2,gpt-oss] [--rounds N] [--threads N] [--out FILE]

Beside the largest error of the logits and the greedy tokens that are the same, it compares the bytes of weights and KV
memory with the formulas: 4 bytes for each parameter, and 2 x layers of attention x KV heads x head size x 4 bytes for
each token. A model without attention has the KV memory of one layer. With `--speed`, it measures larger ones beside
llama.cpp and transformers instead: see architecture_speed.py.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is no package that is installed

import numpy as np
import transformers

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy, logits
from headrace.models.model_folder import open_model
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import DECODERS, TINY, Reference, build, prompt

LENGTHS: Final = (17, 300)
ANSWER: Final = 64  # tokens


def row(name: str) -> str:
    """Return a line of the table."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        reference = Reference(name, TINY[name], folder, build(name, folder))
        opened = open_model(folder)
        executor = CpuExecutor.load(opened, weights="f32", kv="f32", threads=1, context=CONTEXT)
        error, same = 0.0, 0
        for length in LENGTHS:
            tokens = prompt(length)
            (found,), expected = logits(executor, [tokens]), reference.logits(tokens)
            error = max(error, float(np.abs(found - expected).max() / np.abs(expected).max()))
            (answer,) = greedy(executor, [tokens], ANSWER)
            likeliest = reference.logits(tokens + answer)[length - 1 : -1].argmax(-1)
            same += int((likeliest == np.array(answer)).sum())
        spec = opened.spec
        weights = executor.load_report.weight_bytes / (4 * sum(map(math.prod, opened.shapes.values())))
        kv = executor.kv_bytes_per_token / (4 * spec.kv_numbers)
        executor.close()
    of = ANSWER * len(LENGTHS)
    return f"| `{name}` | `{TINY[name].architecture}` | {error:.1e} | {same} of {of} | {weights:.2f} | {kv:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Each decoder beside transformers.")
    parser.add_argument("--only", help="names of tiny models, or of shapes with --speed, with commas between")
    parser.add_argument("--out", type=Path, help="writes the table there too")
    parser.add_argument("--speed", action="store_true", help="measures speed beside llama.cpp and transformers")
    parser.add_argument("--rounds", type=int, default=5, help="with --speed: how often each engine takes its turn")
    parser.add_argument("--threads", type=int, default=2, help="with --speed: of each engine")
    parser.add_argument("--smoke", action="store_true", help="with --speed: small models, to see that it runs")
    options = parser.parse_args()
    text = _speeds(options) if options.speed else _table(options.only.split(",") if options.only else list(DECODERS))
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


def _speeds(options: argparse.Namespace) -> str:
    from architecture_speed import SHAPES, speed_table  # needs packages that the other table does not

    names = options.only.split(",") if options.only else list(SHAPES)
    unknown = ", ".join(name for name in names if name not in SHAPES)
    if unknown:
        raise SystemExit(f"Unknown shapes: {unknown}. Expected {', '.join(SHAPES)}.")
    return speed_table(names, rounds=options.rounds, threads=options.threads, small=options.smoke)


def _table(names: list[str]) -> str:
    lengths = " and ".join(map(str, LENGTHS))
    lines = [
        "# Decoders beside transformers",
        "",
        f"`python benchmarks/architectures.py {shlex.join(sys.argv[1:])}`".strip(),
        "",
        f"Tiny models with random weights, written by transformers {transformers.__version__}, in f32: the largest "
        f"error of the logits of prompts of {lengths} tokens, relative to the largest logit; and the greedy tokens "
        "after them that are the likeliest ones of transformers too. Weights and KV memory are in multiples of what "
        "their formulas say: sizes are padded to multiples of 32 (weights) and 16 (KV), which few sizes of tiny models "
        "are.",
        "",
        "| model | architecture | largest error | same tokens | weights | KV |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for number, name in enumerate(names):
        print(f"\r\x1b[K{number + 1} of {len(names)}: {name}", end="", file=sys.stderr)
        lines.append(row(name))
    print("\r\x1b[K", end="", file=sys.stderr)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
