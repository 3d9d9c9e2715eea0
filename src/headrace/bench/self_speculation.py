"""Chooses which layers a model may leave out when it drafts for itself, from its own answers to prompts.

A drafter is worth the share of tokens that it chooses like the whole model, against the weights that a step of it
reads. Layers are left out one after the other, the one whose absence changes the fewest choices first. Agreement is
measured on texts that the model wrote; the speed is a prediction that the caller has to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.executor import Executor
from headrace.engine.executors.runner import greedy, logits
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder
from headrace.models.spec import ModelSpec

_ROW_SHARE: Final = 0.08  # of a step's time that a further row costs, in predictions
_MOST_DRAFTS: Final = 8
_LEAST_AGREEMENT: Final = 0.25  # below which no further layer is left out


class SelfDraft(msgspec.Struct, frozen=True):
    """A way to draft, and what it is expected to gain."""

    skip_layers: tuple[int, ...]
    weights: str | None  # precision of the draft; None: the model's
    agreement: float  # share of tokens that are chosen like by the whole model
    cost: float  # of a draft, as a share of a step
    speedup: float  # predicted, with the best number of drafts

    @property
    def options(self) -> dict[str, object]:
        """The variant's options that draft this way."""
        found: dict[str, object] = {"speculation": "self"}
        if self.skip_layers:
            found["skip_layers"] = list(self.skip_layers)
        if self.weights is not None:
            found["draft_weights"] = self.weights
        return found


def predicted_speedup(agreement: float, cost: float) -> float:
    """Return the tokens per second with drafts over those without, with the best number of drafts; at least 1."""
    best, tokens = 1.0, 1.0
    for drafts in range(1, _MOST_DRAFTS + 1):
        tokens += agreement**drafts
        best = max(best, tokens / (1.0 + drafts * (cost + _ROW_SHARE)))
    return best


def check_takes_drafts(spec: ModelSpec, name: str) -> None:
    """Raise RequestError for a model that has no use for drafts."""
    if spec.kind != "decoder":
        raise RequestError(f"'{name}' generates no text. Pass a model that does.", parameter="model")


def can_draft_for_itself(spec: ModelSpec) -> bool:
    """Return whether layers of a model can be left out to draft with it. A drafter keeps KV alone, no recurrent
    states."""
    return not spec.state_floats


class Calibration:
    """Texts that a model wrote, and the token that it chose at each place."""

    def __init__(self, executor: Executor, prompts: Sequence[Sequence[int]], answer: int) -> None:
        self._starts = [len(prompt) - 1 for prompt in prompts]
        answers = greedy(executor, prompts, answer)
        self._texts = [[*prompt, *found[:-1]] for prompt, found in zip(prompts, answers, strict=True)]
        self._chosen = [np.array(found) for found in answers]

    def agreement(self, executor: Executor) -> float:
        """Return the share of the answers' tokens that another executor would choose too."""
        same = total = 0
        for text, start, chosen in zip(self._texts, self._starts, self._chosen, strict=True):
            (rows,) = logits(executor, [text])
            same += int((rows[start:].argmax(axis=1) == chosen).sum())
            total += len(chosen)
        return same / total


def choose_drafts(
    executor: CpuExecutor,
    folder: ModelFolder,
    prompts: Sequence[Sequence[int]],
    *,
    answer: int = 32,
    precisions: Sequence[str | None] = (None,),
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[SelfDraft]:
    """Return the ways to draft that were tried, the best prediction first."""
    calibration = Calibration(executor, prompts, answer)
    found: list[SelfDraft] = []

    def tried(skipped: tuple[int, ...], weights: str | None) -> SelfDraft:
        if progress is not None:
            progress(f"layers {list(skipped) or 'all'}, {weights or 'the same precision'}")
        draft = executor.drafting(folder, skipped, weights=weights, cache=cache)
        try:
            agreement = calibration.agreement(draft)
            cost = draft.work.bytes_read(0) / executor.work.bytes_read(0)
        finally:
            draft.close()
        return SelfDraft(skipped, weights, agreement, cost, predicted_speedup(agreement, cost))

    order = sorted(range(len(executor.spec.layers)), key=lambda layer: -tried((layer,), None).agreement)
    for weights in precisions:
        if weights is not None:
            found.append(tried((), weights))
        for count in range(1, len(order)):
            draft = tried(tuple(sorted(order[:count])), weights)
            if draft.agreement < _LEAST_AGREEMENT:
                break
            found.append(draft)
    return sorted(found, key=lambda draft: -draft.speedup)
