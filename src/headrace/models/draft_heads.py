"""Reads and writes folders of draft heads: Medusa heads and EAGLE layers, in the formats that their authors publish.

    Medusa  medusa_lm_head.safetensors: K.L.linear.weight and .bias of residual block L of head K, and K.LAYERS.weight,
            the head's own product to the vocabulary; without it, the head uses the model's
    EAGLE   model.safetensors: fc, and one Llama layer without a norm before its attention: layers.0.*
    EAGLE-3 see `eagle3_layer.py`

`token_map` of the first two holds the tokens that the heads choose from, if those are not all. Does not compute
anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.draft_tensors import (
    Floats,
    layer_config,
    layer_sources,
    read_floats,
    read_layer,
    read_tokens,
    split_layer,
    write_tensors,
)
from headrace.models.eagle3_layer import Eagle3Layer, is_eagle3, read_eagle3
from headrace.models.formats.model_weights import SINGLE_FILE
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.rope import read_rope
from headrace.models.spec import LayerSpec, ModelSpec
from headrace.models.tensor_shapes import tensor_shapes

CONFIG_FILE: Final = "config.json"
MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
TOKEN_MAP: Final = "token_map"
MOST_HEADS: Final = 16
MOST_BLOCKS: Final = 4  # residual blocks of a head
_LAYER: Final = "layers.0"
_MOST_SIZE: Final = 1 << 20


class HeadBlock(msgspec.Struct, frozen=True):
    """A residual block: x + silu(weight x + bias)."""

    weight: Floats
    bias: Floats


class MedusaHeads(msgspec.Struct, frozen=True):
    """Head k predicts the token k + 2 places after the one whose hidden state it reads."""

    blocks: list[list[HeadBlock]]  # by head
    outputs: list[Floats]  # by head, [vocabulary, hidden]; empty: the model's own head
    tokens: NDArray[np.int32] | None = None  # that they choose from, ascending; None: all

    @property
    def count(self) -> int:
        return len(self.blocks)


class EagleLayer(msgspec.Struct, frozen=True):
    """A layer that reads the embedding of a token and the hidden state before it, and predicts the token's own."""

    spec: ModelSpec  # one layer; its vocabulary is that of `tokens`
    join: Floats  # [hidden, 2 hidden]: embedding, then hidden state
    join_bias: Floats | None
    tensors: dict[str, Floats]  # of the layer, by canonical names
    tokens: NDArray[np.int32] | None = None


DraftHeads = MedusaHeads | EagleLayer | Eagle3Layer


def open_draft_heads(path: Path, spec: ModelSpec) -> DraftHeads:
    """Read heads for a model. Raise ModelError if the files are wrong or belong to another model."""
    if not path.is_dir():
        raise ModelError("There is no such folder of draft heads.", path=path)
    if (path / MEDUSA_FILE).is_file():
        return _read_medusa(path, spec)
    if (path / SINGLE_FILE).is_file():
        config, file = ConfigJson.read(path / CONFIG_FILE), SafetensorsFile.open(path / SINGLE_FILE)
        return read_eagle3(config, file, spec) if is_eagle3(config, file) else _read_eagle(config, file, spec)
    pickled = next((each.name for each in sorted(path.iterdir()) if each.suffix in (".pt", ".bin")), None)
    found = "" if pickled is None else f" {pickled} may execute code and is not read: save it as safetensors."
    raise ModelError(
        f"The folder has neither {MEDUSA_FILE} (Medusa) nor {SINGLE_FILE} (EAGLE).{found} `headrace adapt MODEL "
        "--heads` trains heads.",
        path=path,
    )


def write_medusa(out: Path, heads: MedusaHeads, *, base: str) -> None:
    """Write heads that use the model's own product to the vocabulary, into an existing folder."""
    tensors: dict[str, NDArray[Any]] = {}
    for place, blocks in enumerate(heads.blocks):
        for index, block in enumerate(blocks):
            tensors[f"{place}.{index}.linear.weight"] = block.weight
            tensors[f"{place}.{index}.linear.bias"] = block.bias
    _write(out / MEDUSA_FILE, tensors, heads.tokens)
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": heads.count,
        "medusa_num_layers": len(heads.blocks[0]),
        "model_type": "medusa",
        "version": "2",  # as others call heads without a product of their own
    }
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_eagle(out: Path, layer: EagleLayer, config: Mapping[str, object]) -> None:
    """Write a layer into an existing folder. `config` is what `eagle_config` returned."""
    tensors: dict[str, NDArray[Any]] = {"fc.weight": layer.join}
    if layer.join_bias is not None:
        tensors["fc.bias"] = layer.join_bias
    tensors |= split_layer(layer.spec, layer.tensors, layer_sources(layer.spec, _LAYER))
    _write(out / SINGLE_FILE, tensors, layer.tokens)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def eagle_config(target: ModelSpec, *, base: str) -> dict[str, object]:
    """Return the config of a new layer for a model, with heads and sizes like the model's own."""
    return {"architectures": ["LlamaForCausalLM"], "bias": True, **layer_config(target, base=base)}


