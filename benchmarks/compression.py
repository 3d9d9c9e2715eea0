"""Compresses a model by every method at 4 and 3 bits and in int8, measures each result, and writes the tables.

    python benchmarks/compression.py [--model FOLDER] [--tokens N] [--calibrate-tokens N] [--recipes NAMES] [--out FILE]

Recipes named half-... or 2:4-... set half of the weights to 0 instead, and keep the others in bf16.

mini calibrates on its own answers to half of the sampled questions and is measured on the other half, and on the pages
of docs/how-to. Other models calibrate on the bundled text and are measured on those pages.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # training is no package that is installed

from benchmarks.quality import MODEL, answers, pages, show
from headrace.bench.evaluation.documents import Document, cut, read_text, tokenise
from headrace.bench.evaluation.evaluation import EvaluationOptions, evaluate_variants
from headrace.bench.evaluation.evaluation_table import markdown
from headrace.compress.calibration import BUNDLED_TEXT
from headrace.compress.compression import compress_model, products_of, scale_type
from headrace.compress.pruning import PRUNERS
from headrace.compress.recipe import GROUPS, KEPT, Recipe
from headrace.models.model_folder import find_model, open_model
from headrace.variant import Variant

RECIPES: Final = {  # name -> method, bits, symmetric, clip
    "int8-rtn": ("rtn", 8, True, True),
    "int8-smoothquant": ("smoothquant", 8, True, True),
    "4-rtn": ("rtn", 4, False, False),
    "4-rtn-clip": ("rtn", 4, False, True),
    "4-gptq": ("gptq", 4, False, True),
    "4-awq": ("awq", 4, False, True),
    "4-awq-gptq": ("awq+gptq", 4, False, True),
    "3-rtn": ("rtn", 3, False, False),
    "3-rtn-clip": ("rtn", 3, False, True),
    "3-gptq": ("gptq", 3, False, True),
    "3-awq": ("awq", 3, False, True),
    "3-awq-gptq": ("awq+gptq", 3, False, True),
}
SPARSE: Final = {  # name -> sparsity, pruner
    f"{name}-{pruner}": (sparsity, pruner) for name, sparsity in (("half", "0.5"), ("2:4", "2:4")) for pruner in PRUNERS
}


def seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="The quality of each method of compression.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sample", type=int, default=40, help="held-out questions of each task, for mini")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens of the pages to score")
    parser.add_argument("--calibrate-tokens", type=int, default=8192)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="writes the tables there too")
    options = parser.parse_args()
    folder = open_model(find_model(options.model))
    measured = [("On the pages of docs/how-to", "docs/how-to", pages(), options.tokens)]
    calibration: list[Document] = read_text(BUNDLED_TEXT)
    if options.model == MODEL:
        own = answers(options.sample, options.threads)
        calibration = [Document(prompt=each.prompt + (each.completion or "")) for each in own[::2]]
        measured.insert(0, ("On its own answers", "answers to held-out questions", own[1::2], None))
    window = min(512, folder.spec.context)
    texts = [tokenise(document, folder.tokenizer) for document in calibration]
    sequences = [each.tokens for each in cut(texts, window=window, stride=window, most=options.calibrate_tokens)]
    names = products_of(folder)
    group = next(size for size in GROUPS if all(folder.shapes[name][1] % size == 0 for name in names))
    lines = [
        f"# What compression costs {folder.path.name}",
        f"`python benchmarks/compression.py {shlex.join(sys.argv[1:])}`",
        f"Groups of {group}; calibrated on {sum(map(len, sequences)):,} tokens. Processor seconds of each method:",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        took: list[str] = []
        for name in options.recipes.split(","):
            method, bits, symmetric, clip = RECIPES.get(name, ("rtn", KEPT, True, True))
            sparsity, pruner = SPARSE.get(name, ("", "magnitude"))
            recipe = Recipe(
                method=method,
                bits=dict.fromkeys(names, bits),
                group=0 if method == "smoothquant" else group,
                symmetric=symmetric,
                clip=clip,
                scale_type=scale_type(folder),
                sparsity=sparsity,
                pruner=pruner,
                pruned=tuple(names) if sparsity else (),
            )
            begin = seconds()
            print(name, file=sys.stderr)
            out = Path(temporary) / name
            form = "sparse-bitmask" if sparsity else "compressed-tensors"
            compress_model(folder, out, sequences, recipe, format=form).publish(out)
            took.append(f"{name} {seconds() - begin:.0f}")
        lines[-1] += " " + ", ".join(took) + "."
        variants = [
            Variant.of(str(Path(temporary) / name), threads=options.threads, cache=False)
            for name in options.recipes.split(",")
        ]
        for title, source, documents, most in measured:
            report = evaluate_variants(
                documents,
                variants,
                source=source,
                reference=Variant.of(options.model, weights="bf16", threads=options.threads),
                options=EvaluationOptions(speed=False, tokens=most),
                watch=show,
            )
            lines += [f"## {title}", markdown(report).strip()]
    text = "\n\n".join(lines) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
