"""Keeps finished layers and hidden states on disk, so that a compression that was killed continues where it was.

A layer counts once the progress file names it; files that it does not name are ignored and removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headrace.compress.layer_pass import F32
from headrace.compress.recipe import Recipe, SplitPlan
from headrace.compress.stored_product import Stored
from headrace.errors import RequestError
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors

SUFFIX: Final = ".partial"
_PROGRESS: Final = "progress.json"


class ProductReport(msgspec.Struct, frozen=True):
    """What became of one product."""

    name: str  # canonical
    bits: int
    error: float = 0.0  # square error of the outputs over their square, on calibration inputs
    exponent: float = 0.0  # of the factors that were moved; 0: none


class SplitReport(msgspec.Struct, frozen=True):
    """What became of one layer, on calibration tokens that nothing was fitted to. Sizes are sums of squares."""

    layer: int
    routed_size: float  # of what the routed experts add, relative to the MLP's outputs
    kept: float  # part of that size in the experts that the router chooses
    best: float  # part in the experts that add most: a router that knows the outputs
    error: float  # of the layer's outputs, relative to what it adds to its inputs


class Job(msgspec.Struct, frozen=True):
    """What a work folder is for. Another job does not continue it."""

    model: str  # digest of the weight files' names, sizes and times
    recipe: Recipe
    tokens: str  # digest of the calibration tokens
    format: str
    split: SplitPlan | None = None  # the work gives a dense model experts, and rounds nothing


class Progress(msgspec.Struct, frozen=True):
    job: Job
    layers: int = 0  # finished
    products: list[ProductReport] = []
    splits: list[SplitReport] = []


class WorkFolder:
    def __init__(self, path: Path, progress: Progress) -> None:
        self.path = path
        self.progress = progress

    @classmethod
    def open(cls, path: Path, job: Job, *, restart: bool = False) -> WorkFolder:
        """Continue the job in a folder, or begin it. Raise RequestError if the folder has another job's work."""
        if restart and path.exists():
            shutil.rmtree(path)
        file = path / _PROGRESS
        progress = Progress(job)
        if file.exists():
            try:
                progress = msgspec.json.decode(file.read_bytes(), type=Progress)
            except (msgspec.DecodeError, ValueError):
                progress = Progress(job)
            if progress.job != job:
                raise RequestError(
                    f"{path} holds work with other options, another model or other calibration text. Repeat the "
                    "command that made it to continue, or pass --restart to begin again.",
                    parameter="out",
                )
        path.mkdir(parents=True, exist_ok=True)
        work = cls(path, progress)
        work._remove_unfinished()
        return work

    @property
    def layers(self) -> int:
        return self.progress.layers

    def hidden(self) -> F32:
        """Return the hidden states behind the last finished layer."""
        return np.load(self._hidden(self.layers))

    def finish_layer(
        self, tensors: Stored, hidden: F32 | None, products: list[ProductReport], split: SplitReport | None = None
    ) -> None:
        """Save a layer. `hidden` is None behind the last one."""
        write_safetensors(self.shard(self.layers), as_pieces(tensors))
        done = self.layers + 1
        if hidden is not None:
            with new_file(self._hidden(done)) as file:
                np.save(file, hidden)
        before = self._hidden(self.layers)
        splits = [*self.progress.splits, *([] if split is None else [split])]
        self.progress = Progress(self.progress.job, done, [*self.progress.products, *products], splits)
        with new_file(self.path / _PROGRESS) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.progress)))
        before.unlink(missing_ok=True)

    def shard(self, layer: int) -> Path:
        return self.path / f"layer-{layer:05}.safetensors"

    def shards(self) -> list[SafetensorsFile]:
        return [SafetensorsFile.open(self.shard(layer)) for layer in range(self.layers)]

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def _hidden(self, layers: int) -> Path:
        return self.path / f"hidden-{layers:05}.npy"

    def _remove_unfinished(self) -> None:
        keep = {self.shard(layer) for layer in range(self.layers)} | {self._hidden(self.layers), self.path / _PROGRESS}
        for path in self.path.iterdir():
            if path.is_file() and path not in keep:
                path.unlink()


def as_pieces(tensors: Stored) -> Mapping[str, Any]:
    return {
        name: (dtype, tuple(data.shape), lambda data=data: [np.ascontiguousarray(data)])
        for name, (dtype, data) in tensors.items()
    }
