"""Hostile GGUF files: whatever a key or a header says, opening a model and its tokenizer raises only ModelError."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.models.model_folder import open_model
from headrace.models.packing import load_tensors
from headrace.models.weight_choice import choose_plan
from tests.models.gguf.test_gguf_tokenizer import sentencepiece, vocabulary_file


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabulary_file(tmp_path_factory.mktemp("gguf") / "model.gguf", sentencepiece(prefix=True))


def use(path: Path) -> None:
    model = open_model(path)
    assert model.shapes
    model.tokenizer.encode("the fox <s> jumps")
    model.decoding_tokenizer.decode([5, 6])


KEYS = (
    "llama.context_length llama.embedding_length llama.block_count llama.feed_forward_length llama.attention.head_count"
    " llama.attention.layer_norm_rms_epsilon llama.rope.dimension_count llama.rope.freq_base llama.rope.scaling.type"
    " llama.rope.scaling.factor llama.attention.key_length llama.attention.value_length llama.attention.sliding_window"
    " general.type general.alignment split.count tokenizer.ggml.model tokenizer.ggml.tokens tokenizer.ggml.scores"
    " tokenizer.ggml.token_type tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.add_space_prefix"
    " tokenizer.chat_template"
).split()
# Of architectures whose keys decide layers, experts and states, each with a file of that name.
OTHERS = {
    "deepseek2": "attention.kv_lora_rank attention.q_lora_rank attention.key_length_mla attention.value_length_mla "
    "rope.dimension_count expert_count expert_used_count expert_group_count leading_dense_block_count",
    "gemma3n": "altup.num_inputs activation_sparsity_scale attention.sliding_window_pattern attention.shared_kv_layers",
    "gemma4": "attention.sliding_window_pattern attention.head_count_kv attention.key_length_swa feed_forward_length "
    "attention.shared_kv_layers embedding_length_per_layer_input expert_count",
    "granitehybrid": "attention.head_count_kv ssm.time_step_rank ssm.inner_size ssm.group_count ssm.conv_kernel",
    "lfm2": "attention.head_count_kv shortconv.l_cache",
    "mpt": "attention.max_alibi_bias",
    "nemotron_h_moe": "attention.head_count_kv feed_forward_length ssm.time_step_rank expert_gating_func",
    "qwen35moe": "attention.recurrent_layers full_attention_interval ssm.time_step_rank ssm.inner_size "
    "nextn_predict_layers block_count rope.dimension_sections",
    "qwen3vl": "rope.dimension_sections n_deepstack_layers",
    "bert": "pooling_type attention.causal attention.layer_norm_epsilon",
}
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([-1, 0, 1, 3, 1 << 20, 0xFFFF_FFFF, (1 << 63) - 1]),
    st.sampled_from([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")]),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(-5, 300), min_size=1, max_size=4),
    st.lists(st.text(max_size=3), min_size=1, max_size=4),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_of_a_key_is_read_or_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.unlink(missing_ok=True)

    def write(writer: gguf.GGUFWriter) -> int:
        size = sentencepiece(prefix=True)(writer)
        writer.kv_data[0].pop(key, None)
        add = {bool: writer.add_bool, float: writer.add_float64, str: writer.add_string, list: writer.add_array}
        add.get(type(value), writer.add_int64)(key, value)
        duplicate = writer.add_key_value
        # What the shape says afterwards does not replace the value.
        writer.add_key_value = lambda name, *rest, **more: None if name == key else duplicate(name, *rest, **more)
        return size

    vocabulary_file(path, write)
    with contextlib.suppress(ModelError):
        use(path)


# A healthy file of each is far from needed: every key is read before a tensor is.
COMMON: dict[str, Any] = {
    "context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 32,
    "attention.head_count": 2, "attention.head_count_kv": [2, 0], "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16,
    "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 16, "expert_shared_count": 1,
    "attention.kv_lora_rank": 16, "rope.dimension_count": 8, "rope.dimension_sections": [2, 2, 4, 0],
    "attention.sliding_window": 8, "attention.sliding_window_pattern": [1, 0], "altup.num_inputs": 4,
    "activation_sparsity_scale": [0.5, 0.5], "ssm.time_step_rank": 4, "ssm.inner_size": 64, "ssm.group_count": 2,
    "ssm.state_size": 8, "ssm.conv_kernel": 4, "shortconv.l_cache": 3, "embedding_length_per_layer_input": 0,
}  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_other_architectures_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    name = data.draw(st.sampled_from(sorted(OTHERS)))
    key, value = data.draw(st.sampled_from(OTHERS[name].split())), data.draw(VALUES)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), name)
    for each, common in (COMMON | {key: value}).items():
        add = {bool: writer.add_bool, float: writer.add_float64, str: writer.add_string, list: writer.add_array}
        add.get(type(common), writer.add_int64)(f"{name}.{each}", common)
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with contextlib.suppress(ModelError):
        use(tmp_path / "model.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4), cut=st.booleans())
def test_changed_and_cut_files_are_read_or_refused(
    edits: list[tuple[float, int]], cut: bool, healthy: Path, tmp_path: Path
) -> None:
    data = bytearray(healthy.read_bytes())
    header = len(data) // 3  # metadata and the table
    for place, value in edits:
        data[int(place * (header - 1))] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(data[: int(edits[0][0] * len(data))] if cut else data)
    with contextlib.suppress(ModelError):
        use(path)


def test_infinite_scales_are_refused_by_tensor(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path / "model.gguf", sentencepiece(prefix=True))
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(str(tmp_path / "bad.gguf"), "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name == "blk.0.attn_output.weight":
            data = gguf.quantize(np.array(tensor.data), gguf.GGMLQuantizationType.Q8_0)
            data[3, :2] = (0x00, 0x7C)  # infinity in f16
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_model(tmp_path / "bad.gguf")

    import headrace._core as _core

    with pytest.raises(ModelError, match="NaN or infinity") as caught:
        load_tensors(model, choose_plan(model), _core.Pool(1), cache=None)
    assert caught.value.tensor == "blk.0.attn_output.weight"
