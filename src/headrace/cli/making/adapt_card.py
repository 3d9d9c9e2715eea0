"""Writes the README of what `headrace adapt` trained, and the table of its scores against the base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table

from headrace.adapt.recipe import AdaptRecipe
from headrace.lab.gate.metrics import METRICS
from headrace.lab.gate.task_scores import TaskScore, VariantScores, compare_scores
from headrace.models.formats.atomic_file import new_file
from headrace.models.model_folder import ModelFolder

if TYPE_CHECKING:
    from headrace.adapt.adaptation import AdaptedModel  # imports torch

_CARD: Final = "README.md"
_TITLES: Final = {metric.name: metric.title for metric in METRICS}


def score_table(scores: Sequence[VariantScores]) -> Table:
    """Return the metrics of base and result against the good answers."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for place, title in enumerate(("against the good answers", "n", "base", "adapted")):
        table.add_column(title, justify="left" if place == 0 else "right", no_wrap=True)
    for row in _rows(scores):
        table.add_row(*row)
    return table


def write_card(
    adapted: AdaptedModel,
    folder: ModelFolder,
    recipe: AdaptRecipe,
    examples: str,
    teacher: str,
    scores: Sequence[VariantScores],
) -> None:
    """Write the card into the folder of the result."""
    name, state = adapted.out.name, adapted.state
    kind = "A model" if recipe.full else "An adapter (LoRA, in PEFT's layout)"
    facts = {
        "method": recipe.describe(),
        "examples": examples,
        "teacher": teacher or "none",
        "steps": f"{state.step:,} of {recipe.batch} examples; the best after {state.best_step:,}",
        "learning rate": f"{recipe.rate:g}, cosine, {recipe.warm_up:.0%} warm-up; AdamW, decay {recipe.decay:g}",
        "seed": str(recipe.seed),
        "weights trained": f"{adapted.trained:,}",
    }
    if not recipe.full:
        facts["modules"] = ", ".join(recipe.targets) or "every product of the layers"
    lines = [
        f"---\nbase_model: {folder.path.name}\ntags: [headrace]\n---",
        f"# {name}",
        f"{kind} for {folder.path.name}, trained with `headrace adapt`.",
        "## Recipe",
        "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        "## Loss",
        "In nats per learnt token.",
        "| step | examples | held out |\n|---:|---:|---:|\n"
        + "\n".join(
            f"| {each.step} | {each.train_loss:.4f} | {each.held_out_loss:.4f} |" for each in state.evaluations
        ),
    ]
    if scores:
        rows = "\n".join("| " + " | ".join(row) + " |" for row in _rows(scores))
        lines += [
            "## Held-out prompts",
            f"| against the good answers | n | base | adapted |\n|---|---:|---:|---:|\n{rows}",
            f"Correct answers against the base: {compare_scores(scores[1], scores[0])}.",
        ]
    with new_file(adapted.out / _CARD) as file:
        file.write(("\n\n".join(lines) + "\n").encode())


def _rows(scores: Sequence[VariantScores]) -> list[list[str]]:
    base, adapted = scores
    return [
        [_TITLES[score.metric], f"{score.count:,}", _text(base.of(score.metric)), _text(score)]
        for score in adapted.scores
    ]


def _text(score: TaskScore | None) -> str:
    if score is None:
        return ""
    return f"{100 * score.value:.1f} % ({100 * score.low:.1f}…{100 * score.high:.1f})"
