"""Families turn configs into specs and file names into sources, without running a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.bench.planning.model_costs import model_costs
from headrace.bench.roofline import kv_bytes_per_token
from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.families import FAMILIES, HEADLESS, RERANKERS, TensorPart, family_of, family_sources, model_spec
from headrace.models.families.family import MODEL_TYPES
from headrace.models.model_folder import open_model
from headrace.models.precision import parse_plan
from headrace.models.spec import ModelSpec
from headrace.models.step_work import step_work
from headrace.models.tensor_shapes import tensor_shapes
from tests.models.tiny_configs import CONTEXT, WINDOW
from tests.models.tiny_models import TINY, Reference, saved_config, spec_of

Tiny = Callable[[str], Reference]

# Heads and eyes that Headrace does not run: it embeds and generates text.
UNUSED = (
    *(
        "pooler.",
        "cls.predictions.",
        "multi_modal_projector.",
        "vision_tower.",
        "model.vision_tower.",
        "model.embed_vision.",
        "head.",
        "decoder.",
    ),
    *("lm_head.bias", "lm_head.decoder.", "lm_head.dense.", "lm_head.layer_norm."),
)


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for index, path in enumerate(sorted(folder.glob("*_Dense/*.safetensors"))):
        with safe_open(path, "np") as file:
            names = list(file.keys())
            shapes |= {f"dense.{index}.{name}": tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def sources_of(
    values: dict[str, Any], names: frozenset[str], folder: Path = Path("model")
) -> dict[str, tuple[TensorPart, ...]]:
    config = ConfigJson(values, path=folder / "config.json")
    return family_sources(family_of(config), model_spec(config), names)


def split_shape(part: TensorPart, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the rows that a part takes from its tensor."""
    if part.split is None:
        return shape
    sizes, place = part.split
    assert shape[0] % sum(sizes) == 0
    return (shape[0] // sum(sizes) * sizes[place], *shape[1:])


@pytest.mark.parametrize("name", TINY)
def test_sources_join_to_the_canonical_shapes_and_leave_no_weight_out(name: str, tiny: Tiny) -> None:
    reference = tiny(name)
    values, saved = saved_config(reference), saved_shapes(reference.folder)
    spec = spec_of(values, reference.folder)
    sources = sources_of(values, frozenset(saved), reference.folder)
    joined: dict[str, tuple[int, ...]] = {}
    for canonical, parts in sources.items():
        shapes = [saved[part.name] if part.index is None else saved[part.name][1:] for part in parts]
        shapes = [(math.prod(shape),) if part.flat else shape for shape, part in zip(shapes, parts, strict=True)]
        shapes = [shape[::-1] if part.transposed else shape for shape, part in zip(shapes, parts, strict=True)]
        shapes = [split_shape(part, shape) for shape, part in zip(shapes, parts, strict=True)]
        shapes = [
            part.by_head.of(np.zeros(shape)).shape if part.by_head else shape
            for shape, part in zip(shapes, parts, strict=True)
        ]
        assert len({shape[1:] for shape in shapes}) == 1
        joined[canonical] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    assert joined == tensor_shapes(spec)
    unused = set(saved) - {part.name for parts in sources.values() for part in parts}
    assert [left for left in unused if not left.startswith(UNUSED)] == []
    for parts in sources.values():
        for part in parts:
            experts = spec.experts.count if spec.experts else 0
            assert part.index is None or 0 <= part.index < experts == saved[part.name][0]


def test_fused_experts_are_taken_one_by_one(tiny: Tiny) -> None:
    for name, feed in (("qwen3-moe-fused", "model.layers.1.mlp"), ("mixtral-fused", "model.layers.1.mlp")):
        reference = tiny(name)
        sources = sources_of(saved_config(reference), frozenset(saved_shapes(reference.folder)))
        assert sources["layers.1.mlp.experts.3.gate_up"] == (TensorPart(f"{feed}.experts.gate_up_proj", 3),)
        assert sources["layers.1.mlp.experts.3.down"] == (TensorPart(f"{feed}.experts.down_proj", 3),)
        assert sources["layers.1.mlp.router"] == (TensorPart(f"{feed}.gate.weight"),)


def test_experts_of_hub_checkpoints_are_joined_gate_first(tiny: Tiny) -> None:
    sources = sources_of(saved_config(tiny("mixtral")), frozenset())
    feed = "model.layers.0.block_sparse_moe.experts.2"
    assert sources["layers.0.mlp.experts.2.gate_up"] == (
        TensorPart(f"{feed}.w1.weight"),
        TensorPart(f"{feed}.w3.weight"),
    )
    assert sources["layers.0.mlp.experts.2.down"] == (TensorPart(f"{feed}.w2.weight"),)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_gemma3_text_is_found_under_each_prefix_it_ever_had(prefix: str, tiny: Tiny) -> None:
    names = frozenset({f"{prefix}embed_tokens.weight"})
    sources = sources_of(saved_config(tiny("gemma3-vision")), names)
    assert sources["embed"] == (TensorPart(f"{prefix}embed_tokens.weight"),)
    assert sources["layers.0.mlp.norm"] == (TensorPart(f"{prefix}layers.0.pre_feedforward_layernorm.weight"),)


def test_norms_of_the_first_bert_checkpoints_are_found(tiny: Tiny) -> None:
    stem = "bert.embeddings.LayerNorm"
    names = frozenset({"bert.embeddings.word_embeddings.weight", f"{stem}.gamma", f"{stem}.beta"})
    sources = sources_of(saved_config(tiny("bert")), names)
    assert sources["embed_norm"] == (TensorPart(f"{stem}.gamma"),)
    assert sources["embed_norm.bias"] == (TensorPart(f"{stem}.beta"),)
    assert sources["layers.2.mlp.residual_norm"] == (TensorPart("bert.encoder.layer.2.output.LayerNorm.weight"),)


def test_tied_embedding_saved_only_as_the_head_is_found(tiny: Tiny) -> None:
    sources = sources_of(saved_config(tiny("qwen2")), frozenset({"lm_head.weight"}))
    assert sources["embed"] == (TensorPart("lm_head.weight"),)


def test_layers_have_the_windows_ropes_and_experts_of_their_family(tiny: Tiny) -> None:
    def layers(name: str) -> list[tuple[int, int | None, bool]]:
        spec = spec_of(saved_config(tiny(name)), tiny(name).folder)
        return [(layer.window, layer.rope, layer.experts) for layer in spec.layers]

    assert layers("llama") == [(0, 0, False)] * 3
    assert layers("mistral") == [(WINDOW, 0, False)] * 3
    assert layers("smollm3") == [(0, 0, False), (WINDOW, None, False)] * 2
    assert layers("qwen2") == [(0, 0, False), (WINDOW, 0, False), (WINDOW, 0, False)]
    assert layers("qwen3") == [(0, 0, False), (WINDOW, 0, False), (0, 0, False)]
    assert layers("qwen3-moe") == [(0, 0, True), (0, 0, False), (0, 0, True)]
    assert layers("qwen3-moe-fused") == [(WINDOW, 0, False), (WINDOW, 0, True), (WINDOW, 0, False)]
    assert layers("gemma2") == [(WINDOW, 0, False), (0, 0, False)]
    assert layers("gemma3") == [(WINDOW, 1, False)] * 2 + [(0, 0, False), (WINDOW, 1, False)]
    assert layers("mixtral-fused") == [(WINDOW, 0, True)] * 3
    assert layers("bert") == [(0, None, False)] * 3
    near = (WINDOW // 2 + 1, 1, False)  # a token and half of the window on each side
    assert layers("modernbert") == [(0, 0, False), near, near, (0, 0, False), near]
    assert layers("modernbert-mlm") == [(16, 1, False), (0, 0, False), (16, 1, False)]
    assert layers("embedding-gemma") == [near, (0, 0, False)] * 2


def test_gemma_scales_and_caps_are_read(tiny: Tiny) -> None:
    spec = spec_of(saved_config(tiny("gemma2")))
    assert spec.attention_scale == 20**-0.5
    assert (spec.attention_softcap, spec.logit_softcap, spec.embedding_scale) == (4.0, 9.0, 8.0)
    assert (spec.norm_offset, spec.out_norm, spec.pre_norm, spec.tied) == (1.0, True, True, True)
    spec = spec_of(saved_config(tiny("gemma3")))
    assert (spec.attention_softcap, spec.logit_softcap, spec.qk_norm) == (0.0, 0.0, "head")


def test_sparse_gemma3_config_of_the_hub_is_filled_in() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (spec.vocab_size, spec.heads, spec.kv_heads, spec.head_size) == (262_208, 8, 4, 256)
    assert [layer.window for layer in spec.layers[:7]] == [1024] * 5 + [0, 1024]
    assert [spec.ropes[rope].inv_freq[0] for rope in (0, 1)] == [0.125, 1.0]
    assert spec.context == 131_072


def test_a_published_config_of_gemma3n_shares_keys_and_values_by_kind() -> None:
    text = {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "altup_coef_clip": 120.0,
        "altup_lr_multiplier": 1.0,
        "hidden_size": 2048,
        "intermediate_size": [8192] * 30,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 10,
        "max_position_embeddings": 32_768,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_400,
    }
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"hidden_size": 1536}}
    spec = spec_of({**config, "text_config": text, "audio_soft_tokens_per_image": 188})
    assert spec.kv_layers == 20
    assert [layer.shares for layer in spec.layers[18:26]] == [None, None, 18, 18, 18, 18, 19, 18]
    assert [layer.window for layer in spec.layers[:6]] == [512] * 4 + [0, 512]
    assert [layer.gate_cutoff is None for layer in spec.layers[8:12]] == [False, False, True, True]


