"""Models in GGUF files: every architecture computes what transformers computes with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import ModelError
from headrace.models.formats.gguf_file import GgufFile
from headrace.models.model_folder import open_model
from tests.models.gguf.gguf_models import write_gguf
from tests.models.tiny_configs import CONTEXT, SIZES, WINDOW
from tests.models.tiny_models import TINY, prompt, randomise, write_tokenizer


def _qwen2() -> Any:
    return transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)


def _qwen3() -> Any:
    return transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)


def _smollm3() -> Any:
    return transformers.SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, tie_word_embeddings=True)


def _gemma2() -> Any:
    return transformers.Gemma2Config(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=9.0,
    )


def _gemma3() -> Any:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 8000.0},
    }
    return transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7},
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        rope_parameters=rope,
    )


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        name: (TINY[name].architecture, TINY[name].config)
        for name in ("llama", "llama-linear-tied", "mistral", "qwen2-yarn", "phi3", "phi3-window-tied", "olmo2")
    },
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
}


def build(name: str) -> Any:
    torch.manual_seed(sorted(CONFIGS).index(name))
    architecture, make = CONFIGS[name]
    config = make()
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture)(config).to(torch.float32).eval()
    randomise(model)
    return model


def saved(folder: Path, model: Any, **options: Any) -> Path:
    write_tokenizer(folder)
    write_gguf(folder / "model.gguf", model, folder / "tokenizer.json", **options)
    return folder / "model.gguf"


def headrace_logits(path: Path, tokens: list[int]) -> Any:
    executor = CpuExecutor.load(open_model(path), weights="f32", kv="f32", threads=2, context=CONTEXT, isa=None)
    try:
        return logits(executor, [tokens])[0]
    finally:
        executor.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    path = saved(tmp_path, model)
    tokens = prompt(300 if name == "phi3" else 60)  # more than a window, and of phi3 more than its first rope serves
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].numpy()

    found = headrace_logits(path, tokens)

    assert found.shape == expected.shape
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4


def test_quantised_weights_are_those_that_the_reference_dequantises(tmp_path: Path) -> None:
    types = {"attn_q.weight": "Q8_0", "attn_k.weight": "Q4_0", "ffn_gate.weight": "Q4_1", "token_embd.weight": "F16"}
    path = saved(tmp_path, build("qwen2"), types=types)
    found = open_model(path).weights

    import gguf

    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    assert {stored[f"blk.0.{name}"].tensor_type.name for name in ("attn_q.weight", "ffn_gate.weight")} == {
        "Q8_0",
        "Q4_1",
    }
    for name, tensor in stored.items():
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(found.dense(name).to_f32(), expected), name


def test_codes_of_permuted_rows_are_those_of_the_weights(tmp_path: Path) -> None:
    path = saved(tmp_path, build("llama-linear-tied"), types={"attn_q.weight": "Q8_0", "attn_k.weight": "Q4_0"})
    weights = open_model(path).weights
    for name in ("blk.1.attn_q.weight", "blk.1.attn_k.weight"):
        codes = weights.codes(name)
        assert codes is not None
        assert np.array_equal(codes.dense(), weights.dense(name).to_f32())


def refusal(path: Path, model: Any, change: Callable[[Any], None]) -> ModelError:
    saved(path, model, change=change)
    with pytest.raises(ModelError) as caught:
        _ = open_model(path / "model.gguf").tokenizer
    assert caught.value.path == str(path / "model.gguf")
    return caught.value


def without(key: str) -> Callable[[Any], None]:
    return lambda writer: writer.kv_data[0].pop(key)


def having(method: str, *values: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        for key in [key for key in writer.kv_data[0] if values and key == values[0]]:
            del writer.kv_data[0][key]
        getattr(writer, method)(*values)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("qwen2.block_count"), "Key 'qwen2.block_count': The key is missing."),
        (without("qwen2.embedding_length"), "Key 'qwen2.embedding_length': The key is missing."),
        (without("qwen2.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon': The key is missing."),
        (having("add_uint32", "qwen2.block_count", 0), "Key 'qwen2.block_count': Expected an integer from 1"),
        (having("add_string", "qwen2.block_count", "3"), "Key 'qwen2.block_count': Expected an integer from 1"),
        (having("add_uint32", "qwen2.attention.head_count", 5), "'qwen2.attention.head_count': 5 heads do not divide"),
        (having("add_array", "qwen2.feed_forward_length", [96, 64, 96]), "'qwen2.feed_forward_length': Expected an"),
        (having("add_uint32", "qwen2.expert_count", 8), "Key 'qwen2.expert_count': Headrace does not know this key"),
        (having("add_uint32", "qwen2.rope.dimension_count", 8), "rope.dimension_count': This architecture does not"),
        (having("add_string", "qwen2.rope.scaling.type", "su"), "Rope 'su' is not supported"),
        (having("add_string", "general.architecture", "mamba"), "Unknown architecture 'mamba'. Headrace reads GGUF"),
        (having("add_string", "general.type", "mmproj"), "The file holds 'mmproj', not a model"),
        (
            having("add_uint16", "split.count", 3),
            "'split.count': The model is split into 3 files, and the others can",
        ),
        (without("tokenizer.ggml.model"), "Key 'tokenizer.ggml.model': The key is missing."),
        (having("add_string", "tokenizer.ggml.model", "rwkv"), "Tokenizer 'rwkv' is not supported"),
        (without("tokenizer.ggml.pre"), "'tokenizer.ggml.pre': The key is missing, so how words are divided"),
        (having("add_string", "tokenizer.ggml.pre", "default"), "Pre-tokenizer 'default' is not supported"),
        (having("add_array", "tokenizer.ggml.merges", ["a b", "ab"]), "'tokenizer.ggml.merges': Expected two tokens"),
        (
            having("add_array", "tokenizer.ggml.token_type", [1, 1]),
            "'tokenizer.ggml.token_type': Expected an array of 318",
        ),
        (having("add_array", "tokenizer.ggml.tokens", ["a", "b", "a"]), "Token 'a' is in the list twice, as 0 and 2"),
        (having("add_uint32", "tokenizer.ggml.eos_token_id", 320), "Names token 320 of 318"),
        (having("add_string", "tokenizer.ggml.add_bos_token", "no"), "Expected true or false"),
    ],
)
def test_wrong_metadata_is_refused_by_key(change: Callable[[Any], None], reason: str, tmp_path: Path) -> None:
    assert reason in str(refusal(tmp_path, build("qwen2"), change))


@pytest.mark.parametrize(
    ("change", "tensor", "reason"),
    [
        (lambda writer: writer.tensors[0].pop("output_norm.weight"), "output_norm.weight", "no such tensor"),
        (lambda writer: writer.tensors[0].pop("token_embd.weight"), "token_embd.weight", "no such tensor"),
        (
            having("add_tensor", "blk.0.other.weight", np.ones((2, 2), np.float32)),
            "blk.0.other.weight",
            "does not know",
        ),
        (having("add_tensor", "rope_freqs.weight", np.ones(3, np.float32)), "rope_freqs.weight", "Expected 8"),
        (having("add_tensor", "rope_freqs.weight", np.zeros(8, np.float32)), "rope_freqs.weight", "above zero"),
        (
            having("add_uint32", "qwen2.feed_forward_length", 128),
            "blk.0.ffn_gate.weight",
            "Expected 128x64 from the me",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    change: Callable[[Any], None], tensor: str, reason: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, build("qwen2"), change)
    assert (error.tensor, reason in str(error)) == (tensor, True), str(error)


def test_metadata_after_the_header_is_no_part_of_it(tmp_path: Path) -> None:
    path = saved(tmp_path, build("qwen2"))
    file = GgufFile.open(path)
    assert 0 < file.header_bytes <= min(each.start for each in file.tensors.values())
