"""Rope tables agree with those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.models.config_json import ConfigJson
from headrace.models.rope import read_rope
from headrace.models.spec import RopeSpec
from tests.models.tiny_models import DECODERS, Reference, saved_config, spec_of

Tiny = Callable[[str], Reference]

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-deepseek": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-given": {"factor": 8.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
    "longrope": {
        "short_factor": [1 + 0.01 * pair for pair in range(64)],
        "long_factor": [2 + 0.7 * pair for pair in range(64)],
        "original_max_position_embeddings": 4096,
    },
}


def rope_tables(spec: RopeSpec) -> tuple[np.ndarray, np.ndarray | None]:
    long = None if spec.long_inv_freq is None else np.array(spec.long_inv_freq, dtype=np.float32)
    return np.array(spec.inv_freq, dtype=np.float32), long


def assert_same_table(found: np.ndarray, expected: np.ndarray) -> None:
    # The reference's powers come from a vector library and may be two units in the last place off; ours are not.
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)
    assert (found == expected).mean() > 0.9


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_tables_are_those_of_transformers(kind: str, theta: float) -> None:
    parameters = {"rope_type": kind.split("-")[0], "rope_theta": theta, **ROPES[kind]}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    reference = LlamaRotaryEmbedding(config)
    spec = read_rope(
        ConfigJson({"max_position_embeddings": 131072, "rope_parameters": parameters}, path=Path("config.json")), 128
    )
    table, long = rope_tables(spec)
    assert_same_table(table, reference.inv_freq.numpy())
    assert spec.scale == np.float32(reference.attention_scaling)
    if long is not None:
        reference(torch.zeros(1), torch.tensor([[spec.original_context]]))  # one past it: the long table
        assert_same_table(long, reference.inv_freq.numpy())
        assert spec.long_scale == spec.scale


# transformers keeps the ropes of these elsewhere; the golden tests compare their logits past every trained context.
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ("mistral3", "olmo3", "gptj")])
def test_ropes_of_tiny_models_are_those_of_transformers(name: str, tiny: Tiny) -> None:
    spec = spec_of(saved_config(tiny(name)))
    if "gemma3" in name or "gemma4" in name:
        base = tiny(name).model.model
        rotary = getattr(base, "language_model", base).rotary_emb
        expected = [rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq]
    else:
        ropes = (module for name, module in tiny(name).model.named_modules() if name.endswith("rotary_emb"))
        expected = [rope.original_inv_freq for rope in ropes]
    assert len(spec.ropes) == len(expected)
    for found, table in zip(spec.ropes, expected, strict=True):
        assert_same_table(rope_tables(found)[0], table.numpy())


def test_long_table_is_for_sequences_that_may_pass_the_trained_context(tiny: Tiny) -> None:
    spec = spec_of(saved_config(tiny("phi3")))
    assert spec.ropes[0].original_context == 128
    assert [spec.rope_variant(total) for total in (1, 128, 129)] == [0, 0, 1]
    assert 2 * len(spec.ropes[0].inv_freq) == 24 < spec.head_size == 32


def test_early_names_of_longrope_are_known(tiny: Tiny) -> None:
    values = saved_config(tiny("phi3"))
    expected = spec_of(values)
    for name in ("su", "yarn"):
        values["rope_parameters"]["rope_type"] = name
        assert spec_of(values) == expected


def test_scales_of_longrope_may_differ(tiny: Tiny) -> None:
    (rope,) = spec_of(saved_config(tiny("phimoe"))).ropes
    assert (rope.scale, rope.long_scale) == (np.float32(1.1), np.float32(1.25))
    assert rope.long_inv_freq is not None
    assert rope.long_inv_freq != rope.inv_freq
