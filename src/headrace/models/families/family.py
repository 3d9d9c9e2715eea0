"""Defines the contract between a model family and the loader: TensorPart, TensorSources and Family. Reads no file."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import ConfigJson
from headrace.models.spec import ModelSpec


class HeadPart(msgspec.Struct, frozen=True):
    """Some of the rows of each head, in a tensor of `heads` heads of `size` rows and `inputs` inputs.

    Each head becomes a product of its own: transposed or not, and padded with rows of zeros to `rows`.
    """

    heads: int
    size: int
    first: int
    last: int  # exclusive
    inputs: int
    rows: int
    transposed: bool = False

    @property
    def file_shape(self) -> tuple[int, int]:
        return self.heads * self.size, self.inputs

    def of(self, data: NDArray[Any]) -> NDArray[Any]:
        heads = data.reshape(self.heads, self.size, self.inputs)[:, self.first : self.last]
        heads = heads.swapaxes(1, 2) if self.transposed else heads
        padded = np.zeros((self.heads, self.rows, heads.shape[2]), dtype=data.dtype)
        padded[:, : heads.shape[1]] = heads
        return padded.reshape(-1, heads.shape[2])


class TensorPart(msgspec.Struct, frozen=True):
    """A tensor in the files, or a part of one: expert `index` of a tensor that holds all experts ([experts, outputs,
    inputs]), or one row.

    `pairs` is set for queries and keys whose files have the rows of a head in the pairs that the rope rotates: the
    rows of a head, and how many of them are rotated. Such rows are put in our order, the first of all pairs, then
    the second, then the others. With `pairs_last` the rotated rows are the last ones of a head in the files.
    `grouped` is set for queries, keys and values in one tensor, head by head of the keys: the queries of each key,
    and the rows of a head. `split` is set where the file has rows in groups of such sizes, by turns, and only those
    at one place of each turn are meant. `tiled` is set where the file has the first head of every group, then the
    second, and so on: the rows before the heads, the groups, and the rows of a head. `tiled_inputs` says so of inputs:
    the groups, and the inputs of a head. `transposed` is set for [inputs, outputs], `either_way` where the shape
    says which of both it is, and `flat` for a vector that has more dimensions in the files. `by_head` is set for
    products of each head.
    """

    name: str
    index: int | None = None
    row: int | None = None
    pairs: tuple[int, int] | None = None
    pairs_last: bool = False
    grouped: tuple[int, int] | None = None
    split: tuple[tuple[int, ...], int] | None = None
    tiled: tuple[int, int, int] | None = None
    tiled_inputs: tuple[int, int] | None = None
    transposed: bool = False
    either_way: bool = False
    flat: bool = False
    by_head: HeadPart | None = None

    def row_order(self, rows: int) -> NDArray[np.intp] | None:
        """Return which row of the file each of our rows is; None if they are in our order."""
        if self.grouped is not None:
            queries, size = self.grouped
            groups = np.arange(rows).reshape(-1, queries + 2, size)
            return np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
        if self.split is not None:
            sizes, place = self.split
            first = sum(sizes[:place])
            turns = np.arange(0, rows, sum(sizes))[:, None]
            return (turns + np.arange(first, first + sizes[place])).reshape(-1)
        if self.tiled is not None:
            before, groups, size = self.tiled
            return np.concatenate([np.arange(before), before + _by_group(rows - before, groups, size)])
        if self.pairs is None:
            return None
        size, rotated = self.pairs
        first = size - rotated if self.pairs_last else 0
        others = range(first) if self.pairs_last else range(rotated, size)
        head = [*range(first, first + rotated, 2), *range(first + 1, first + rotated, 2), *others]
        return (np.arange(0, rows, size)[:, None] + np.array(head)).reshape(-1)

    def input_order(self, inputs: int) -> NDArray[np.intp] | None:
        """Return which input of the file each of our inputs is; None if they are in our order."""
        return None if self.tiled_inputs is None else _by_group(inputs, *self.tiled_inputs)


def _by_group(count: int, groups: int, size: int) -> NDArray[np.intp]:
    """Return where the heads of the first group are, then of the second, in a file that has heads group by turns."""
    return np.arange(count, dtype=np.intp).reshape(-1, groups, size).swapaxes(0, 1).reshape(-1)


TensorSources = dict[str, tuple[TensorPart, ...]]  # canonical tensor -> its parts, joined along the rows


def products_by_head(spec: ModelSpec, stored: str) -> dict[str, tuple[TensorPart, ...]]:
    """Return the parts of the products by head of a layer that keeps the latent, by the ends of their names. `stored`
    is the tensor that expands the latent."""
    latent = spec.latent
    assert latent is not None
    plain = spec.head_size - latent.turning
    size = plain + latent.value_size

    def part(first: int, last: int, outputs: int) -> tuple[TensorPart, ...]:
        rows = latent.head_rows(outputs)
        return (
            TensorPart(
                stored, by_head=HeadPart(spec.heads, size, first, last, latent.rank, rows, transposed=first == 0)
            ),
        )

    return {"q_to_latent": part(0, plain, latent.rank), "v_from_latent": part(plain, size, latent.value_size)}


class Family(Protocol):
    """The attributes of a family module."""

    architectures: tuple[str, ...]  # Hugging Face class names
    ignored: tuple[str, ...]  # keys that never change its numbers, or that another key switches off

    def spec(self, config: ConfigJson) -> ModelSpec: ...

    def sources(self, spec: ModelSpec, names: frozenset[str]) -> TensorSources:
        """Map each tensor of `tensor_shapes(spec)` to its parts in the files; `names` are the tensors in the files.

        The map includes names that the files lack, so that loading can report the missing tensor by name.
        """
        ...


# `model_type` of configs without `architectures` -> the class that generates or embeds.
MODEL_TYPES: Final[dict[str, str]] = {
    "bert": "BertModel",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "modernbert": "ModernBertModel",
    "mpnet": "MPNetModel",
    "mpt": "MptForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "roberta": "RobertaModel",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "xlm-roberta": "XLMRobertaModel",
}


def architecture_of(config: ConfigJson) -> str:
    """Return the Hugging Face class name of a config: the first of `architectures`, or else that of its
    `model_type`."""
    names = config.strings("architectures")
    kind = config.text("model_type", default="") if not names and config.has("model_type") else ""
    if kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    if not names:
        raise config.mismatch("architectures", "a list that starts with the name of a model class")
    return names[0]
