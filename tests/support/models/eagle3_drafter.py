"""An EAGLE-3 drafter in its published layouts, with random weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.spec import ModelSpec

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, CHOSEN = 128, 4, 2, 32, 96, 512


def drafter_config(target: ModelSpec, **changes: Any) -> dict[str, Any]:
    """As SGLang and SpecForge write it."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": CHOSEN,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": target.vocab_size,
    }
    return config | changes


def nested_config(target: ModelSpec, **changes: Any) -> dict[str, Any]:
    """As speculators writes it, for vLLM."""
    layer = drafter_config(target)
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
    } | changes


def drafter_tensors(target: ModelSpec, layer: str = "midlayer", **more: tuple[int, ...]) -> dict[str, Any]:
    """The tensors of a drafter by their names on disk; `more` are shapes of further ones."""
    random = np.random.default_rng(5)
    wide, width = 2 * HIDDEN, target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * width),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (CHOSEN, HIDDEN),
        f"{layer}.hidden_norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, wide),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, wide),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, wide),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
        f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
    } | more
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        drawn = random.normal(0.0, 0.3 if len(shape) == 1 else 1.5 / shape[1] ** 0.5, shape)
        found[name] = (drawn + ("norm" in name)).astype(np.float32)
    chosen = np.sort(random.choice(target.vocab_size, CHOSEN, replace=False))
    found["d2t"] = chosen - np.arange(CHOSEN)
    found["t2d"] = np.isin(np.arange(target.vocab_size), chosen)
    return found


def write_drafter(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    kinds = {"float32": "F32", "int64": "I64", "bool": "BOOL"}
    path.mkdir(parents=True, exist_ok=True)
    entries = {
        name: (kinds[str(value.dtype)], value.shape, lambda value=value: [value.reshape(-1).view(np.uint8)])
        for name, value in tensors.items()
    }
    write_safetensors(path / "model.safetensors", entries)
    (path / "config.json").write_text(json.dumps(config))
    return path
