"""What is trained, and how: AdaptRecipe. Checks values. Does not import torch, so that mistakes are found at once."""

from __future__ import annotations

import importlib.util
import os
from typing import Final, Literal

import msgspec

from headrace.errors import HeadraceError, RequestError

BaseFormat = Literal["f32", "int8", "int4", "int3", "int2"]
RoundedFormat = Literal["none", "int8", "int4", "int3", "int2"]

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
FEED_FORWARD: Final = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc", "c_proj")
MOST_RANK: Final = 512


class AdaptRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the result, beside the model, the examples and the number of threads."""

    full: bool = False  # train every weight, not an adapter
    rank: int = 16
    alpha: float = 32.0  # the adapter's product is scaled by alpha / rank
    targets: tuple[str, ...] = ()  # last parts of module names, such as q_proj; empty: every product of the layers
    base: BaseFormat = "f32"  # precision of the frozen weights of an adapter
    rounded: RoundedFormat = "none"  # precision that training rounds the resulting weights to (QAT)
    rate: float = 1e-3  # peak learning rate
    warm_up: float = 0.05  # share of the steps with a rising rate
    decay: float = 0.0
    clip: float = 1.0  # largest norm of a step's gradient
    epochs: int = 3
    batch: int = 16  # examples of one step
    piece_tokens: int = 2048  # padded tokens that are computed at once; gradients of a step are summed over pieces
    patience: int = 2  # evaluations without a lower held-out loss after which training stops; 0: never
    evaluations: int = 2  # in each epoch
    teacher_share: float = 0.0  # of the loss that is the divergence from a teacher's predictions
    seed: int = 0

    def check(self) -> None:
        """Raise RequestError for a value that cannot be used."""
        positive = {"rank": self.rank, "epochs": self.epochs, "batch": self.batch, "evaluations": self.evaluations}
        for name, value in positive.items():
            if value < 1:
                raise RequestError(f"'{name}' must be at least 1, not {value}.", parameter=name)
        if self.rank > MOST_RANK:
            raise RequestError(f"'rank' must be at most {MOST_RANK}, not {self.rank}.", parameter="rank")
        if not 0.0 < self.rate <= 1.0:
            raise RequestError(f"'rate' must be above 0 and at most 1, not {self.rate:g}.", parameter="rate")
        if not 0.0 <= self.teacher_share <= 1.0:
            raise RequestError(
                f"'teacher_share' must be 0 to 1, not {self.teacher_share:g}.", parameter="teacher-share"
            )
        if self.patience < 0:
            raise RequestError(f"'patience' must be at least 0, not {self.patience}.", parameter="patience")
        if self.full and self.base != "f32":
            raise RequestError(
                "Only an adapter can be trained on a quantised base. Remove --base or --full.", parameter="base"
            )
        if self.rounded != "none" and self.base != "f32":
            raise RequestError(
                "--qat rounds the weights itself, so its base is not quantised. Remove --base.", parameter="qat"
            )

    def share_of_rate(self, step: int, steps: int) -> float:
        """Return the share of the peak rate at a step, counted from 0: a linear rise, then a cosine down to zero."""
        rising = max(1, round(self.warm_up * steps))
        if step < rising:
            return (step + 1) / rising
        import math

        return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

    def describe(self) -> str:
        """Return the recipe in a line."""
        if self.full:
            kind = "all weights"
        else:
            kind = f"LoRA of rank {self.rank}, alpha {self.alpha:g}"
            if self.base != "f32":
                kind += f", on a base in {self.base} (QLoRA)"
        if self.rounded != "none":
            kind += f", rounded to {self.rounded} while training (QAT)"
        if self.teacher_share:
            kind += f", {self.teacher_share:.0%} of the loss from a teacher's predictions"
        return kind


def prepare_torch() -> None:
    """Raise HeadraceError if PyTorch is not installed, and let its threads sleep while they wait for each other.

    Call it before torch is imported. By default the threads spin, which takes the cores from the thread they wait for
    when the machine is busy: a step took 15 % more processor time. OMP_WAIT_POLICY in the environment is respected.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if importlib.util.find_spec("torch") is None:
        raise HeadraceError(
            "Training needs PyTorch, which is not installed. Run: pip install 'headrace[train]'. A build of PyTorch "
            "for CPUs is enough, and is much smaller."
        )
