"""A model folder, opened and checked: what the model is, where each canonical tensor comes from, how it speaks.

Owns ModelFolder, the finding of a model by name, path or hub id, and the joining of a canonical tensor from its parts
on disk. Knows nothing of precisions or of executors.
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

BUNDLED: Final = Path(__file__).parent / "bundled"  # models of our own that come with the package
BUNDLED_NAMES: Final = ("mini", "draft")

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILES: Final = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*/config.json"]


class ModelFolder:
    """Reading the folder checks config, names and shapes; the weights themselves stay on disk, mapped."""

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
        """The same for who hardly ever cuts a text: what that takes is read when it is first asked for."""
        return Tokenizer.load_for_decoding(self.path, self.spec.vocab_size)

    def tensor(self, name: str) -> DenseTensor:
        """A canonical tensor, joined from its parts; a view of the mapped file where one part is all of it."""
        parts = [self._part(name, part) for part in self.sources[name]]
        if len(parts) == 1:
            return parts[0]
        kinds = {part.dtype for part in parts}
        data: NDArray[Any]
        if len(kinds) == 1:
            kind = parts[0].dtype
            data = np.concatenate([part.data for part in parts])
        else:
            kind = "f32"
            data = np.concatenate([part.to_f32() for part in parts])
        return DenseTensor(name=name, dtype=kind, shape=self.shapes[name], data=data, path=parts[0].path)

    def _part(self, name: str, part: TensorPart) -> DenseTensor:
        tensor = self.weights.dense(part.name)
        if part.index is None:
            return tensor
        data = tensor.data[part.index]
        return DenseTensor(name=part.name, dtype=tensor.dtype, shape=data.shape, data=data, path=tensor.path)

    def check_shapes(self) -> None:
        """Every tensor that the spec wants is in the files, with the shape that follows from the spec."""
        for name, shape in self.shapes.items():
            parts = self.sources[name]
            for part, rows in zip(parts, self._rows(name, len(parts)), strict=True):
                found = self.weights.dense(part.name).shape
                if part.index is not None:
                    if len(found) < 2 or part.index >= found[0]:
                        raise self._misshapen(part, found, f"at least {part.index + 1} experts")
                    found = found[1:]
                if found != (rows, *shape[1:]):
                    raise self._misshapen(part, found, "x".join(map(str, (rows, *shape[1:]))))

    def _rows(self, name: str, parts: int) -> tuple[int, ...]:
        """How many rows each part of a canonical tensor has."""
        rows = self.shapes[name][0]
        if parts == 3:
            return (self.spec.q_size, self.spec.kv_size, self.spec.kv_size)  # q, k and v
        return (rows // parts,) * parts  # all of it, or gate and up

    def _misshapen(self, part: TensorPart, found: tuple[int, ...], expected: str) -> ModelError:
        shape = "x".join(map(str, found)) or "a scalar"
        return ModelError(f"has shape {shape}, expected {expected} from config.json", path=self.path, tensor=part.name)


def open_model(path: Path) -> ModelFolder:
    """The model in a folder; ModelError where anything about it is wrong."""
    if not path.is_dir():
        raise ModelError("no such model folder" if not path.exists() else "not a folder", path=path)
    config = ConfigJson.read(path / "config.json")
    spec = model_spec(config)
    weights = ModelWeights.open(path)
    folder = ModelFolder(path, config, spec, weights, family_of(config).sources(spec, weights.names))
    folder.check_shapes()
    return folder


def find_model(name: str) -> Path:
    """The folder of a model given as a bundled one's name, a path or a hub id; the hub is asked for what is neither."""
    if name in BUNDLED_NAMES:
        return BUNDLED / name
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(name):
        raise RequestError(
            f"no model at '{name}': it is neither a folder, nor a hub id (owner/name), nor a "
            f"bundled model ({', '.join(BUNDLED_NAMES)})",
            parameter="model",
        )
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        raise RequestError(
            f"no folder '{name}'. To fetch it from the hub, install the extra: pip install 'headrace[hub]'",
            parameter="model",
        ) from None
    try:
        return Path(str(snapshot_download(name, allow_patterns=_HUB_FILES)))  # pyright: ignore[reportUnknownArgumentType]
    except Exception as error:  # the hub's client raises its own, requests' and the system's errors
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RequestError(f"'{name}' could not be fetched from the hub: {reason[0]}", parameter="model") from error