def test_layers_of_gemma4_have_the_heads_of_their_kind(tiny: Tiny) -> None:
    dense, experts = (open_model(tiny(name).folder).spec for name in ("gemma4", "gemma4-experts"))
    assert dense.kv_shapes == ((2, 24, 24), (2, 40, 40)) * 2
    assert [layer.shares for layer in dense.layers] == [None, None, None, None, 2, 3]
    assert [dense.inner_size(layer) for layer in dense.layers] == [96, 96, 96, 96, 192, 192]
    assert experts.kv_shapes == ((2, 32, 32), (2, 32, 32), (1, 48, 48))
    assert [layer.keys_as_values for layer in experts.layers] == [False, False, True]
    assert [len(rope.inv_freq) for rope in experts.ropes] == [24, 16]
    assert experts.ropes[0].inv_freq[5] > 0 == experts.ropes[0].inv_freq[6]  # a quarter of a head turns
    for spec, bytes_per_token in ((dense, 2 * 4 * 2 * (24 + 40) * 2), (experts, 2 * 4 * (2 * 2 * 32 + 48))):
        work = step_work(spec, parse_plan("f32"), bytes_per_token)
        shapes = [spec.kv_shape(layer) for layer in spec.layers]
        assert work.operations_per_pair == sum(4.0 * spec.heads * size for _, size, _ in shapes)
        assert work.kv_bytes_per_token == pytest.approx(sum(4.0 * 2 * heads * size for heads, size, _ in shapes))


