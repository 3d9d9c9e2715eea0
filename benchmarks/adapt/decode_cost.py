"""What adapters cost a decode step: eight sequences with eight adapters against the same sequences without.

    python benchmarks/adapt/decode_cost.py MODEL [--weights int8,bf16] [--rank N] [--targets q_proj,v_proj]
        [--threads N] [--rounds N] [--steps N] [--out FILE]

Adapters have random weights. Runs of steps with and without adapters alternate in one process. Times are the
processor's and the lower quartile of all steps, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner, RunnerSequence
from headrace.engine.interface.request import AdapterRef
from headrace.llm.adapters import open_adapter
from headrace.models.adapters.adapter_folder import ADAPTER_CONFIG, ADAPTER_FILE, product_of
from headrace.models.adapters.adapter_modules import adapter_modules
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.model_folder import ModelFolder, find_model, open_model

SEQUENCES: Final = 8
PROMPT: Final = 32  # tokens


def write_adapter(folder: ModelFolder, out: Path, rank: int, targets: list[str], seed: int) -> int:
    """Return the number of weights."""
    random, tensors, count = np.random.default_rng(seed), dict[str, Any](), 0
    for module in adapter_modules(folder, targets):
        if product_of(module.tensor) is None:
            continue
        inputs, rows = folder.shapes[module.tensor][1], module.rows.stop - module.rows.start
        for side, shape in (("A", (rank, inputs)), ("B", (rows, rank))):
            values = (random.standard_normal(shape) * 0.02).astype(np.float32)
            name = f"base_model.model.{module.name}.lora_{side}.weight"
            tensors[name] = "F32", shape, lambda held=values: [held]
            count += values.size
    out.mkdir()
    (out / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    write_safetensors(out / ADAPTER_FILE, tensors)
    return count


class Steps(NamedTuple):
    processor: list[float]  # seconds of each step
    stages: dict[str, list[float]]  # the same by the clock


def run(runner: Runner, refs: list[AdapterRef | None], steps: int) -> Steps:
    executor = runner.executor
    assert isinstance(executor, CpuExecutor)
    vocab = executor.spec.vocab_size
    sequences: list[RunnerSequence] = []
    for place, ref in enumerate(refs):
        prompt = [(place * 101 + i * 7) % vocab for i in range(PROMPT)]
        sequences.append(runner.open(prompt, total=PROMPT + steps + 1, adapter=ref))
    runner.step([(sequence, sequence.pending) for sequence in sequences], [])
    found, before = Steps([], {}), executor.stage_seconds()
    for step in range(steps):
        for place, sequence in enumerate(sequences):
            sequence.tokens.append((place * 31 + step * 17) % vocab)
        used = time.process_time()
        runner.step([(sequence, 1) for sequence in sequences], range(len(sequences)))
        found.processor.append(time.process_time() - used)
        after = executor.stage_seconds()
        for name, seconds in after.items():
            found.stages.setdefault(name, []).append(seconds - before[name])
        before = after
    for sequence in sequences:
        runner.close(sequence)
    return found


def low(values: list[float]) -> float:
    """The lower quartile in ms: of steps that other programs disturbed least."""
    return statistics.quantiles(values, n=4)[0] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--weights", default="bf16,int8")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = open_model(find_model(options.model))
    targets = [each for each in options.targets.split(",") if each]
    rows: list[str] = []
    details: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        paths = [Path(temporary) / f"a{number}" for number in range(SEQUENCES)]
        counts = [write_adapter(folder, path, options.rank, targets, seed) for seed, path in enumerate(paths)]
        for weights in options.weights.split(","):
            executor = CpuExecutor.load(folder, weights=weights, threads=options.threads, context=256, kv_tokens=8192)
            assert executor.adapters is not None
            refs: list[AdapterRef | None] = []
            for path in paths:
                ref = open_adapter(path.name, path, folder)
                executor.adapters.load(ref).result()
                executor.adapters.hold(ref)
                refs.append(ref)
            runner = Runner(executor)
            none: list[AdapterRef | None] = [None] * SEQUENCES
            ratios: list[float] = []
            all_steps = Steps([], {}), Steps([], {})  # without and with
            for turn in range(options.rounds + 1):
                took: dict[bool, Steps] = {}
                for own in (False, True) if turn % 2 else (True, False):
                    took[own] = run(runner, refs if own else none, options.steps)
                if turn == 0:
                    continue  # warms up
                ratios.append(statistics.median(took[True].processor) / statistics.median(took[False].processor))
                for own, steps in took.items():
                    all_steps[own].processor.extend(steps.processor)
                    for name, seconds in steps.stages.items():
                        all_steps[own].stages.setdefault(name, []).extend(seconds)
            base, with_own = (low(steps.processor) for steps in all_steps)
            adapters = executor.adapters.stats()["bytes"]
            rows.append(
                f"| {weights} | {base:.2f} | {with_own:.2f} | {with_own / base - 1:+.1%} | "
                f"{statistics.median(ratios) - 1:+.1%} | {adapters / 2**20:.0f} |"
            )
            parts = {name: [low(steps.stages[name]) for steps in all_steps] for name in all_steps[0].stages}
            shown = ", ".join(f"{name} {own:.2f} ({own - base:+.2f})" for name, (base, own) in parts.items() if own)
            details.append(f"{weights}, ms of each stage by the clock with adapters (more than without): {shown}.")
            print(rows[-1], details[-1], sep="\n", file=sys.stderr)
            executor.close()
    page = "\n".join(
        [
            f"`python benchmarks/adapt/decode_cost.py {shlex.join(sys.argv[1:])}`",
            "",
            f"Eight adapters of rank {options.rank} on {options.targets or 'all projections'}, each of {counts[0]:,} "
            "weights.",
            "",
            "| base | step without adapters, ms | with eight | more | median of rounds | adapters, MiB |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            *(f"\n{each}" for each in details),
        ]
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
