"""The training loop: batches in, weights out, a checkpoint every few minutes, resuming from a checkpoint.

Does not know the tasks beyond their names. The caller passes a milestone function that measures the model.
"""

# What torch says of its own types is not whole.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headrace._core as _core
from training.decoder import Decoder
from training.files import Checkpoint, read_checkpoint, write_checkpoint
from training.optimiser import Kind, Optimiser, Rates, share_of_rate
from training.rows import Piece, Place, Stream
from training.shape import Shape

CLIP = 1.0  # most that the norm of all gradients together may be


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run's weights besides the corpus. A checkpoint resumes only with equal settings."""

    shape: Shape
    tokens: int  # budget, without padding
    seed: int = 0
    step_tokens: int = 4096  # of a step, with padding
    optimiser: Kind = "muon"
    rates: Rates | None = None  # the optimiser's own by default
    half: bool = True  # products in bf16; else in f32, which is faster where the processor has no bf16 products
    compiled: bool = False  # by torch.compile: a third faster, after a minute or two of compiling
    begun: str | None = None  # digest of the weights that the run starts from, where they are not random

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Pace:
    """When a run prints, saves and calls its milestone. Does not affect the weights."""

    print_steps: int = 20
    save_seconds: float = 180.0
    milestones: int = 5  # in equal parts of the budget, the end apart
    stop_after: int | None = None  # steps, for tests: leave without a checkpoint, as a killed run does


Milestone = Callable[[Decoder, float], None]  # the model, and the part of the budget that is spent


class SettingsChangedError(Exception):
    """The folder holds a checkpoint with other settings."""


def train(
    settings: Settings,
    stream: Stream,
    folder: Path,
    *,
    teacher: Decoder | None = None,
    start: Decoder | None = None,
    device: str = "cpu",
    pace: Pace = Pace(),
    milestone: Milestone | None = None,
) -> Decoder:
    """Train to the end of the budget, from the folder's checkpoint, `start`'s weights or random weights."""
    model = Decoder(settings.shape, seed=settings.seed)
    if start is not None:
        model.load_state_dict(start.state_dict())
    model = model.to(device)
    if teacher is not None:
        teacher = teacher.to(device).eval()
    passes = Passes(
        scored=scored_by(model, settings),
        wanted=None if teacher is None else wanted_by(teacher, settings),
        precision=lambda: precision_of(device, settings),
    )
    optimiser = Optimiser(model, settings.optimiser, settings.rates, half=settings.half)
    place, spent = Place(), 0
    found = read_checkpoint(folder)
    if found is not None:
        if found.settings != settings.as_json():
            raise SettingsChangedError(
                f"{folder} holds a checkpoint of other settings: go on with those, name another folder, or remove it\n"
                f"  there: {found.settings}\n  asked: {settings.as_json()}"
            )
        model.load_state_dict(found.weights)
        optimiser.restore(found.state, found.progress["steps"])
        place, spent = Place(**found.progress["place"]), int(found.progress["spent"])
        print(f"going on after {optimiser.steps} steps, {spent:,} of {settings.tokens:,} tokens", flush=True)

    def save() -> None:
        progress = {"steps": optimiser.steps, "spent": spent, "place": asdict(place)}
        weights = dict(model.named_parameters())
        write_checkpoint(folder, Checkpoint(settings.as_json(), progress, weights, optimiser.state))

    folder.mkdir(parents=True, exist_ok=True)
    report = Report(stream.names, folder / "log.jsonl", device)
    saved = time.monotonic()
    batches = stream.batches(place)
    while spent < settings.tokens:
        after, pieces = next(batches)
        before = spent
        gradients(passes, pieces, device, report)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        share = share_of_rate(spent / settings.tokens)
        optimiser.step(share)
        place, spent = after, spent + sum(piece.size for piece in pieces)
        report.stepped(sum(piece.size for piece in pieces), norm)
        if optimiser.steps % pace.print_steps == 0 or spent >= settings.tokens:
            report.write(optimiser.steps, spent, settings.tokens, share)
        if pace.stop_after is not None and optimiser.steps >= pace.stop_after:
            return model
        due = spent * pace.milestones // settings.tokens > before * pace.milestones // settings.tokens
        if due or spent >= settings.tokens or time.monotonic() - saved > pace.save_seconds:
            save()
            saved = time.monotonic()
        if due and milestone is not None and spent < settings.tokens:
            began = time.monotonic()
            milestone(model, spent / settings.tokens)
            report.started += time.monotonic() - began  # the pace is that of training alone
    return model