def test_kv_memory_keeps_the_latent_of_deepseek(tiny: Tiny) -> None:
    reference = tiny("deepseek-v3")
    spec = open_model(reference.folder).spec
    assert spec.kv_shapes == ((1, 8 + 40, 40),) * len(spec.layers)
    assert spec.kv_numbers == (8 + 40) * len(spec.layers)
    assert kv_bytes_per_token(spec)["f32"] == 4 * spec.kv_numbers
    # Wider than a key of the core's KV memory.
    wide = spec_of(saved_config(reference) | {"kv_lora_rank": 1024}, reference.folder)
    assert wide.kv_shapes == ((4, 24, 12),) * len(spec.layers)
    assert wide.kv_numbers == 4 * (24 + 12) * len(spec.layers)


def test_layers_that_attend_are_counted_wherever_their_keys_are(tiny: Tiny) -> None:
    def costs(name: str) -> tuple[int, int, float, float]:
        spec = open_model(tiny(name).folder).spec
        work = step_work(spec, parse_plan("f32"), 6.0 * spec.kv_layers)
        planned = model_costs(spec, "bf16", "headrace")
        assert work.operations_per_pair == planned.pair
        attending = sum(layer.attends for layer in spec.layers)
        assert planned.kv_read * spec.kv_layers == planned.kv_token * attending
        return spec.kv_layers, attending, work.operations_per_pair / spec.q_size, work.kv_bytes_per_token

    assert costs("llama") == (3, 3, 12.0, 18.0)
    assert costs("gemma3n") == (3, 5, 20.0, 30.0)  # two layers read what others computed
    assert costs("bert") == (1, 3, 12.0, 18.0)  # whose layers take turns with one layer's memory
    assert costs("mamba2") == (1, 0, 0.0, 0.0)


