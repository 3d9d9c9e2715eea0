"""Trains a model or an adapter from rows of tokens, and writes the result into a folder beside its place.

Reads no examples and measures no answers: the command does that around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.adapt.checkpoint import SUFFIX, CheckpointFolder, TrainingJob, TrainingState
from headrace.adapt.decoder import Decoder, check_trainable
from headrace.adapt.model_output import check_writable, publish, remove, write_adapter, write_model
from headrace.adapt.recipe import AdaptRecipe
from headrace.adapt.training import CHECKPOINT_S, Training, Watch
from headrace.adapt.training_rows import TrainingRow, digest
from headrace.compress.compression import model_digest
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder


class AdaptedModel(NamedTuple):
    """A training's result. Its folders are complete, but not in their places yet."""

    out: Path  # the adapter, or the model with `full`
    model: Path | None  # a model folder with the result, or with the adapter merged; None: an adapter alone
    state: TrainingState
    resumed: int  # steps that an earlier process had done
    trained: int  # weights that were trained
    work: CheckpointFolder

    def publish(self, out: Path, merged: Path | None = None) -> None:
        """Move the result to its place, and a merged model to `merged`. Remove the work."""
        if merged is not None and self.model is not None:
            publish(self.model, merged)
        publish(self.out, out)
        self.work.remove()


def adapt_model(
    folder: ModelFolder,
    rows: Sequence[TrainingRow],
    held_out: Sequence[TrainingRow],
    recipe: AdaptRecipe,
    out: Path,
    *,
    base: str,
    teacher: ModelFolder | None = None,
    merge: bool = False,
    threads: int = 1,
    restart: bool = False,
    watch: Watch = lambda _: None,
    checkpoint_s: float = CHECKPOINT_S,
) -> AdaptedModel:
    """Train in the folder `out` + ".partial"; continue the work there if it has the same model, rows and recipe.

    `base` is the model's name that an adapter refers to. `merge` also writes an adapter's merged model. Publish the
    result to move it to `out`.
    """
    recipe.check()
    check_trainable(folder.spec)
    if recipe.full or merge:
        check_writable(folder)
    if not rows or not held_out:
        raise RequestError("Training needs at least two examples: one is held out.", parameter="data")
    if out.exists():
        raise RequestError(f"{out} exists. Choose another name, or remove it first.", parameter="out")
    torch.set_num_threads(threads)
    job = TrainingJob(
        model_digest(folder), recipe, digest(rows), digest(held_out), "" if teacher is None else model_digest(teacher)
    )
    work = CheckpointFolder.open(out.with_name(out.name + SUFFIX), job, restart=restart)
    student = Decoder(folder, recipe, threads=threads)
    training = Training(
        student,
        rows,
        held_out,
        recipe,
        work,
        teacher=None if teacher is None else Decoder(teacher, threads=threads),
        watch=watch,
        checkpoint_s=checkpoint_s,
    )
    state = training.run()
    made, merged = work.path / "made" / out.name, work.path / "merged"
    for left in (made, merged):
        remove(left)
    if recipe.full:
        write_model(folder, student, made)
    else:
        write_adapter(folder, student, recipe, made, base=base)
        if merge:
            write_model(folder, student, merged)
    model = made if recipe.full else merged if merge else None
    trained = sum(value.numel() for value in student.trained.values())
    return AdaptedModel(made, model, state, training.resumed, trained, work)
