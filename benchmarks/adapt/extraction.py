"""Trains an adapter on 500 orders, and has base and adapter answer 200 unseen ones in one engine, side by side.

    python benchmarks/adapt/extraction.py MODEL [--rank N] [--epochs N] [--rate X] [--threads N] [--out FILE]

An answer counts if it is the JSON record, whatever its spacing and the order of its keys.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adapt.orders import examples
from headrace import LLM
from headrace.cli import main as headrace
from headrace.lab.comparison.paired_tests import share_interval

TRAINED, HELD_OUT, ASKED = (500, 1), (60, 2), (200, 3)  # examples and their seed
TOKENS: Final = 96  # of an answer, at most


def write(path: Path, count: int, seed: int) -> list[dict[str, Any]]:
    found = examples(count, seed)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in found), encoding="utf-8")
    return found


def is_record(text: str, wanted: str) -> bool:
    try:
        return json.loads(text) == json.loads(wanted)
    except ValueError:
        return False


def ask(model: str, adapter: Path, asked: list[dict[str, Any]], threads: int) -> dict[str, list[str]]:
    """Answers of the base and of the adapter, by one engine that holds both."""
    chats = [[{"role": "user", "content": each["prompt"]}] for each in asked]
    with LLM(model, adapters={"orders": adapter}, threads=threads, context=1024, kv_tokens=32768) as llm:
        return {
            name or "base": [each.text for each in llm.chat(chats, adapter=name, max_tokens=TOKENS, temperature=0.0)]
            for name in ("", "orders")
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = write(folder / "examples.jsonl", *TRAINED)
        write(folder / "held-out.jsonl", *HELD_OUT)
        known = {each["prompt"] for each in trained}
        asked = [each for each in examples(*ASKED) if each["prompt"] not in known]
        files = {"data": "examples.jsonl", "held-out": "held-out.jsonl", "out": "orders"}
        flags = {name: folder / each for name, each in files.items()} | {
            name: getattr(options, name) for name in ("rank", "epochs", "rate", "threads")
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        code = headrace(["adapt", options.model, *words, "--no-gate"])
        if code:
            raise SystemExit(code)
        took, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF)
        processor = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        answers = ask(options.model, folder / "orders", asked, options.threads)
    lines = [
        f"`python benchmarks/adapt/extraction.py {shlex.join(sys.argv[1:])}`",
        "",
        f"Trained on {len(trained)} examples in {took / 60:.1f} minutes ({processor / 60:.1f} minutes of processor "
        f"time, {options.threads} threads). Asked: {len(asked)} orders that it was not trained on.",
        "",
        "| | right records | 95 % interval |",
        "|---|---:|---:|",
    ]
    for name, texts in answers.items():
        right = sum(is_record(text, each["completion"]) for text, each in zip(texts, asked, strict=True))
        low, high = share_interval(right, len(asked))
        lines.append(f"| {name} | {right / len(asked):.1%} | {low:.1%} to {high:.1%} |")
    page = "\n".join(lines) + "\n"
    print(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