def eagle_spec(config: ConfigJson, target: ModelSpec, vocabulary: int) -> ModelSpec:
    """Return the spec of an EAGLE layer of the model `target`, which chooses among `vocabulary` tokens."""
    heads = config.size("num_attention_heads", maximum=_MOST_SIZE)
    kv_heads = config.size("num_key_value_heads", maximum=heads, default=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"Must divide num_attention_heads, {heads}.")
    head_size = config.size("head_dim", maximum=_MOST_SIZE, default=max(1, target.hidden_size // heads))
    return ModelSpec(
        family="llama",
        architecture="EAGLE",
        vocab_size=vocabulary,
        hidden_size=target.hidden_size,
        intermediate_size=config.size("intermediate_size", maximum=_MOST_SIZE),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        layers=(LayerSpec(attn_norm=False),),
        context=target.context,
        norm_eps=config.positive("rms_norm_eps", default=1e-6),
        final_norm=False,
        ropes=(read_rope(config, head_size),),
        attention_scale=head_size**-0.5,
        tied=True,  # its embedding is never read
    )


def eagle_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an EAGLE layer's canonical tensors, without the product to the vocabulary."""
    return {name: shape for name, shape in tensor_shapes(spec).items() if name != "embed"}


def _read_medusa(path: Path, spec: ModelSpec) -> MedusaHeads:
    file = SafetensorsFile.open(path / MEDUSA_FILE)
    # The published files begin with the head's number; some trainers save the module's name before it.
    names = {name.removeprefix("medusa_head.").removeprefix("medusa_heads."): name for name in file.tensors}
    blocks: list[list[HeadBlock]] = []
    outputs: list[Floats] = []
    tokens = read_tokens(file, TOKEN_MAP, spec, offsets=False)
    vocabulary = spec.vocab_size if tokens is None else len(tokens)
    most = _declared_heads(path)
    hidden = spec.hidden_size
    while len(blocks) < most and f"{len(blocks)}.0.linear.weight" in names:
        head = len(blocks)
        found: list[HeadBlock] = []
        while len(found) < MOST_BLOCKS and (name := f"{head}.{len(found)}.linear") + ".weight" in names:
            weight = read_floats(file, names[f"{name}.weight"], (hidden, hidden))
            bias = np.zeros(hidden, np.float32)
            if f"{name}.bias" in names:
                bias = read_floats(file, names[f"{name}.bias"], (hidden,))
            found.append(HeadBlock(weight, bias))
        blocks.append(found)
        if (own := f"{head}.{len(found)}.weight") in names:
            outputs.append(read_floats(file, names[own], (vocabulary, hidden)))
    if not blocks:
        raise ModelError("Has no tensor 0.0.linear.weight, so it has no Medusa heads.", path=file.path)
    if len(outputs) not in (0, len(blocks)):
        raise ModelError("Some heads have a product to the vocabulary and some have none.", path=file.path)
    return MedusaHeads(blocks, outputs, tokens)


def _declared_heads(path: Path) -> int:
    if not (path / CONFIG_FILE).is_file():
        return MOST_HEADS
    return min(
        MOST_HEADS, ConfigJson.read(path / CONFIG_FILE).size("medusa_num_heads", maximum=_MOST_SIZE, default=MOST_HEADS)
    )


def _read_eagle(config: ConfigJson, file: SafetensorsFile, target: ModelSpec) -> EagleLayer:
    if config.size("num_hidden_layers", maximum=_MOST_SIZE, default=1) != 1:
        raise ModelError(
            "EAGLE heads have one layer. Pass this folder as 'draft_model' if it is a model.", path=file.path.parent
        )
    if "fc.weight" not in file.tensors:
        raise ModelError("Has no tensor fc.weight, so it is no EAGLE layer.", path=file.path)
    tokens = read_tokens(file, TOKEN_MAP, target, offsets=False)
    spec = eagle_spec(config, target, target.vocab_size if tokens is None else len(tokens))
    if f"{_LAYER}.self_attn.q_proj.bias" in file.tensors:
        spec = msgspec.structs.replace(spec, qkv_bias=True)
    hidden = spec.hidden_size
    tensors = read_layer(file, spec, eagle_shapes(spec), layer_sources(spec, _LAYER))
    bias = read_floats(file, "fc.bias", (hidden,)) if "fc.bias" in file.tensors else None
    return EagleLayer(spec, read_floats(file, "fc.weight", (hidden, 2 * hidden)), bias, tensors, tokens)


def _write(path: Path, tensors: Mapping[str, NDArray[Any]], tokens: NDArray[np.int32] | None) -> None:
    write_tensors(path, tensors if tokens is None else {**tensors, TOKEN_MAP: tokens})
