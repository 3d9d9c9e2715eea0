"""Compares the time that a long prompt takes with llama.cpp's, on the same GGUF file.

    python benchmarks/long_prompts.py MODEL.gguf [--lengths 4096,16384] [--kv int8] [--threads 2] [--rounds 1]
    python benchmarks/long_prompts.py MODEL.gguf --alone --lengths 32768

Both engines read the same tokens and take turns. Needs the package xllamacpp, unless Headrace runs alone. Times are
until the first token; other work on the machine counts less in processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import shlex
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.llama_server import llama_server
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy
from headrace.models.model_folder import open_model

ROOM: Final = 64  # tokens of the context beyond the prompt


class Spent(NamedTuple):
    wall_s: float
    processor_s: float


def medians(spent: list[Spent]) -> Spent:
    return Spent(*(statistics.median(column) for column in zip(*spent, strict=True)))


def measure(file: Path, length: int, options: argparse.Namespace) -> tuple[Spent, Spent | None, int]:
    """Return the medians of ours and of llama.cpp's, unless ours runs alone, and the bytes of KV of our prompt."""
    model = open_model(file)
    tokens = random.Random(length).choices(range(1000, model.spec.vocab_size - 1000), k=length)
    executor = CpuExecutor.load(
        model, weights=options.weights, kv=options.kv, threads=options.threads, context=length + ROOM
    )
    ours: list[Spent] = []
    theirs: list[Spent] = []
    with contextlib.ExitStack() as stack:
        server = None
        if not options.alone:
            server = stack.enter_context(llama_server(file, options.threads, context=length + ROOM))
        for _ in range(options.rounds):
            wall, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
            greedy(executor, [tokens], 1)
            ours.append(
                Spent(time.monotonic() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu),
            )
            if server is not None:
                wall, cpu = time.monotonic(), server.processor_s()
                server.complete(tokens, 1, cache_prompt=False)
                theirs.append(Spent(time.monotonic() - wall, server.processor_s() - cpu))
            print(f"{length:,}: {ours[-1]} beside {theirs[-1:]}", file=sys.stderr, flush=True)
    size = executor.kv_bytes_per_token * length
    executor.close()
    return medians(ours), medians(theirs) if theirs else None, size


def main() -> None:
    parser = argparse.ArgumentParser(description="Long prompts beside llama.cpp on the same GGUF file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="bf16", help="our KV cache")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    lines = [
        "# Long prompts beside llama.cpp",
        f"`python benchmarks/long_prompts.py {shlex.join(sys.argv[1:])}`",
        f"{options.file.name} on{cpu.split(':')[1]}, {options.threads} threads each, by turns, medians of "
        f"{options.rounds} rounds, our KV in {options.kv}"
        + ("." if options.alone else f"; llama.cpp from xllamacpp {version('xllamacpp')}, with its own defaults."),
        "| tokens | Headrace s | llama.cpp s | ratio | processor s | llama.cpp | ratio | KV MiB |\n"
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for length in map(int, options.lengths.split(",")):
        ours, theirs, size = measure(options.file, length, options)
        if theirs is None:
            cells = [f"{seconds:.1f} | | " for seconds in ours]
        else:
            cells = [f"{a:.1f} | {b:.1f} | {a / b:.2f}" for a, b in zip(ours, theirs, strict=True)]
        lines[-1] += f"\n| {length:,} | {' | '.join(cells)} | {size / 2**20:.0f} |"
    text = "\n\n".join(lines) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
