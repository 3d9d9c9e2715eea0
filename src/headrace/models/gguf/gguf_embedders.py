"""Says how the model of a GGUF file makes embeddings or scores: which tokens are pooled, and what comes after pooling.

llama.cpp gives embeddings the length one, and files do not say otherwise.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from headrace.errors import ModelError
from headrace.models.config_json import shorten
from headrace.models.families.family import TensorPart, TensorSources
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.gguf.gguf_keys import GgufKeys
from headrace.models.spec import ModelSpec, PooledLayer, Pooling, RankingSpec

_POOLING: Final = "pooling_type"
_POOLINGS: Final[dict[int, Pooling]] = {1: "mean", 2: "cls", 3: "last"}
_RANK: Final = 4
_DENSE: Final = ("dense_2", "dense_3")  # after pooling, in EmbeddingGemma
_HEAD: Final = ("cls", "cls.output")  # of a reranker


def as_embedder(keys: GgufKeys, spec: ModelSpec) -> ModelSpec:
    """Return a spec with what a file says about embeddings and scores."""
    kind = keys.get(_POOLING)
    if spec.causal and keys.get("attention.causal", True) is False:
        if any(layer.window for layer in spec.layers):
            raise keys.error("attention.causal", "Headrace does not support a window without a causal mask here.")
        spec = replace(spec, kind="encoder", causal=False)
    keys.get("attention.causal")
    if kind == _RANK:
        return _reranker(keys, spec)
    if isinstance(kind, int) and kind in _POOLINGS:
        return replace(
            spec,
            kind="encoder",
            pooling=_POOLINGS[kind],
            normalise_embedding=True,
            pooled_layers=_dense_layers(keys, spec.hidden_size),
        )
    if kind not in (None, 0):
        raise keys.error(_POOLING, f"Expected a number from 0 to {_RANK}, found {shorten(kind)}.")
    return spec


def pooled_sources(spec: ModelSpec) -> TensorSources:
    """Map the tensors after pooling to those of a file."""
    sources: TensorSources = {}
    if spec.ranking is not None and spec.ranking.template == "qwen3" and spec.pooled_layers[0].outputs == 2:
        # Files have the word for "relevant" first.
        return {"pooled.0": tuple(TensorPart("cls.output.weight", row=row) for row in (1, 0))}
    names = _DENSE if spec.ranking is None else _HEAD[-len(spec.pooled_layers) :]
    for index, layer in enumerate(spec.pooled_layers):
        sources[f"pooled.{index}"] = (TensorPart(f"{names[index]}.weight"),)
        if layer.bias:
            sources[f"pooled.{index}.bias"] = (TensorPart(f"{names[index]}.bias"),)
    return sources


def _dense_layers(keys: GgufKeys, width: int) -> tuple[PooledLayer, ...]:
    layers: list[PooledLayer] = []
    for name in _DENSE:
        for end in ("in", "out"):
            keys.get(f"{name}_feat_{end}")  # the tensor's shape again
        if f"{name}.weight" not in keys.file.tensors:
            continue
        outputs = _outputs(keys.file, name, width)
        layers.append(PooledLayer(inputs=width, outputs=outputs, bias=False))
        width = outputs
    return tuple(layers)


def _reranker(keys: GgufKeys, spec: ModelSpec) -> ModelSpec:
    keys.get("classifier.output_labels")
    width, causal = spec.hidden_size, spec.causal
    outputs = _outputs(keys.file, "cls.output", width)
    if outputs not in ((1, 2) if causal else (1,)):
        raise ModelError(
            f"The model is a classifier with {outputs} labels. Headrace serves rerankers, which have one label.",
            path=keys.file.path,
            tensor="cls.output.weight",
        )
    layers: tuple[PooledLayer, ...] = (
        PooledLayer(inputs=width, outputs=outputs, bias="cls.output.bias" in keys.file.tensors),
    )
    if not causal:
        _outputs(keys.file, "cls", width)
        layers = (
            PooledLayer(inputs=width, outputs=width, bias="cls.bias" in keys.file.tensors, activation="tanh"),
            *layers,
        )
    return replace(
        spec,
        kind="reranker",
        tied=False,
        pooling="last" if causal else "cls",
        normalise_embedding=False,
        pooled_layers=layers,
        ranking=RankingSpec(template="qwen3" if causal else "pair", activation="sigmoid", typed=spec.token_types > 1),
    )


def _outputs(file: GgufFile, name: str, width: int) -> int:
    entry = file.tensors.get(f"{name}.weight")
    shape = () if entry is None else entry.shape if len(entry.shape) > 1 else (1, *entry.shape)
    if len(shape) != 2 or shape[1] != width:
        found = "no such tensor" if entry is None else "shape " + "x".join(map(str, shape))
        raise ModelError(f"Expected rows of {width} numbers, found {found}.", path=file.path, tensor=f"{name}.weight")
    return shape[0]
