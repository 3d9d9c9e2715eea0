"""Trains draft heads on answers that their model wrote, and measures how many drafts the model would accept.

The same examples, settings and threads give the same heads, also if a run continues another that was killed.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.adapt.head_examples import HeadExample, HeadModel, batches
from headrace.adapt.head_networks import HeadNetwork
from headrace.adapt.head_recipe import HeadRecipe
from headrace.adapt.head_run import HeadRun
from headrace.adapt.recipe import AdaptRecipe
from headrace.errors import RequestError

_BETAS: Final = (0.9, 0.95)
_FURTHER: Final = 0.8  # weight of each draft's loss against the draft before
_STATE_SHARE: Final = 0.5  # weight of the error of predicted states
_NOWHERE: Final = -1


class HeadAcceptance(NamedTuple):
    """How drafts fare on answers that were not trained on."""

    by_draft: list[float]  # probability that a draft is accepted if those before it were
    tokens: float  # accepted drafts and the token after them, of a step with all drafts


class _Batch(NamedTuple):
    embedded: Tensor  # [rows, length, hidden]
    states: Tensor  # [rows, length, hidden]; of an EAGLE-3 layer, those of other layers come first
    targets: Tensor  # [rows, length] the token after each, as a place in the head; -1: none, or not in the head
    texts: Tensor  # [rows, length] whether there is a token of the answer after each, which is of the answer itself

    def final_states(self, hidden: int) -> Tensor:
        return self.states[..., -hidden:]

    def drafted(self, draft: int) -> Tensor:
        """Return at which places draft `draft`, from 0, is made in an answer."""
        found = torch.zeros_like(self.texts)
        length = self.texts.shape[1]
        found[:, draft:] = self.texts[:, draft:] & self.texts[:, : max(0, length - draft)]
        return found


Watch = Callable[[int, int, float, int], None]  # step, steps, loss, tokens of the step


class HeadTraining:
    def __init__(
        self,
        network: HeadNetwork,
        model: HeadModel,
        recipe: HeadRecipe,
        *,
        learns_states: bool,
        run: HeadRun | None = None,
        watch: Watch = lambda _step, _steps, _loss, _tokens: None,
        checkpoint_s: float = 60.0,
    ) -> None:
        """`learns_states`: predicted states are drafted from, so their error counts too. `run` is where checkpoints
        are, one every `checkpoint_s`."""
        self._network = network
        self._recipe = recipe
        self._learns_states = learns_states
        self._watch = watch
        self._run = run
        self._checkpoint_s = checkpoint_s
        self.resumed = 0  # steps that another run did
        self._head = torch.from_numpy(model.head)
        self._embeddings = torch.from_numpy(model.embeddings)
        self._embedded = model.embedded
        places = np.full(int(model.embedded.max()) + 1, _NOWHERE, dtype=np.int64)
        chosen = np.arange(len(model.head)) if model.tokens is None else model.tokens
        within = chosen[chosen < len(places)]
        places[within] = np.arange(len(within))  # both ascend
        self._places = places

    def run(self, examples: Sequence[HeadExample]) -> None:
        recipe = self._recipe
        values = list(self._network.trained.values())
        optimiser = torch.optim.AdamW(values, lr=recipe.rate, betas=_BETAS, weight_decay=0.0)
        steps = recipe.epochs * -(-len(examples) // recipe.batch)
        schedule = AdaptRecipe()  # the same rise and fall of the rate
        self.resumed = self._restore(optimiser)
        step = 0
        saved_at = time.monotonic()
        for epoch in range(recipe.epochs):
            for rows in batches(examples, recipe.batch, recipe.seed, epoch):
                if step < self.resumed:
                    step += 1
                    continue
                for group in optimiser.param_groups:
                    group["lr"] = recipe.rate * schedule.share_of_rate(step, steps)
                loss = self._loss(self._batch(rows))
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(values, 1.0)
                optimiser.step()
                step += 1
                if self._run is not None and (step == steps or time.monotonic() - saved_at >= self._checkpoint_s):
                    self._save(self._run, step, optimiser)
                    saved_at = time.monotonic()
                self._watch(step, steps, float(loss.detach()), sum(len(row.answer) for row in rows))

    @property
    def _own_head(self) -> Tensor:
        own = self._network.own_head
        return self._head if own is None else own

    def _save(self, run: HeadRun, step: int, optimiser: torch.optim.Optimizer) -> None:
        trained = self._network.trained
        run.save(
            step,
            {
                "trained": {name: value.detach().numpy() for name, value in trained.items()},
                "mean": {name: optimiser.state[value]["exp_avg"].numpy() for name, value in trained.items()},
                "square": {name: optimiser.state[value]["exp_avg_sq"].numpy() for name, value in trained.items()},
            },
        )

    @torch.no_grad()
    def _restore(self, optimiser: torch.optim.Optimizer) -> int:
        """Continue from the checkpoint. Return the steps that were done."""
        found = None if self._run is None else self._run.load()
        if found is None:
            return 0
        step, groups = found
        for name, value in self._network.trained.items():
            value.copy_(torch.from_numpy(groups["trained"][name]))
            optimiser.state[value] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.from_numpy(groups["mean"][name]),
                "exp_avg_sq": torch.from_numpy(groups["square"][name]),
            }
        return step

    @torch.no_grad()
    def acceptance(self, examples: Sequence[HeadExample], depth: int) -> HeadAcceptance:
        """Return how many of `depth` drafts the model would accept, greedily."""
        held = np.zeros(depth)
        tried = np.zeros(depth)
        roots = 0
        for rows in batches(examples, self._recipe.batch, 0, 0):
            batch = self._batch(rows)
            found = self._network.predict(batch.embedded, batch.states, depth)
            alive = batch.texts.clone()
            for draft, states in enumerate(found):
                # Draft d of the place p is predicted at p + d.
                right = ((states @ self._own_head.T).argmax(-1) == batch.targets)[:, draft:]
                texts = batch.texts[:, draft:]
                alive = alive[:, : right.shape[1]] & texts
                tried[draft] += int(alive.sum())
                alive = alive & right
                held[draft] += int(alive.sum())
                roots += int(texts.sum()) if draft == 0 else 0
        if not roots:
            raise RequestError("The held-out answers are too short to measure drafts on.", parameter="held-out")
        return HeadAcceptance(
            [float(a / b) if b else 0.0 for a, b in zip(held, tried, strict=True)], 1 + held.sum() / roots
        )

    def _loss(self, batch: _Batch) -> Tensor:
        with torch.no_grad():
            # What the model itself would say at each place about the token after.
            ahead = torch.roll(batch.final_states(self._head.shape[1]), -1, dims=1)
            taught = (ahead @ self._head.T).softmax(-1)
            scale = ahead.square().mean()
        total = torch.zeros(())
        weights = 0.0
        for draft, states in enumerate(self._network.predict(batch.embedded, batch.states, self._recipe.depth)):
            learnt = batch.drafted(draft)
            if not learnt.any():
                break  # the answers are shorter than the drafts
            logits = states[learnt] @ self._own_head.T
            loss = -(taught[learnt] * logits.log_softmax(-1)).sum(-1).mean()
            if self._learns_states:
                loss = loss + _STATE_SHARE * (states[learnt] - ahead[learnt]).square().mean() / scale
            weight = _FURTHER**draft
            total = total + weight * loss
            weights += weight
        return total / weights

    def _batch(self, rows: Sequence[HeadExample]) -> _Batch:
        length = max(len(row.tokens) for row in rows)
        tokens = np.zeros((len(rows), length), dtype=np.int64)
        targets = np.full((len(rows), length), _NOWHERE, dtype=np.int64)
        texts = np.zeros((len(rows), length), dtype=np.bool_)
        states = np.zeros((len(rows), length, rows[0].states.shape[1]), dtype=np.float32)
        for place, row in enumerate(rows):
            count = len(row.tokens)
            tokens[place, :count] = np.searchsorted(self._embedded, row.tokens)
            targets[place, : count - 1] = self._places[row.tokens[1:]]
            texts[place, row.prompt : count - 1] = True
            states[place, :count] = row.states
        embedded = self._embeddings[torch.from_numpy(tokens)]
        return _Batch(embedded, torch.from_numpy(states), torch.from_numpy(targets), torch.from_numpy(texts))
