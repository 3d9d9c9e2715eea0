"""Updates weights: Muon for the matrices of the layers and AdamW for the embedding and the norms, or AdamW for all.

Also has the learning rate schedule and the state that a resumed run needs. Does not know data or the loss.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn

Kind = Literal["muon", "adamw"]

# Coefficients of the quintic that pushes all singular values towards 1 (Keller Jordan, "Muon", 2024).
QUINTIC: Final = (3.4445, -4.7750, 2.0315)
QUINTIC_STEPS: Final = 5
# Orthogonalising a whole matrix of 384 rows costs six times as much as three blocks of 128 rows, and would be a quarter
# of all products of a training step. Mostly blocks, with the whole matrix now and then, learn as well (Khaled et al.,
# "MuonBP", 2025). The size of an update is the same.
BLOCK: Final = 128  # rows of the wide form of a matrix
WHOLE_EVERY: Final = 5  # steps
MOMENTUM: Final = 0.95
BETAS: Final = (0.9, 0.95)
EPS: Final = 1e-8


@dataclass(frozen=True)
class Rates:
    """Peak learning rates."""

    matrices: float
    others: float  # embedding and norms
    decay: float  # of the matrices; each step takes this times the rate off a weight

    def scaled(self, share: float) -> Rates:
        return Rates(self.matrices * share, self.others * share, self.decay)


RATES: Final[dict[Kind, Rates]] = {
    "muon": Rates(matrices=0.02, others=0.01, decay=0.05),
    "adamw": Rates(matrices=0.002, others=0.004, decay=0.1),
}


def share_of_rate(done: float, *, warm_up: float = 0.02) -> float:
    """Return the share of the peak rate after `done` of the token budget: a linear warm-up, then down to zero."""
    if done < warm_up:
        return max(done, 0.0) / warm_up + 1e-3  # never quite nothing, or the first step would be lost
    return max(0.0, (1.0 - done) / (1.0 - warm_up))


def orthogonal(matrices: Tensor, *, half: bool = True, block: int | None = None) -> Tensor:
    """Push the singular values of each of [count, rows, columns] to about 1 by Newton-Schulz, in bf16 if `half`.

    With `block`, so many rows of each at a time, or columns where there are fewer of these.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    shape = x.shape
    if block is not None and shape[1] % block == 0:
        x = x.reshape(-1, block, shape[2])
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = newton_schulz(x.bfloat16()).float() if half else newton_schulz_by_squares(x)
    x = x.view(shape)
    return x if wide else x.mT


def newton_schulz(x: Tensor) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(QUINTIC_STEPS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_by_squares(x: Tensor) -> Tensor:
    """Evaluate the same polynomial from the small square x x': a third fewer products, but too coarse in bf16."""
    a, b, c = QUINTIC
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    square = torch.bmm(x, x.mT)
    whole = one.expand_as(square)
    for step in range(QUINTIC_STEPS):
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c) + a * one
        whole = torch.bmm(factor, whole) if step else factor
        if step + 1 < QUINTIC_STEPS:
            square = torch.bmm(factor, torch.bmm(factor, square))
    return torch.bmm(whole, x)


class Optimiser:
    """Keeps its state as a flat dictionary of tensors, which a checkpoint stores unchanged."""

    def __init__(self, model: nn.Module, kind: Kind, rates: Rates | None = None, *, half: bool = True) -> None:
        self.rates = rates or RATES[kind]
        self.half = half
        named = dict(model.named_parameters())
        matrices = {name: weight for name, weight in named.items() if weight.dim() == 2 and "embed" not in name}
        self.muon = matrices if kind == "muon" else {}
        self.adam = {name: weight for name, weight in named.items() if name not in self.muon}
        self.decayed = frozenset(matrices)
        self.steps = 0
        self.state = {f"momentum.{name}": torch.zeros_like(weight) for name, weight in self.muon.items()}
        for name, weight in self.adam.items():
            self.state[f"mean.{name}"] = torch.zeros_like(weight)
            self.state[f"square.{name}"] = torch.zeros_like(weight)
        # Matrices of one shape are made orthogonal together.
        self.alike: dict[tuple[int, ...], list[str]] = {}
        for name, weight in self.muon.items():
            self.alike.setdefault(tuple(weight.shape), []).append(name)

    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        if state.keys() != self.state.keys():
            raise ValueError("the checkpoint is of another optimiser or of another shape")
        for name, value in state.items():
            self.state[name].copy_(value)
        self.steps = steps

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Update the weights at `share` of the peak rates, and clear the gradients."""
        self.steps += 1
        for shape, names in self.alike.items():
            self._step_muon(shape, names, self.rates.matrices * share)
        for name, weight in self.adam.items():
            self._step_adam(name, weight, share)
        for weight in (*self.muon.values(), *self.adam.values()):
            weight.grad = None

    def _step_muon(self, shape: tuple[int, ...], names: Sequence[str], rate: float) -> None:
        updates: list[Tensor] = []
        for name in names:
            gradient = gradient_of(self.muon[name])
            momentum = self.state[f"momentum.{name}"].lerp_(gradient, 1 - MOMENTUM)
            updates.append(gradient.lerp(momentum, MOMENTUM))  # Nesterov's
        # A tall matrix moves each of its outputs as far as a square one would.
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        block = None if self.steps % WHOLE_EVERY == 1 else BLOCK
        for name, update in zip(names, orthogonal(torch.stack(updates), half=self.half, block=block), strict=True):
            self.muon[name].mul_(1 - rate * self.rates.decay).add_(update, alpha=-rate * scale)

    def _step_adam(self, name: str, weight: Tensor, share: float) -> None:
        rate = share * (self.rates.matrices if name in self.decayed else self.rates.others)
        gradient = gradient_of(weight)
        mean = self.state[f"mean.{name}"].lerp_(gradient, 1 - BETAS[0])
        square = self.state[f"square.{name}"].lerp_(gradient.square(), 1 - BETAS[1])
        if name in self.decayed:
            weight.mul_(1 - rate * self.rates.decay)
        spread = (square / (1 - BETAS[1] ** self.steps)).sqrt_().add_(EPS)
        weight.addcdiv_(mean / (1 - BETAS[0] ** self.steps), spread, value=-rate)


def gradient_of(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
