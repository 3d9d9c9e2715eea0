"""Keeps a training run on disk, so that a run that was killed continues with the same numbers.

One safetensors file holds what is trained, the best of it so far, the optimiser's state and, in its metadata, where the
run is. It appears complete or not at all.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from headrace.adapt.recipe import AdaptRecipe
from headrace.errors import RequestError
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors

SUFFIX: Final = ".partial"
_FILE: Final = "checkpoint.safetensors"


class Evaluation(msgspec.Struct, frozen=True):
    step: int
    train_loss: float  # mean since the evaluation before, in nats per learnt token
    held_out_loss: float


class TrainingJob(msgspec.Struct, frozen=True):
    """What a checkpoint is of. Another job does not continue it."""

    model: str  # digest of the model's files
    recipe: AdaptRecipe
    rows: str  # digest of the rows to train on
    held_out: str
    teacher: str = ""


class TrainingState(msgspec.Struct, frozen=True):
    job: TrainingJob
    step: int = 0  # steps done
    best_step: int = 0
    best_loss: float = float("inf")
    waited: int = 0  # evaluations since the best one
    loss_sum: float = 0.0  # since the last evaluation
    loss_steps: int = 0
    evaluations: list[Evaluation] = []
    ended: bool = False


Groups = Mapping[str, Mapping[str, Tensor]]  # "trained", "best", "mean" and "square"


class CheckpointFolder:
    def __init__(self, path: Path, job: TrainingJob) -> None:
        self.path = path
        self.job = job

    @classmethod
    def open(cls, path: Path, job: TrainingJob, *, restart: bool = False) -> CheckpointFolder:
        """Use a folder for a job. RequestError if it holds another job's work."""
        if restart and path.exists():
            shutil.rmtree(path)
        folder = cls(path, job)
        state = folder._read_state()
        if state is not None and state.job != job:
            raise RequestError(
                f"{path} holds a run with other options, another model or other examples. Repeat the command that made "
                "it to continue, or pass --restart to begin again.",
                parameter="out",
            )
        path.mkdir(parents=True, exist_ok=True)
        for left in path.glob(f".{_FILE}.*.part"):
            left.unlink()  # by a run that was killed while it wrote
        return folder

    def save(self, state: TrainingState, groups: Groups) -> None:
        tensors = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
        write_safetensors(
            self.path / _FILE,
            {
                name: ("F32", tuple(value.shape), lambda value=value: [value.detach().contiguous().numpy()])
                for name, value in tensors.items()
            },
            {"state": _encode(state)},
        )

    def load(self) -> tuple[TrainingState, dict[str, dict[str, Tensor]]] | None:
        """Return the saved state and its tensors by group; None if there is none."""
        state = self._read_state()
        if state is None:
            return None
        file = SafetensorsFile.open(self.path / _FILE)
        groups: dict[str, dict[str, Tensor]] = {}
        for name in file.tensors:
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = torch.from_numpy(file.dense(name).to_f32().copy())
        return state, groups

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _read_state(self) -> TrainingState | None:
        path = self.path / _FILE
        if not path.exists():
            return None
        return _decode(SafetensorsFile.open(path).metadata["state"])


def _encode(state: TrainingState) -> str:
    # JSON has no infinity, which is the best loss before the first evaluation.
    return msgspec.json.encode(msgspec.to_builtins(state) | {"best_loss": _finite(state.best_loss)}).decode()


def _finite(loss: float) -> float | None:
    return loss if loss < float("inf") else None


def _decode(text: str) -> TrainingState:
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if bytes(fields["best_loss"]) == b"null":
        del fields["best_loss"]
    return msgspec.json.decode(msgspec.json.encode(fields), type=TrainingState)
