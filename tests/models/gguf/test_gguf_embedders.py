"""Embedders and rerankers in GGUF files: vectors, scores and tokens are those of the folder they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import embed
from headrace.errors import ModelError
from headrace.models.model_folder import open_model, open_tokenizer
from headrace.models.text.tokenizer import Tokenizer
from tests.models.gguf.gguf_models import write_vocabulary
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import Reference, prompt
from tests.support.models.minilm import minilm_folder

Tiny = Callable[[str], Reference]
POOLING = gguf.PoolingType
TEXTS = (
    "The quick brown fox, 13 times.",
    "Naïve café — ÜNÏCODE 中文 don't!",
    "a",
    "  two  spaces  ",
    "über-lang " * 30,
)


def tensors_of(folder: Path, arch: gguf.MODEL_ARCH, offset: int) -> Iterator[tuple[str, torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("num_hidden_layers") or config["n_layer"]
    table = gguf.get_tensor_name_map(arch, layers)
    gemma = arch == gguf.MODEL_ARCH.GEMMA_EMBEDDING
    for source, tensor in load_file(folder / "model.safetensors").items():
        name = source.removeprefix("bert.").removeprefix("roberta.")
        if name.startswith(("pooler.", "bert.pooler")) or "position_ids" in name:
            continue
        if gemma or arch == gguf.MODEL_ARCH.QWEN3:
            name = name if name.startswith("model.") else f"model.{name}"
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, source
        if target == "position_embd.weight":
            tensor = tensor[offset:]
        yield target, tensor + 1 if gemma and target.endswith("norm.weight") else tensor
    for index, name in enumerate(("dense_2", "dense_3")):
        path = folder / f"{2 + index}_Dense" / "model.safetensors"
        if gemma and path.exists():
            yield f"{name}.weight", load_file(path)["linear.weight"]


def write_embedder(
    folder: Path, path: Path, arch: gguf.MODEL_ARCH, pooling: Any, *, offset: int = 0, change: Any = None
) -> Path:
    config = json.loads((folder / "config.json").read_text())

    def find(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(find("max_position_embeddings", "n_positions") - offset)
    writer.add_embedding_length(find("hidden_size", "n_embd"))
    writer.add_block_count(find("num_hidden_layers", "n_layer"))
    writer.add_feed_forward_length(find("intermediate_size", "n_inner"))
    writer.add_head_count(find("num_attention_heads", "n_head"))
    for add, value in (
        (writer.add_head_count_kv, find("num_key_value_heads")),
        (writer.add_layer_norm_eps, find("layer_norm_eps", "layer_norm_epsilon", "norm_eps")),
        (writer.add_layer_norm_rms_eps, find("rms_norm_eps")),
        (writer.add_key_length, find("head_dim")),
        (writer.add_rope_freq_base, find("rotary_emb_base")),
    ):
        if value is not None:
            add(value)
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    if "rope_theta" in full:
        writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if arch == gguf.MODEL_ARCH.MODERN_BERT:
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(3)
    if arch == gguf.MODEL_ARCH.GEMMA_EMBEDDING:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch != gguf.MODEL_ARCH.QWEN3 and arch != gguf.MODEL_ARCH.GEMMA_EMBEDDING:
        writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()))
    for name, tensor in tensors_of(folder, arch, offset):
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vector_of(path: Path, length: int) -> Any:
    executor = CpuExecutor.load(open_model(path), weights="f32", kv="f32", threads=2, context=CONTEXT)
    try:
        vector = embed(executor, [prompt(length)])[0]
    finally:
        executor.close()
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("name", "arch", "pooling", "offset"),
    [
        ("bert-cls", gguf.MODEL_ARCH.BERT, POOLING.CLS, 0),
        ("bge-m3", gguf.MODEL_ARCH.BERT, POOLING.CLS, 2),
        ("nomic", gguf.MODEL_ARCH.NOMIC_BERT, POOLING.MEAN, 0),
        ("modernbert", gguf.MODEL_ARCH.MODERN_BERT, POOLING.CLS, 0),
        ("qwen3-embedder", gguf.MODEL_ARCH.QWEN3, POOLING.LAST, 0),
    ],
)
def test_vectors_are_those_of_the_folder(
    name: str, arch: Any, pooling: Any, offset: int, tiny: Tiny, tmp_path: Path
) -> None:
    folder = tiny(name).folder
    path = write_embedder(folder, tmp_path / "model.gguf", arch, pooling, offset=offset)
    spec = open_model(path).spec
    assert (spec.kind, spec.normalise_embedding) == ("encoder", True)
    length = 30 if name == "qwen3-embedder" else 90  # its folder has a window, of which files of Qwen3 say nothing
    assert vector_of(path, length) @ vector_of(folder, length) == pytest.approx(1.0, abs=1e-6)


def test_a_reranker_of_qwen3_scores_yes_against_no(tiny: Tiny, tmp_path: Path) -> None:
    reference = tiny("qwen3-embedder")
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))  # for "yes", then for "no"

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_tensor("cls.output.weight", rows.numpy())

    arch = gguf.MODEL_ARCH.QWEN3
    path = write_embedder(reference.folder, tmp_path / "model.gguf", arch, POOLING.RANK, change=change)
    model = open_model(path)
    assert model.spec.ranking is not None
    assert (model.spec.kind, model.spec.ranking.template) == ("reranker", "qwen3")
    assert np.array_equal(model.tensor("pooled.0").to_f32(), rows.numpy()[::-1])


@pytest.mark.parametrize(
    ("pooling", "change", "reason"),
    [
        (7, None, "'bert.pooling_type': Expected a number from 0 to 4, found 7"),
        (4, None, "tensor 'cls.output.weight': Expected rows of 64 numbers, found no such tensor"),
        (4, lambda w: w.add_tensor("cls.output.weight", np.ones((3, 64), np.float32)), "classifier with 3 labels"),
        (2, lambda w: w.add_tensor("cls.weight", np.ones((64, 64), np.float32)), "does not know this tensor"),
    ],
)
def test_another_use_of_vectors_is_refused(pooling: int, change: Any, reason: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("bert-cls").folder
    path = write_embedder(folder, tmp_path / "model.gguf", gguf.MODEL_ARCH.BERT, POOLING.CLS, change=lambda writer: (
        writer.kv_data[0].pop("bert.pooling_type"), writer.add_uint32("bert.pooling_type", pooling),
        change(writer) if change else None,
    ))  # fmt: skip
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert reason in str(caught.value)


def tokenizer_file(path: Path, kind: str, tokens: list[str], types: list[int], **keys: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if (scores := keys.pop("scores", None)) is not None:
        writer.add_token_scores(scores)
    for name, value in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("unused", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_tokens(one: Tokenizer, other: Tokenizer) -> None:
    for text in TEXTS:
        assert one.encode(text) == other.encode(text), text
        tokens = other.encode(text, add_special_tokens=False)
        assert one.decode(tokens) == other.decode(tokens)
    assert one.pair_frame == other.pair_frame


def test_words_of_bert_have_the_tokens_of_the_folder(tmp_path: Path) -> None:
    folder = minilm_folder()
    known = json.loads((folder / "tokenizer.json").read_text())
    special = {each["content"] for each in known["added_tokens"]}
    words = [word for word, _ in sorted(known["model"]["vocab"].items(), key=lambda entry: entry[1])]
    spelled = [word if word in special else word[2:] if word.startswith("##") else f"▁{word}" for word in words]
    types = [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    ids = {name: words.index(f"[{name.upper()}]") for name in ("cls", "sep", "unk", "pad")}
    path = tokenizer_file(
        tmp_path / "words.gguf", "bert", spelled, types,
        cls_token_id=ids["cls"], seperator_token_id=ids["sep"],
        unknown_token_id=ids["unk"], padding_token_id=ids["pad"],
    )  # fmt: skip
    same_tokens(open_tokenizer(path, 1 << 20), Tokenizer.load(folder, len(words)))


def test_pieces_with_scores_have_the_tokens_of_the_reference(tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁quick", "▁qu", "ick", "▁fox", "▁two", "▁spaces", "s"]
    pieces += sorted(set("abcdefghijklmnopqrtuvwxyz.,-1ABCDEFTN—'!ïéÜÖ中文"))
    scores = [0.0, 0.0, 0.0, 0.0, *(-1.0 - index / 7 for index in range(len(pieces) - 4))]
    kind = gguf.TokenType
    types = [kind.CONTROL, kind.CONTROL, kind.CONTROL, kind.UNKNOWN, *[kind.NORMAL] * (len(pieces) - 4)]
    ids = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3, "padding_token_id": 1}
    path = tokenizer_file(tmp_path / "pieces.gguf", "t5", pieces, types, scores=scores, **ids)
    reference = tokenizers.Tokenizer(tokenizers.models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=3))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    found = open_tokenizer(path, 1 << 20)
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == [0, *expected, 2]
    assert (found.pair_frame.before, found.pair_frame.between, found.pair_frame.after) == ([0], [2, 2], [2])


def test_a_reranker_of_pairs_has_its_head(tiny: Tiny, tmp_path: Path) -> None:
    values = np.random.default_rng(4).normal(size=(66, 64)).astype(np.float32)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("cls.weight", values[:64])
        writer.add_tensor("cls.bias", values[64])
        writer.add_tensor("cls.output.weight", values[65:])
        writer.add_tensor("cls.output.bias", np.array([0.25], np.float32))

    folder = tiny("bge-m3").folder
    arch = gguf.MODEL_ARCH.BERT
    model = open_model(write_embedder(folder, tmp_path / "m.gguf", arch, POOLING.RANK, offset=2, change=change))
    spec = model.spec
    assert spec.ranking is not None
    assert (spec.kind, spec.pooling, spec.ranking.template, spec.ranking.typed) == ("reranker", "cls", "pair", False)
    assert [layer.activation for layer in spec.pooled_layers] == ["tanh", "identity"]
    assert np.array_equal(model.tensor("pooled.0").to_f32(), values[:64])
    assert np.array_equal(model.tensor("pooled.1").to_f32(), values[65:])
    assert model.tensor("pooled.1.bias").to_f32().tolist() == [0.25]


def test_embedding_gemma_is_read_with_its_layers_after_pooling(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("embedding-gemma").folder
    file = write_embedder(folder, tmp_path / "m.gguf", gguf.MODEL_ARCH.GEMMA_EMBEDDING, POOLING.MEAN)
    expected, found = open_model(folder), open_model(file)
    for field in ("layers", "ropes", "causal", "attention_scale", "embedding_scale", "pooling", "activation"):
        assert getattr(found.spec, field) == getattr(expected.spec, field), field
    assert [(each.inputs, each.outputs, each.bias) for each in found.spec.pooled_layers] == [
        (64, 200, False),
        (200, 40, False),
    ]
    for name in found.shapes:
        if not name.startswith("pooled"):
            offset = np.float32(name.endswith("norm"))  # converters add one
            assert np.array_equal(found.tensor(name).to_f32(), expected.tensor(name).to_f32() + offset), name