# How a config of transformers 4, and so nearly every one on the hub, says the same.
TWO_ROPES = {"olmo3", "embedding-gemma"} | {name for name in TINY if name.startswith(("gemma3", "gemma4"))}
LEGACY = sorted(
    name for name in set(TINY) - TWO_ROPES if TINY[name].saved is None and not name.startswith("modernbert")
)


def legacy_config(values: dict[str, Any]) -> dict[str, Any]:
    values = dict(values)
    values["torch_dtype"] = values.pop("dtype")
    rope = values.pop("rope_parameters", None)
    if rope is not None:
        values["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return values


@pytest.mark.parametrize("name", LEGACY)
def test_old_form_of_a_config_says_the_same(name: str, tiny: Tiny) -> None:
    reference = tiny(name)
    values = saved_config(reference)
    old = spec_of(legacy_config(saved_config(reference)), reference.folder)
    assert old == spec_of(values, reference.folder)


def test_old_form_of_gemma3_ropes_says_the_same(tiny: Tiny) -> None:
    values = saved_config(tiny("gemma3"))
    expected = spec_of(values)
    full, local = (values["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    del values["rope_parameters"], values["layer_types"]
    values |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    values["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    assert spec_of(values) == expected


def test_a_published_config_of_olmo3_stretches_the_rope_of_full_layers_alone(tiny: Tiny) -> None:
    values = saved_config(tiny("olmo3"))
    expected = spec_of(values)
    full = values.pop("rope_parameters")["full_attention"]
    del values["layer_types"]
    values |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    assert spec_of(values) == expected


def test_granite_folds_its_factors_into_sizes_that_the_core_knows(tiny: Tiny) -> None:
    spec = spec_of(saved_config(tiny("granite")))
    assert spec.embedding_scale == pytest.approx(12 / 0.22)
    assert spec.norm_eps == pytest.approx(1e-3 / 0.22**2)
    assert (spec.attention_scale, spec.logit_scale) == (0.125, 0.125)


def test_queries_and_keys_of_glm_are_read_in_pairs(tiny: Tiny) -> None:
    folder = open_model(tiny("glm").folder)
    query, key, value = folder.sources["layers.0.attn.qkv"]
    assert (query.pairs, key.pairs, value.pairs) == ((24, 12), (24, 12), None)
    order = query.row_order(48)
    assert order is not None
    assert order[:14].tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, 12, 13]
    assert sorted(order.tolist()) == list(range(48))


def test_a_config_of_modernbert_says_the_same_as_on_the_hub(tiny: Tiny) -> None:
    values = saved_config(tiny("modernbert"))
    expected = spec_of(values)
    del values["rope_parameters"], values["layer_types"]
    values |= {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    values |= {"position_embedding_type": "absolute", "layer_norm_eps": 1e-5, "reference_compile": None}
    assert spec_of(values) == expected


def test_a_config_of_nomic_says_the_same_in_both_forms(tiny: Tiny) -> None:
    own, new = (spec_of(saved_config(tiny(name))) for name in ("nomic", "nomic-transformers"))
    assert own == new


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prenorm", True),
        ("causal", True),
        ("use_rms_norm", True),
        ("rotary_emb_fraction", 0.5),
        ("rotary_emb_scale_base", 512),
        ("num_experts", 8),
        ("activation_function", "relu2"),
        ("mlp_fc1_bias", True),
    ],
)
def test_variants_of_nomic_that_nobody_publishes_are_refused(key: str, value: object, tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=key):
        spec_of(saved_config(tiny("nomic")) | {key: value})


def test_a_scaled_rope_of_nomic_ends_at_the_trained_positions(tiny: Tiny) -> None:
    values = saved_config(tiny("nomic")) | {"max_trained_positions": 128}
    assert spec_of(values).context == 512
    assert spec_of(values | {"rotary_scaling_factor": 2}).context == 128


def test_positions_of_a_roberta_begin_after_padding(tiny: Tiny) -> None:
    spec = spec_of(saved_config(tiny("bge-m3")))
    assert (spec.position_offset, spec.learned_positions, spec.context) == (2, CONTEXT + 1, CONTEXT + 1)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        spec_of(saved_config(tiny("bge-m3")) | {"max_position_embeddings": 2})


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_plain_llama_config_needs_no_more_than_its_sizes() -> None:
    spec = spec_of(LLAMA)
    assert (spec.head_size, spec.norm_eps, spec.tied, spec.activation) == (16, 1e-6, False, "silu")
    assert spec.attention_scale == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size.*integer.*64.0"),
        ({"hidden_size": True}, "hidden_size.*integer.*true"),
        ({"hidden_size": "64"}, "hidden_size.*integer.*'64'"),
        ({"hidden_size": None}, "hidden_size.*null"),
        ({"vocab_size": 10**400}, "vocab_size.*bits"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads.*divisor"),
        ({"head_dim": 15}, "head_dim.*even"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"hidden_act": "xielu"}, "hidden_act.*'xielu'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings.*true or false"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"quantization_config": "awq"}, "quantization_config.*object.*'awq'"),
        ({"text_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]}, "text_config.*missing"),
        ({"rope_scaling": []}, "rope_scaling.*object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor.*missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "Unsupported rope 'ntk'.*batch"),
        ({"rope_scaling": {"type": "sideways"}}, "Unsupported rope 'sideways'.*supported are default"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor.*list of 8 numbers",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}},
            "high_freq_factor",
        ),
        ({"architectures": ["MambaForCausalLM"]}, "Unknown architecture 'MambaForCausalLM'.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [7]}, "architectures"),
        ({"vocab_size": 1 << 23, "hidden_size": 1 << 17, "intermediate_size": 1 << 20}, "parameters"),
    ],
)
def test_hostile_config_is_refused_with_its_path_and_key(change: dict[str, Any], message: str) -> None:
    values = {**LLAMA, **change}
    if change.get("vocab_size") == 1 << 23:
        values |= {"num_hidden_layers": 1024, "num_attention_heads": 1024, "num_key_value_heads": 1024}
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(values)
    assert caught.value.path == str(Path("model/config.json"))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen2", {"sliding_window": None}, "layer_types.*sliding window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types.*list of 3"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "x"]}, "layer_types.*'linear_attention'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3-moe", {"num_experts": 10**9, "num_local_experts": 10**9}, "num_.*experts"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("mixtral", {"num_experts": 4096, "num_local_experts": 4096, "num_hidden_layers": 1024}, "experts"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("phi3", {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "Unsupported rope 'llama3'"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type.*absolute"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"num_attention_heads": 7}, "num_attention_heads"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "Unknown architecture"),
    ],
)
def test_unsupported_features_are_rejected_by_name(name: str, change: dict[str, Any], message: str, tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of({**saved_config(tiny(name)), **change}, tiny(name).folder)


def test_no_two_families_claim_an_architecture() -> None:
    claimed = [name for family in FAMILIES for name in family.architectures]
    assert len(claimed) == len(set(claimed))
    assert not set(claimed) & set(HEADLESS)
    assert not {*claimed, *HEADLESS} & set(RERANKERS)
    assert {*claimed, *HEADLESS, *RERANKERS} >= {tiny.architecture for tiny in TINY.values()}
    assert set(claimed) >= {*HEADLESS.values(), *RERANKERS.values()}


def spec_or_error(values: dict[str, Any], folder: Path) -> ModelSpec | ModelError:
    try:
        return spec_of(values, folder)
    except ModelError as error:
        return error


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([10**12, -(10**12), 10**400, 2**31, 2**63, 1 << 20]),
    st.floats(),
    st.floats(-1e9, 1e9),
    st.text(max_size=8),
    st.sampled_from(["silu", "gelu", "linear", "yarn", "longrope", "llama3", "dynamic", "default", "full_attention"]),
    st.lists(st.one_of(st.integers(-2, 9), st.floats(), st.text(max_size=3)), max_size=13),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), st.integers(-1, 3), max_size=3
    ),
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_config_gives_a_sane_spec_or_a_model_error(data: st.DataObject, tiny: Tiny) -> None:
    reference = tiny(data.draw(st.sampled_from(sorted(TINY))))
    values = saved_config(reference)
    for _ in range(data.draw(st.integers(1, 3))):
        target = values
        for nested in ("text_config", "rope_parameters", "full_attention"):
            if isinstance(target.get(nested), dict) and target[nested] and data.draw(st.booleans()):
                target = target[nested]
        key = data.draw(st.sampled_from([*sorted(target), "rope_scaling", "partial_rotary_factor", "rope_theta"]))
        if data.draw(st.booleans()):
            target[key] = data.draw(HOSTILE)
        else:
            target.pop(key, None)
    spec = spec_or_error(values, reference.folder)
    if isinstance(spec, ModelError):
        assert spec.path is not None
        assert len(str(spec)) < 700
        return
    assert spec.heads % spec.kv_heads == 0
    assert all(layer.rope is None or layer.rope < len(spec.ropes) for layer in spec.layers)
    largest_head = max(spec.head_size, *(key_size for _, key_size, _ in spec.kv_shapes))
    for rope in spec.ropes:
        assert 2 <= 2 * len(rope.inv_freq) <= largest_head
        assert all(math.isfinite(value) and value == np.float32(value) for value in rope.inv_freq)
    numbers = [value for value in msgspec.structs.astuple(spec) if isinstance(value, float)]
    assert all(math.isfinite(value) for value in numbers)
    assert all(size > 0 for shape in tensor_shapes(spec).values() for size in shape)


