"""Finds a checkpoint's own prediction module (multi-token prediction) and opens it as a model of one layer.

    DeepSeek, GLM  in `layers.N`, after the last layer: enorm, hnorm, eh_proj, the layer itself, shared_head.norm
    Qwen           in `mtp`: pre_fc_norm_embedding, pre_fc_norm_hidden, fc, layers.0, norm
    GGUF files     in `blk.N`, after the last layer: nextn.enorm, nextn.hnorm, nextn.eh_proj, the layer itself,
                   nextn.shared_head_norm

The embedding and the head are the model's own, also where the files hold them twice. Only the first module of a
checkpoint is read. Computes nothing.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from headrace.errors import RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import TensorPart, family_of
from headrace.models.families.decoder import decoder_prefix
from headrace.models.gguf.gguf_model import spec_sources
from headrace.models.gguf.gguf_weights import GgufWeights
from headrace.models.model_folder import ModelFolder
from headrace.models.spec import ModelSpec
from headrace.models.tensor_shapes import tensor_shapes

# Canonical names of what joins a token's embedding with the hidden state before it.
JOIN: Final = "join.in"  # [hidden, 2 hidden]: embedding, then hidden state
TOKEN_NORM: Final = "join.token_norm"
STATE_NORM: Final = "join.state_norm"
JOIN_NAMES: Final = (JOIN, TOKEN_NORM, STATE_NORM)

_SHARED: Final = ("embed", "head", "head.bias")  # with the model


class _Layout:
    """Where a module's tensors are: `layer` is before the names of its layer, the others are whole names."""

    def __init__(self, layer: str, token_norm: str, state_norm: str, join: str, norm: str) -> None:
        self.layer = layer
        self.parts = {
            TOKEN_NORM: f"{token_norm}.weight",
            STATE_NORM: f"{state_norm}.weight",
            JOIN: f"{join}.weight",
            "norm": f"{norm}.weight",
        }


def has_prediction_module(folder: ModelFolder) -> bool:
    return _layout(folder) is not None


def open_prediction_module(folder: ModelFolder) -> ModelFolder:
    """Return the module as a folder of one layer, with the tensors of JOIN_NAMES and without embedding and head.

    Raise RequestError if the model has none, ModelError if a tensor is missing or has another shape.
    """
    layout = _layout(folder)
    if layout is None:
        raise RequestError(
            f"'{folder.path.name}' has no prediction module that Headrace reads. Expected {_expected(folder)}. Remove "
            'speculation = "mtp", or train heads: headrace adapt --heads.',
            parameter="speculation",
        )
    names = folder.weights.names
    mixture = any(name.startswith(f"{layout.layer}mlp.experts.") for name in names) or any(
        name.startswith(f"{layout.layer}ffn_") and "_exps." in name for name in names
    )
    spec = _layer_spec(folder.spec, mixture=mixture)
    shapes = {name: shape for name, shape in tensor_shapes(spec).items() if name not in _SHARED}
    hidden = spec.hidden_size
    shapes |= {JOIN: (hidden, 2 * hidden), TOKEN_NORM: (hidden,), STATE_NORM: (hidden,)}
    sources = _layer_sources(folder, spec, layout)
    sources |= {name: (TensorPart(stored),) for name, stored in layout.parts.items()}
    module = ModelFolder(
        folder.path,
        spec,
        folder.weights,
        {name: sources[name] for name in shapes},
        lambda: folder.tokenizer_files,
        shapes=shapes,
    )
    module.check_shapes()
    return module


def _layout(folder: ModelFolder) -> _Layout | None:
    names = folder.weights.names
    count = len(folder.spec.layers)
    layer, block = f"{decoder_prefix(names)}layers.{count}", f"blk.{count}.nextn"
    layouts = (
        _Layout(f"{layer}.", f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", f"{layer}.shared_head.norm"),
        _Layout("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        _Layout(f"blk.{count}.", f"{block}.enorm", f"{block}.hnorm", f"{block}.eh_proj", f"{block}.shared_head_norm"),
    )
    if not any(each.attends for each in folder.spec.layers):
        return None
    return next((each for each in layouts if each.parts[JOIN] in names), None)


def _expected(folder: ModelFolder) -> str:
    count = len(folder.spec.layers)
    if isinstance(folder.weights, GgufWeights):
        return f"the tensor blk.{count}.nextn.eh_proj.weight: many GGUF files are made without it"
    return f"the tensors of DeepSeek and GLM (layers.{count}.eh_proj) or of Qwen (mtp.fc)"


def _layer_spec(spec: ModelSpec, *, mixture: bool) -> ModelSpec:
    """Return the spec of the module's layer: it is like the last of the model's that attend."""
    last = next(layer for layer in reversed(spec.layers) if layer.attends)
    layer = replace(last, mixer="attention", experts=mixture and spec.experts is not None)
    # Another architecture's name keeps its packed weights apart from those of a model of one layer.
    return replace(spec, architecture=f"{spec.architecture}, prediction module", layers=(layer,), recurrent=None)


def _layer_sources(folder: ModelFolder, spec: ModelSpec, layout: _Layout) -> dict[str, tuple[TensorPart, ...]]:
    """Return the parts of the layer's tensors, as the family would find them if it were one more layer of the model."""
    names = folder.weights.names
    count = len(folder.spec.layers)
    stem, start = f"{decoder_prefix(names)}layers.{count}.", f"layers.{count}."
    longer = replace(folder.spec, layers=(*folder.spec.layers, *spec.layers))
    stored: dict[str, str] = {}
    if isinstance(folder.weights, GgufWeights):
        sources = spec_sources(folder.weights.file, longer, names)
    else:
        stored = {stem + name.removeprefix(layout.layer): name for name in names if name.startswith(layout.layer)}
        sources = family_of(ConfigJson.read(folder.path / "config.json")).sources(longer, names | stored.keys())
    return {
        f"layers.0.{name.removeprefix(start)}": tuple(
            replace(part, name=stored.get(part.name, part.name)) for part in parts
        )
        for name, parts in sources.items()
        if name.startswith(start)
    }
