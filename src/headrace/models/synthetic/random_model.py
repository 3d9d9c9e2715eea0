"""Writes a model directory with random weights in the ordinary Hugging Face layout. Does not run models.

The same name, seed and dtype give the same bytes on every machine: each tensor has its own stream of random bits,
seeded by its name. The scale of the weights keeps activations within a few units through any number of layers and
spreads logits like those of a trained model. The text that such a model generates is noise.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.disk import disk_space
from headrace.errors import HeadraceError, RequestError
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.synthetic.public_shapes import ConfigDict, PublicShape, find_shape
from headrace.models.synthetic.synthetic_tokenizer import tokenizer_config, tokenizer_json

Dtype = Literal["bf16", "f16", "f32"]

STORED: Mapping[Dtype, tuple[str, str, int]] = {  # safetensors' name, config.json's name, bytes
    "bf16": ("BF16", "bfloat16", 2),
    "f16": ("F16", "float16", 2),
    "f32": ("F32", "float32", 4),
}
SHARD_BYTES = 5_000_000_000  # maximum bytes of a weight file, as in public models
CHUNK_WEIGHTS = 1 << 21  # weights drawn at a time
ROOM_BESIDE_WEIGHTS = 64 << 20  # free bytes for the tokenizer and the file system
LOGIT_SPREAD = 3.0  # standard deviation of the logits
BIAS_SPREAD = 0.02
# The sum of a decoder's sublayers is several times the embedding: if the embedding is also the output head, a token
# would otherwise only predict itself.
RESIDUAL_SIZE = 6.0


class RandomTensor(msgspec.Struct, frozen=True):
    """A tensor to draw: every weight is `centre` plus `spread` times a normal variable."""

    shape: tuple[int, ...]
    spread: float = 0.0
    centre: float = 0.0

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


class WrittenModel(msgspec.Struct, frozen=True):
    weights: int
    weight_bytes: int
    files: int


NORM = 1.0


def product(outputs: int, inputs: int, gain: float = 1.0) -> RandomTensor:
    """Return a matrix whose outputs are as large as its inputs, times `gain`."""
    return RandomTensor((outputs, inputs), gain / math.sqrt(inputs))


def decoder_tensors(config: ConfigDict) -> dict[str, RandomTensor]:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = config["num_attention_heads"] * head_size
    kv_heads = config["num_key_value_heads"] * head_size
    model_type = config["model_type"]
    residual = RESIDUAL_SIZE / math.sqrt(2 * layers)
    norm = RandomTensor((hidden,), centre=NORM)

    def mlp(prefix: str, names: tuple[str, str, str], inner: int) -> dict[str, RandomTensor]:
        gate, up, down = names
        return {
            f"{prefix}.{gate}.weight": product(inner, hidden),
            f"{prefix}.{up}.weight": product(inner, hidden),
            f"{prefix}.{down}.weight": product(hidden, inner, residual),
        }

    tensors = {"model.embed_tokens.weight": product(config["vocab_size"], hidden, LOGIT_SPREAD)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = norm
        for name, outputs in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            tensors[f"{layer}.self_attn.{name}.weight"] = product(outputs, hidden)
            if model_type == "qwen2":
                tensors[f"{layer}.self_attn.{name}.bias"] = RandomTensor((outputs,), BIAS_SPREAD)
        tensors[f"{layer}.self_attn.o_proj.weight"] = product(hidden, heads, residual)
        if model_type in {"qwen3", "qwen3_moe"}:
            for name in ("q_norm", "k_norm"):
                tensors[f"{layer}.self_attn.{name}.weight"] = RandomTensor((head_size,), centre=NORM)
        tensors[f"{layer}.post_attention_layernorm.weight"] = norm
        if model_type == "mixtral":
            experts = config["num_local_experts"]
            tensors[f"{layer}.block_sparse_moe.gate.weight"] = product(experts, hidden)
            for expert in range(experts):
                prefix = f"{layer}.block_sparse_moe.experts.{expert}"
                tensors |= mlp(prefix, ("w1", "w3", "w2"), config["intermediate_size"])
        elif model_type == "qwen3_moe":
            tensors[f"{layer}.mlp.gate.weight"] = product(config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                prefix = f"{layer}.mlp.experts.{expert}"
                tensors |= mlp(prefix, ("gate_proj", "up_proj", "down_proj"), config["moe_intermediate_size"])
        else:
            tensors |= mlp(f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj"), config["intermediate_size"])
    tensors["model.norm.weight"] = norm
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = product(config["vocab_size"], hidden, LOGIT_SPREAD)
    return tensors


def encoder_tensors(config: ConfigDict) -> dict[str, RandomTensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tensors: dict[str, RandomTensor] = {}

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = RandomTensor((hidden,), centre=NORM)
        tensors[f"{name}.bias"] = RandomTensor((hidden,), BIAS_SPREAD)

    def dense(name: str, outputs: int, inputs: int) -> None:
        tensors[f"{name}.weight"] = product(outputs, inputs)
        tensors[f"{name}.bias"] = RandomTensor((outputs,), BIAS_SPREAD)

    tensors["embeddings.word_embeddings.weight"] = product(config["vocab_size"], hidden)
    tensors["embeddings.position_embeddings.weight"] = product(config["max_position_embeddings"], hidden)
    tensors["embeddings.token_type_embeddings.weight"] = product(config["type_vocab_size"], hidden)
    norm("embeddings.LayerNorm")
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            dense(f"{layer}.attention.self.{name}", hidden, hidden)
        dense(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        dense(f"{layer}.intermediate.dense", inner, hidden)
        dense(f"{layer}.output.dense", hidden, inner)
        norm(f"{layer}.output.LayerNorm")
    dense("pooler.dense", hidden, hidden)
    return tensors


def tensors_of(shape: PublicShape) -> dict[str, RandomTensor]:
    return encoder_tensors(shape.config) if shape.turn is None else decoder_tensors(shape.config)


@cache
def quantiles() -> NDArray[np.float64]:
    """Return 65,536 values; one chosen at random has a normal distribution."""
    normal = NormalDist()
    count = 1 << 16
    return np.array([normal.inv_cdf((index + 0.5) / count) for index in range(count)])


@cache
def value_table(spread: float, centre: float, dtype: Dtype) -> NDArray[Any]:
    values = (centre + spread * quantiles()).astype("<f4")
    match dtype:
        case "f32":
            return values
        case "f16":
            return values.astype("<f2")
        case "bf16":
            bits = values.view("<u4")
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even


def draw(name: str, tensor: RandomTensor, dtype: Dtype, seed: int) -> Iterator[NDArray[Any]]:
    """Yield the tensor's weights in chunks. Each weight is a table entry chosen by 16 random bits."""
    table = value_table(tensor.spread, tensor.centre, dtype)
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4").tolist()
    # The raw bits of a bit generator are the same in every version of numpy; the output of Generator is not.
    bits = np.random.SFC64(np.random.SeedSequence([seed, *words]))
    for start in range(0, tensor.weights, CHUNK_WEIGHTS):
        weights = min(CHUNK_WEIGHTS, tensor.weights - start)
        choices = bits.random_raw(-(-weights // 4)).astype("<u8", copy=False).view("<u2")[:weights]
        yield table[choices]


def shards(tensors: Mapping[str, RandomTensor], weight_bytes: int) -> list[dict[str, RandomTensor]]:
    """Split the tensors in order so that no file exceeds SHARD_BYTES."""
    result: list[dict[str, RandomTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if result[-1] and size + tensor.weights * weight_bytes > SHARD_BYTES:
            result.append({})
            size = 0
        result[-1][name] = tensor
        size += tensor.weights * weight_bytes
    return result


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> None:
    separators = None if indent else (",", ":")
    text = json.dumps(content, ensure_ascii=False, indent=indent, separators=separators)
    path.write_text(text + "\n", encoding="utf-8")


def write_weights(folder: Path, tensors: Mapping[str, RandomTensor], dtype: Dtype, seed: int) -> int:
    stored, _, weight_bytes = STORED[dtype]

    def source(name: str, tensor: RandomTensor) -> tuple[str, tuple[int, ...], Callable[[], Iterator[NDArray[Any]]]]:
        return stored, tensor.shape, lambda: draw(name, tensor, dtype, seed)

    parts = shards(tensors, weight_bytes)
    places: dict[str, str] = {}
    for index, part in enumerate(parts):
        file = "model.safetensors" if len(parts) == 1 else f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
        places |= dict.fromkeys(part, file)
        contents = {name: source(name, tensor) for name, tensor in part.items()}
        write_safetensors(folder / file, contents, metadata={"format": "pt"})
    if len(parts) > 1:
        total = sum(tensor.weights for tensor in tensors.values()) * weight_bytes
        index_file = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / "model.safetensors.index.json", index_file)
    return len(parts)


def write_settings(folder: Path, shape: PublicShape, dtype: Dtype) -> None:
    config = shape.config | {"torch_dtype": STORED[dtype][1]}
    write_json(folder / "config.json", dict(sorted(config.items())))
    write_json(folder / "tokenizer.json", tokenizer_json(shape), indent=None)
    write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    if shape.turn is None:
        write_pooling(folder, config)
        return
    generation: dict[str, Any] = {"eos_token_id": [shape.tokens[name] for name in shape.end_of_text]}
    generation["bos_token_id"] = config["bos_token_id"]
    if shape.pad is not None:
        generation["pad_token_id"] = shape.tokens[shape.pad]
    write_json(folder / "generation_config.json", generation)


def write_pooling(folder: Path, config: ConfigDict) -> None:
    """Write the files of sentence-transformers for mean pooling, then unit length."""
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    pooling = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in modes}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config["hidden_size"]} | pooling)


def write_random_model(name: str, out: Path, *, seed: int = 0, dtype: Dtype = "bf16") -> WrittenModel:
    """Write the directory `out`, which must be missing or empty. It appears complete or not at all."""
    shape = find_shape(name)
    if seed < 0:
        raise RequestError(f"The seed is {seed}. Expected zero or more.", parameter="seed")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"'{out}' is not an empty directory. Choose another path.", parameter="out")
    return write_shape(shape, out, dtype, seed)


def write_shape(shape: PublicShape, out: Path, dtype: Dtype, seed: int) -> WrittenModel:
    tensors = tensors_of(shape)
    weights = sum(tensor.weights for tensor in tensors.values())
    weight_bytes = weights * STORED[dtype][2]
    free = disk_space(out).free
    if free < weight_bytes + ROOM_BESIDE_WEIGHTS:
        raise HeadraceError(
            f"{out}: {shape.name} takes {weight_bytes / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free."
        )
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    partial.mkdir()
    try:
        write_settings(partial, shape, dtype)
        files = write_weights(partial, tensors, dtype, seed)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return WrittenModel(weights, weight_bytes, files)
