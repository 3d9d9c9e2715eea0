"""Presents the tensors of a quantised model folder under ordinary names and shapes, one layer in memory at a time.

`quantization_config` in config.json decides which scheme reads them. Layers that the files keep in f32, bf16 or f16 are
passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from headrace.models.config_json import ConfigJson
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.formats.quantised_layer import AffineCodes, QuantisedLayer, Scheme, StoredLayout
from headrace.models.formats.tensors import DenseTensor
from headrace.models.quantised.awq import Awq
from headrace.models.quantised.bitsandbytes import BitsAndBytes
from headrace.models.quantised.compressed_tensors import CompressedTensors
from headrace.models.quantised.fp8 import Fp8
from headrace.models.quantised.gptq import Gptq
from headrace.models.quantised.mxfp4 import ExpertTensors, Mxfp4
from headrace.models.quantised.sparse_bitmask import SPARSE_FORMATS, SparseBitmask


def _compressed_tensors(config: ConfigJson) -> Scheme:
    """Return the scheme of a config, which describes whole numbers, or zeros that are not stored."""
    sparsity = config.optional_sub("sparsity_config")
    if sparsity is not None and sparsity.text("format", default="dense") in SPARSE_FORMATS:
        groups = config.optional_sub("config_groups")
        if groups is not None and groups.names():
            raise config.error("config_groups", "Weights that are sparse and quantised must be stored dense.")
        return SparseBitmask.from_config(sparsity)
    return CompressedTensors.from_config(config)


_SCHEMES: Final[Mapping[str, Callable[[ConfigJson], Scheme]]] = {
    "awq": Awq.from_config,
    "bitsandbytes": BitsAndBytes.from_config,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": Fp8.from_config,
    "fp8": Fp8.from_config,
    "gptq": Gptq.from_config,
    "mxfp4": Mxfp4.from_config,
}


def read_scheme(config: ConfigJson) -> Scheme | None:
    """Return the scheme that a config names; None for a model that is not quantised."""
    section = config.quantisation()
    if section is None:
        return None
    key = "quant_method"
    method = section.text(key) if section.has(key) else ""
    if not method and (section.has("load_in_4bit") or section.has("load_in_8bit")):
        method = "bitsandbytes"  # as old files are saved
    if method not in _SCHEMES:
        raise section.mismatch(key, f"a scheme that Headrace reads ({', '.join(_SCHEMES)})")
    return _SCHEMES[method](section)


class QuantisedWeights:
    """The tensors of a quantised model folder by the names that they would have if it were not quantised."""

    def __init__(self, files: ModelWeights, scheme: Scheme) -> None:
        stored = ExpertTensors(files) if isinstance(scheme, Mxfp4) else files
        self._stored = stored
        self.scheme = scheme
        self._layers: dict[str, QuantisedLayer] = {}
        hidden: set[str] = set()
        end = f".{scheme.marker}"
        for name in stored.names:
            if not name.endswith(end):
                continue
            layer = QuantisedLayer(name.removesuffix(end), stored)
            if not scheme.owns(layer):
                continue
            weight = f"{layer.name}.weight"
            if scheme.marker != "weight" and "weight" not in scheme.parts and weight in stored.names:
                raise layer.error("weight", f"The files also hold '{name[:200]}', which stands for the same weights.")
            self._layers[weight] = layer
            hidden.update(f"{layer.name}.{part}" for part in scheme.parts)
        self.files = stored.files
        self.names = (stored.names - hidden) | self._layers.keys()
        self.total_bytes = stored.total_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, with the shapes and types of everything it is made from checked."""
        layer = self._layers.get(name)
        return self._stored.shape(name) if layer is None else self.scheme.shape(layer)

    def dense(self, name: str) -> DenseTensor:
        layer = self._layers.get(name)
        if layer is None:
            return self._stored.dense(name)
        data = self.scheme.dense(layer)
        return DenseTensor(name=name, dtype="f32", shape=data.shape, data=data, path=self._path(layer))

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the files."""
        self._stored.drop_pages()

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors on disk that a tensor is made from."""
        layer = self._layers.get(name)
        if layer is None:
            return (name,)
        return tuple(f"{layer.name}.{part}" for part in self.scheme.parts if layer.has(part))

    def layout(self, name: str) -> StoredLayout | None:
        """Return how a tensor is quantised on disk; None if it is not."""
        layer = self._layers.get(name)
        return None if layer is None else self.scheme.layout(layer)

    def codes(self, name: str) -> AffineCodes | None:
        layer = self._layers.get(name)
        return None if layer is None else self.scheme.codes(layer)

    def _path(self, layer: QuantisedLayer) -> Path:
        return self._stored.path_of(f"{layer.name}.{self.scheme.marker}")
