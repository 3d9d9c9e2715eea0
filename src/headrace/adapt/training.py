"""The training loop: steps of AdamW over batches of rows, evaluations on held-out rows, early stopping, checkpoints.

The same model, rows, recipe and number of threads give the same numbers, also after a kill. Writes no model.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from msgspec.structs import replace
from torch import Tensor

from headrace.adapt.checkpoint import CheckpointFolder, Evaluation, TrainingState
from headrace.adapt.decoder import Decoder
from headrace.adapt.recipe import AdaptRecipe
from headrace.adapt.training_rows import TrainingRow, batch_rows, pieces, steps_of_epoch

BETAS: Final = (0.9, 0.99)
EPS: Final = 1e-8
CHECKPOINT_S: Final = 60.0


class TrainingProgress(NamedTuple):
    step: int
    steps: int
    loss: float  # of the last step, in nats per learnt token
    held_out_loss: float | None  # of the last evaluation


Watch = Callable[[TrainingProgress], None]


class _Piece(NamedTuple):
    tokens: Tensor  # [rows, length], padded with 0
    places: Tensor  # in the flat rows, whose next token is learnt
    targets: Tensor


class Training:
    def __init__(
        self,
        student: Decoder,
        rows: Sequence[TrainingRow],
        held_out: Sequence[TrainingRow],
        recipe: AdaptRecipe,
        checkpoints: CheckpointFolder,
        *,
        teacher: Decoder | None = None,
        watch: Watch = lambda _: None,
        checkpoint_s: float = CHECKPOINT_S,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.recipe = recipe
        self._rows = rows
        self._held_out = held_out
        self._checkpoints = checkpoints
        self._watch = watch
        self._checkpoint_s = checkpoint_s
        self.steps = recipe.epochs * steps_of_epoch(len(rows), recipe.batch)
        self._mean = {name: torch.zeros_like(value) for name, value in student.trained.items()}
        self._square = {name: torch.zeros_like(value) for name, value in student.trained.items()}
        self._best: dict[str, Tensor] = {}
        self.state = TrainingState(checkpoints.job)
        self.resumed = self._restore()

    def run(self) -> TrainingState:
        """Train to the end and leave the best weights in the student."""
        every = max(1, steps_of_epoch(len(self._rows), self.recipe.batch) // self.recipe.evaluations)
        saved_at = time.monotonic()
        if not self._best:
            self._evaluate()  # before the first step, so that training never ends worse than it began
        while not self.state.ended:
            loss = self._step()
            step = self.state.step
            if step % every == 0 or step == self.steps:
                self._evaluate()
            if self.state.ended or time.monotonic() - saved_at >= self._checkpoint_s:
                self._save()
                saved_at = time.monotonic()
            last = self.state.evaluations[-1].held_out_loss if self.state.evaluations else None
            self._watch(TrainingProgress(step, self.steps, loss, last))
        with torch.no_grad():
            for name, value in self.student.trained.items():
                value.copy_(self._best[name])
        self.student.forget_rounding()
        return self.state

    def loss(self, rows: Sequence[TrainingRow]) -> float:
        """Return the mean loss of the learnt tokens of rows, in nats."""
        total = 0.0
        with torch.no_grad():
            for piece in map(_piece, pieces(rows, self.recipe.piece_tokens)):
                total += float(self._piece_loss(piece))
        return total / sum(row.learnt for row in rows)

    def _step(self) -> float:
        rows = batch_rows(self._rows, self.recipe.batch, self.recipe.seed, self.state.step)
        learnt = sum(row.learnt for row in rows)
        self.student.forget_rounding()
        total = 0.0
        for piece in map(_piece, pieces(rows, self.recipe.piece_tokens)):
            loss = self._piece_loss(piece) / learnt
            loss.backward()
            total += float(loss.detach())
        self._update(self.recipe.rate * self.recipe.share_of_rate(self.state.step, self.steps))
        state = self.state
        self.state = replace(
            state, step=state.step + 1, loss_sum=state.loss_sum + total, loss_steps=state.loss_steps + 1
        )
        return total

    def _piece_loss(self, piece: _Piece) -> Tensor:
        """Return the loss of a piece, summed over its learnt tokens."""
        logits = self.student.logits(self.student.hidden(piece.tokens, piece.places))
        share = self.recipe.teacher_share
        loss = functional.cross_entropy(logits, piece.targets, reduction="sum") * (1.0 - share)
        if self.teacher is None or not share:
            return loss
        with torch.no_grad():
            taught = self.teacher.logits(self.teacher.hidden(piece.tokens, piece.places))
        # Vocabularies may differ by unused tokens at their end.
        size = min(logits.shape[-1], taught.shape[-1])
        divergence = functional.kl_div(
            logits[:, :size].log_softmax(-1), taught[:, :size].log_softmax(-1), reduction="sum", log_target=True
        )
        return loss + share * divergence

    @torch.no_grad()
    def _update(self, rate: float) -> None:
        """One step of AdamW, with the gradient's norm bounded."""
        step = self.state.step + 1
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in self.student.trained.items()
        }
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        shrink = min(1.0, self.recipe.clip / max(norm, 1e-12))
        for name, value in self.student.trained.items():
            gradient = gradients[name] * shrink
            mean = self._mean[name].lerp_(gradient, 1 - BETAS[0])
            square = self._square[name].lerp_(gradient.square(), 1 - BETAS[1])
            if self.recipe.decay and value.dim() == 2:
                value.mul_(1 - rate * self.recipe.decay)
            spread = (square / (1 - BETAS[1] ** step)).sqrt_().add_(EPS)
            value.addcdiv_(mean / (1 - BETAS[0] ** step), spread, value=-rate)
            value.grad = None

    def _evaluate(self) -> None:
        self.student.forget_rounding()
        held_out = self.loss(self._held_out)
        state = self.state
        trained = state.loss_sum / state.loss_steps if state.loss_steps else held_out
        better = held_out < state.best_loss
        waited = 0 if better else state.waited + 1
        if better:
            self._best = {name: value.detach().clone() for name, value in self.student.trained.items()}
        patience = self.recipe.patience
        self.state = replace(
            state,
            best_step=state.step if better else state.best_step,
            best_loss=held_out if better else state.best_loss,
            waited=waited,
            loss_sum=0.0,
            loss_steps=0,
            evaluations=[*state.evaluations, Evaluation(state.step, trained, held_out)],
            ended=state.step >= self.steps or bool(patience and waited >= patience),
        )

    def _save(self) -> None:
        groups = {
            "trained": self.student.trained, "best": self._best, "mean": self._mean, "square": self._square
        }  # fmt: skip
        self._checkpoints.save(self.state, groups)

    def _restore(self) -> int:
        """Continue from the checkpoint; return the steps that were done."""
        found = self._checkpoints.load()
        if found is None:
            return 0
        self.state, groups = found
        with torch.no_grad():
            for name, value in self.student.trained.items():
                value.copy_(groups["trained"][name])
        self._best, self._mean, self._square = groups["best"], groups["mean"], groups["square"]
        return self.state.step


def _piece(rows: Sequence[TrainingRow]) -> _Piece:
    length = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    learnt = np.zeros((len(rows), length), dtype=np.bool_)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        learnt[index, row.first : len(row.tokens)] = True
    places = np.flatnonzero(learnt)
    return _Piece(torch.from_numpy(tokens), torch.from_numpy(places - 1), torch.from_numpy(tokens.reshape(-1)[places]))