Wanted = Callable[[Tensor, Tensor], Tensor]  # tokens [rows, length] and places in them to log-probabilities there
Scored = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Passes:
    """Options of a training step."""

    scored: Scored  # tokens, places, targets, what is wanted: losses to learn from, to report, and what was right
    wanted: Wanted | None  # by the teacher
    precision: Callable[[], AbstractContextManager[Any]]


def wanted_by(teacher: Decoder, settings: Settings) -> Wanted:
    def wanted(tokens: Tensor, places: Tensor) -> Tensor:
        return teacher.logits(teacher(tokens, places)).log_softmax(-1)

    return torch.compile(wanted, dynamic=True) if settings.compiled else wanted


def scored_by(model: Decoder, settings: Settings) -> Scored:
    """Includes the loss in the compiled graph, so that the logits are read once instead of five times."""

    def scored(tokens: Tensor, places: Tensor, targets: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        found = model.logits(model(tokens, places)).log_softmax(-1)
        chances = found.gather(-1, targets[:, None])[:, 0]
        losses = -chances if wanted is None else (wanted.exp() * (wanted - found)).sum(-1)
        return losses, -chances.detach(), chances.detach() >= found.detach().amax(-1)

    return torch.compile(scored, dynamic=True) if settings.compiled else scored


def gradients(passes: Passes, pieces: Sequence[Piece], device: str, report: Report) -> None:
    """Accumulate the gradients of the mean loss over all weighted tokens of a step."""
    total = float(sum(piece.weights.sum() for piece in pieces))
    for piece in pieces:
        tokens, places, targets, weights = (
            torch.from_numpy(values).to(device) for values in (piece.tokens, piece.places, piece.targets, piece.weights)
        )
        with passes.precision():
            wanted = None
            if passes.wanted is not None:
                with torch.no_grad():
                    wanted = passes.wanted(tokens, places)
            losses, said, right = passes.scored(tokens, places, targets, wanted)
        report.add(said, right, piece.tasks)
        torch.autograd.backward((losses * weights).sum() / total)


def precision_of(device: str, settings: Settings) -> AbstractContextManager[Any]:
    return torch.autocast(torch.device(device).type, torch.bfloat16) if settings.half else nullcontext()


def fast_half(device: str) -> bool:
    """Return whether bf16 products are faster on this device."""
    return torch.device(device).type != "cpu" or not {"amx", "avx512bf16"}.isdisjoint(_core.isa_available())


class Report:
    """Means over answer tokens since the last log line."""

    def __init__(self, names: Sequence[str], log: Path, device: str) -> None:
        self.names = names
        self.log = log
        self.started = time.monotonic()
        self.tokens = 0
        self.norm = 0.0
        self.steps = 0
        self.sums = torch.zeros(3, len(names) + 1, dtype=torch.float64, device=device)  # loss, right, tokens

    def add(self, losses: Tensor, right: Tensor, tasks: Any) -> None:
        index = torch.from_numpy(tasks).to(losses.device)
        index = torch.where(index < 0, len(self.names), index)  # the last column is the prompts'
        for row, values in enumerate((losses, right, torch.ones_like(losses))):
            self.sums[row].index_add_(0, index, values.double())

    def stepped(self, tokens: int, norm: Tensor) -> None:
        self.tokens += tokens
        self.norm += float(norm)
        self.steps += 1

    def write(self, step: int, spent: int, budget: int, share: float) -> None:
        loss, right, count = self.sums.cpu().clone()
        seconds = time.monotonic() - self.started
        answers = slice(0, len(self.names))
        tasks = {
            name: {"loss": round(float(loss[i] / count[i]), 4), "right": round(float(right[i] / count[i]), 4)}
            for i, name in enumerate(self.names)
            if count[i]
        }
        line = {
            "step": step,
            "tokens": spent,
            "rate": round(share, 4),
            "loss": round(float(loss[answers].sum() / count[answers].sum().clamp(min=1)), 4),
            "prompt_loss": round(float(loss[-1] / count[-1].clamp(min=1)), 4),
            "tasks": tasks,
            "norm": round(self.norm / max(self.steps, 1), 3),
            "tokens_per_second": round(self.tokens / seconds),
        }
        left = (budget - spent) / max(self.tokens / seconds, 1)
        each = " ".join(f"{name} {value['loss']:.3f}" for name, value in tasks.items())
        print(
            f"step {step} {spent / budget:6.1%} loss {line['loss']:.3f} prompt {line['prompt_loss']:.3f} | {each} | "
            f"norm {line['norm']:.2f} {line['tokens_per_second']:,} tokens/s, {left / 60:.0f} min left",
            flush=True,
        )
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.sums.zero_()
        self.tokens, self.norm, self.steps, self.started = 0, 0.0, 0, time.monotonic()
