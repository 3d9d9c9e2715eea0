"""Keeps the training of draft heads on disk, so that a command that was killed continues where it was.

A folder holds what the run is of, the model's answers with their hidden states, and a checkpoint. States are read from
their file as they are learnt, so memory does not grow with the number of answers. Trains nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.adapt.head_examples import HeadExample
from headrace.adapt.head_recipe import HeadRecipe
from headrace.errors import RequestError
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors

Floats = NDArray[np.float32]
Groups = dict[str, dict[str, Floats]]  # "trained", "mean" and "square", by name

_JOB: Final = "job.json"
_CHECKPOINT: Final = "heads.checkpoint"


class HeadJob(msgspec.Struct, frozen=True):
    """What a run is of. Another job does not continue it."""

    model: str  # digest of the model's files
    kind: str
    recipe: HeadRecipe
    weights: str
    vocabulary: int
    answer_tokens: int
    prompts: str  # digest of the prompts to learn from and of those held out


class HeadRun:
    def __init__(self, path: Path, state_size: int) -> None:
        self.path = path
        self.train = AnswerFile(path, "train", state_size)
        self.held_out = AnswerFile(path, "held_out", state_size)

    @classmethod
    def open(cls, path: Path, job: HeadJob, state_size: int, *, restart: bool) -> HeadRun:
        """Use a folder for a job. RequestError if it holds another job's work."""
        if restart:
            shutil.rmtree(path, ignore_errors=True)
        content = msgspec.json.encode(job)
        if path.exists():
            if not (path / _JOB).is_file() or (path / _JOB).read_bytes() != content:
                raise RequestError(
                    f"{path} has unfinished work of another run. Choose another name, repeat that command to continue "
                    "it, or pass --restart to begin again.",
                    parameter="out",
                )
        else:
            path.mkdir(parents=True)
            with new_file(path / _JOB) as file:
                file.write(content)
        return cls(path, state_size)

    @property
    def has_work(self) -> bool:
        return self.train.prompts > 0

    def load(self) -> tuple[int, Groups] | None:
        """Return the steps that were done and what they gave; None before the first checkpoint."""
        if not (self.path / _CHECKPOINT).is_file():
            return None
        file = SafetensorsFile.open(self.path / _CHECKPOINT)
        groups: Groups = {}
        for name in file.tensors:
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = file.dense(name).to_f32().copy()
        return int(file.metadata["step"]), groups

    def save(self, step: int, groups: Mapping[str, Mapping[str, Floats]]) -> None:
        entries: dict[str, Any] = {
            f"{group}.{name}": ("F32", value.shape, lambda value=value: [np.ascontiguousarray(value)])
            for group, values in groups.items()
            for name, value in values.items()
        }
        write_safetensors(self.path / _CHECKPOINT, entries, {"step": str(step)})

    def clear(self) -> None:
        """Leave nothing but what a finished run wrote."""
        self.train.remove()
        self.held_out.remove()
        for name in (_JOB, _CHECKPOINT):
            (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class _Line(msgspec.Struct, omit_defaults=True):
    """An answer's tokens, or how many prompts are answered with the lines before."""

    tokens: list[int] = []
    prompt: int = 0  # of the tokens, that are of the prompt
    prompts: int = 0


class AnswerFile:
    """The model's answers to some prompts, in batches that are complete or do not count."""

    def __init__(self, folder: Path, name: str, state_size: int) -> None:
        self._texts, self._states = folder / f"{name}.jsonl", folder / f"{name}.states"
        self._size = state_size
        self._answers: list[_Line] = []
        self.prompts = 0  # that are answered
        size = 0
        if self._texts.is_file():
            size = self._read(self._texts.read_bytes())
            os.truncate(self._texts, size)
            os.truncate(self._states, 4 * state_size * self.tokens)

    @property
    def tokens(self) -> int:
        """Those of prompts that are kept are among them."""
        return sum(len(each.tokens) for each in self._answers)

    def add(self, answers: Sequence[HeadExample], prompts: int) -> None:
        """Keep the answers to the next `prompts` prompts, of which some may have none."""
        with self._states.open("ab") as file:
            for answer in answers:
                file.write(np.ascontiguousarray(answer.states, dtype=np.float32).data)
        found = [_Line(tokens=answer.tokens.tolist(), prompt=answer.prompt) for answer in answers]
        with self._texts.open("ab") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in found)
            file.write(msgspec.json.encode(_Line(prompts=prompts)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._answers += found
        self.prompts += prompts

    def examples(self, least: int) -> list[HeadExample]:
        """Return the answers of at least so many tokens, in an order that does not depend on which ended first."""
        if not self.tokens:
            return []
        states = np.memmap(self._states, dtype=np.float32, mode="r", shape=(self.tokens, self._size))
        found: list[HeadExample] = []
        start = 0
        for line in self._answers:
            end = start + len(line.tokens)
            if len(line.tokens) - line.prompt >= least:
                found.append(HeadExample(np.array(line.tokens), states[start:end], line.prompt))
            start = end
        return sorted(found, key=lambda each: each.tokens.tolist())

    def remove(self) -> None:
        self._texts.unlink(missing_ok=True)
        self._states.unlink(missing_ok=True)

    def _read(self, content: bytes) -> int:
        """Read the complete batches. Return their length in bytes."""
        whole = place = 0
        batch: list[_Line] = []
        for line in content.splitlines(keepends=True):
            place += len(line)
            if not line.endswith(b"\n"):
                break
            found = msgspec.json.decode(line, type=_Line)
            if found.prompts:
                self._answers += batch
                self.prompts += found.prompts
                batch, whole = [], place
            else:
                batch.append(found)
        return whole
