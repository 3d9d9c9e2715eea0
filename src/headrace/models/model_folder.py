"""Finds a model by name, path or hub id, opens its folder, and checks config, tensor names and shapes.

Joins canonical tensors from their parts on disk. Does not know precisions or executors.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import TensorPart, TensorSources, family_of, model_spec
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.formats.tensors import DenseTensor
from headrace.models.spec import ModelSpec, tensor_shapes
from headrace.models.text.tokenizer import Tokenizer

BUNDLED: Final = Path(__file__).parent / "bundled"  # the models that ship with the package
BUNDLED_NAMES: Final = ("mini", "draft")

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILES: Final = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*/config.json"]


class ModelFolder:
    """A checked model folder. The weights stay on disk, mapped."""

    def __init__(
        self, path: Path, config: ConfigJson, spec: ModelSpec, weights: ModelWeights, sources: TensorSources
    ) -> None:
        self.path = path
        self.config = config
        self.spec = spec
        self.weights = weights
        self.sources = sources
        self.shapes = tensor_shapes(spec)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path, self.spec.vocab_size)

    @cached_property
    def decoding_tokenizer(self) -> Tokenizer:
        """A tokenizer that loads its encoder on first use, for a process that mostly decodes."""
        return Tokenizer.load_for_decoding(self.path, self.spec.vocab_size)

    def tensor(self, name: str) -> DenseTensor:
        """Return a canonical tensor, joined from its parts, or a view of the mapped file if there is only one part."""
        parts = [self._part(name, part) for part in self.sources[name]]
        if len(parts) == 1:
            return parts[0]
        dtypes = {part.dtype for part in parts}
        data: NDArray[Any]
        if len(dtypes) == 1:
            dtype = parts[0].dtype
            data = np.concatenate([part.data for part in parts])
        else:
            dtype = "f32"
            data = np.concatenate([part.to_f32() for part in parts])
        return DenseTensor(name=name, dtype=dtype, shape=self.shapes[name], data=data, path=parts[0].path)

    def _part(self, name: str, part: TensorPart) -> DenseTensor:
        tensor = self.weights.dense(part.name)
        if part.index is None:
            return tensor
        data = tensor.data[part.index]
        return DenseTensor(name=part.name, dtype=tensor.dtype, shape=data.shape, data=data, path=tensor.path)

    def check_shapes(self) -> None:
        """Raise ModelError unless the files hold every tensor of the spec in its shape."""
        for name, shape in self.shapes.items():
            parts = self.sources[name]
            for part, rows in zip(parts, self._rows(name, len(parts)), strict=True):
                shape_on_disk = self.weights.dense(part.name).shape
                if part.index is not None:
                    if len(shape_on_disk) < 2 or part.index >= shape_on_disk[0]:
                        raise self._shape_error(part, shape_on_disk, f"at least {part.index + 1} experts")
                    shape_on_disk = shape_on_disk[1:]
                if shape_on_disk != (rows, *shape[1:]):
                    raise self._shape_error(part, shape_on_disk, "x".join(map(str, (rows, *shape[1:]))))

    def _rows(self, name: str, parts: int) -> tuple[int, ...]:
        """Return the number of rows of each part of a canonical tensor."""
        rows = self.shapes[name][0]
        if parts == 3:
            return (self.spec.q_size, self.spec.kv_size, self.spec.kv_size)  # q, k and v
        return (rows // parts,) * parts  # all of it, or gate and up

    def _shape_error(self, part: TensorPart, shape_on_disk: tuple[int, ...], expected: str) -> ModelError:
        shape = "x".join(map(str, shape_on_disk)) or "a scalar"
        return ModelError(f"Has shape {shape}. Expected {expected} from config.json.", path=self.path, tensor=part.name)


def open_model(path: Path) -> ModelFolder:
    """Open the model in a folder; raise ModelError if anything in it is wrong."""
    if not path.is_dir():
        raise ModelError(
            "The model folder does not exist." if not path.exists() else "The model path is not a folder.", path=path
        )
    config = ConfigJson.read(path / "config.json")
    spec = model_spec(config)
    weights = ModelWeights.open(path)
    folder = ModelFolder(path, config, spec, weights, family_of(config).sources(spec, weights.names))
    folder.check_shapes()
    return folder


def find_model(name: str) -> Path:
    """Return the folder of a bundled model, a path or a hub id. Downloads from the hub only for a hub id."""
    if name in BUNDLED_NAMES:
        return BUNDLED / name
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(name):
        raise RequestError(
            f"Unknown model '{name}'. Pass a folder, a hub id (owner/name) or a bundled model "
            f"({', '.join(BUNDLED_NAMES)}).",
            parameter="model",
        )
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        raise RequestError(
            f"Folder '{name}' does not exist. To download it from the hub, run: pip install 'headrace[hub]'",
            parameter="model",
        ) from None
    try:
        return Path(str(snapshot_download(name, allow_patterns=_HUB_FILES)))  # pyright: ignore[reportUnknownArgumentType]
    except Exception as error:  # the hub client raises its own errors, those of requests and those of the system
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RequestError(f"Cannot download '{name}' from the hub: {reason[0]}", parameter="model") from error
