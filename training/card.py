"""Writes the tables of the model card, docs/mini.md, between their markers. The text around them is written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.evaluate import TARGETS, missed, share
from training.shape import CONTEXT, DRAFT, MINI, Shape
from training.tokenizer import write_text


def begin(name: str) -> str:
    return f"<!-- {name}: written by training/card.py -->"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return the card with each table between its markers; raise ValueError if the markers are missing."""
    for name, table in tables.items():
        before, first, rest = text.partition(begin(name))
        _, last, after = rest.partition(end(name))
        if not first or not last:
            raise ValueError(f"the card has no marks for '{name}'")
        text = f"{before}{first}\n\n{table}\n\n{last}{after}"
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sizes(models: Mapping[str, Shape]) -> str:
    rows = [
        [
            name,
            f"{shape.weights / 1e6:.1f} million",
            f"{shape.weights * 2 / 1e6:.1f} MB",
            str(shape.layers),
            str(shape.hidden),
            f"{shape.heads} / {shape.kv_heads}",
            str(shape.head_size),
            str(shape.inner),
            f"{shape.vocabulary:,}",
            f"{CONTEXT:,}",
        ]
        for name, shape in models.items()
    ]
    head = "model,weights,in bf16,layers,hidden,heads / KV heads,head size,inner,vocabulary,context".split(",")
    return table(head, rows)


def quality(results: Mapping[str, Any]) -> str:
    """Return right answers per task: a row per precision of mini, one for draft, one for the targets."""
    first = results["precisions"][0]["tasks"]
    tasks = list(first)
    head = ["model", "weights", "KV", "MB", *tasks, "all"]
    rows = [
        [
            "mini",
            f"`{line['weights']}`",
            f"`{line['kv']}`",
            f"{line['weight_bytes'] / 1e6:.1f}",
            *(f"{share(line['tasks'], task):.1%}" for task in tasks),
            f"{share(line['tasks']):.1%}",
        ]
        for line in results["precisions"]
    ]
    draft = results["draft"]
    cells = [f"{share(draft['tasks'], task):.1%}" for task in tasks]
    size = f"{draft['weight_bytes'] / 1e6:.1f}"
    rows.append(["draft", "`bf16`", "`bf16`", size, *cells, f"{share(draft['tasks']):.1%}"])
    wanted = [f"≥ {TARGETS[task]:.0%}" if task in TARGETS else "" for task in tasks]
    rows.append(["target", "", "", "", *wanted, ""])
    rows.append(["questions", "", "", "", *(str(first[task]["of"]) for task in tasks), str(results["questions"])])
    text = table(head, rows)
    misses = missed(results)
    return text + ("\n\nTargets missed: " + "; ".join(misses) + "." if misses else "\n\nEvery target is met.")


def acceptance(results: Mapping[str, Any]) -> str:
    counts = results["acceptance"]
    head = ["", *counts, "all"]
    cells = [f"{share(counts, task):.1%}" for task in counts]
    return table(head, [["tokens accepted", *cells, f"{share(counts):.1%}"]])


def write_card(path: Path, results: Mapping[str, Any]) -> None:
    tables = {
        "sizes": sizes({"mini": MINI, "draft": DRAFT}),
        "quality": quality(results),
        "acceptance": acceptance(results),
    }
    write_text(path, filled(path.read_text(encoding="utf-8"), tables))