# Keys of published configs, without those of training and generation.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "vocab_size": 50257,
    },
    "falcon-7b": {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "bloom-560m": {
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["BloomForCausalLM"],
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True,
        "n_embed": 1024,
        "n_inner": None,
        "n_layer": 24,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "vocab_size": 250880,
    },
    "mpt-7b": {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "d_model": 4096,
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_config": {"name": "kaiming_normal_"},
        "init_device": "cpu",
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 2048,
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "vocab_size": 50432,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    values = PUBLISHED[name]
    spec = spec_of(values)
    assert spec.vocab_size == values["vocab_size"]
    found = {
        "gpt-oss-20b": (spec.kv_heads, spec.layers[0].window, spec.layers[1].window, spec.gate_limit),
        "gpt2": (spec.intermediate_size, spec.learned_positions, spec.tied, spec.head_size),
        "falcon-7b": (spec.heads, spec.kv_heads, spec.intermediate_size, spec.shared_norm),
        "bloom-560m": (spec.context, spec.intermediate_size, spec.embedding_norm, spec.alibi[:2]),
        "mpt-7b": (spec.context, spec.norm_bias, spec.alibi[:2], spec.attention_scale),
    }
    expected: dict[str, Any] = {
        "gpt-oss-20b": (8, 128, 0, 7.0),
        "gpt2": (3072, 1024, True, 64),
        "falcon-7b": (71, 1, 18176, True),
        "bloom-560m": (2048, 4096, True, (float(np.float32(2**-0.5)), 0.5)),
        "mpt-7b": (2048, False, (float(np.float32(2**-0.25)), float(np.float32(2**-0.5))), 128**-0.5),
    }
    assert found[name] == expected[name]


def test_a_config_without_architectures_is_read_by_its_model_type(tiny: Tiny) -> None:
    for name in ("llama", "gpt2", "bert", "deepseek-v3"):
        values = saved_config(tiny(name))
        expected = spec_of(values, tiny(name).folder)
        for none in ({}, {"architectures": None}, {"architectures": []}):
            without = {key: value for key, value in values.items() if key != "architectures"} | none
            assert spec_of(without, tiny(name).folder) == expected
    with pytest.raises(ModelError, match="architectures"):
        spec_of({**values, "architectures": None, "model_type": "mamba"})


def test_every_model_type_has_a_family() -> None:
    known = {name for family in FAMILIES for name in family.architectures}
    assert set(MODEL_TYPES.values()) <= known
