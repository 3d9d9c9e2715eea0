"""Tiny models whose GGUF files are compared with their folders: those of the golden tests, changed where GGUF has no
key for something."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.tiny_configs import CONTEXT, SIZES, WINDOW
from tests.models.tiny_models import TINY, randomise, write_tokenizer


@dataclass(frozen=True)
class Made:
    """How to make one folder: the tiny model to start from, and what differs."""

    tiny: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    saved: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # changes config.json
    config: Callable[[], Any] | None = None


def _mixers(saved: dict[str, Any]) -> dict[str, Any]:
    """As Granite 4 is published."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return {**saved, "layer_types": [names.get(kind, kind) for kind in saved["layer_types"]]}


def _having(saved: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**saved, **more}


def _without(key: str, saved: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in saved.items() if name != key}


def _phimoe() -> Any:
    config = TINY["phimoe"].config()
    config.router_jitter_noise = 0.01
    config.sliding_window = WINDOW
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": CONTEXT,
    }
    return config


def _gemma3n() -> Any:
    return transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 5},
        head_dim=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.8, 0.6, 0.0, 0.0, 0.3],
        vocab_size_per_layer_input=SIZES["vocab_size"],
        hidden_size_per_layer_input=20,
        laurel_rank=12,
    )


_COHERE2_KINDS = ["sliding_attention"] * 3 + ["full_attention"]
_KINDS = ["linear_attention", "moe", "full_attention", "moe"]
_MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}

MADE: dict[str, Made] = {
    "mixtral": Made("mixtral"),
    "qwen2moe": Made("qwen2-moe", {"mlp_only_layers": []}),
    "qwen3moe": Made("qwen3-moe", {"mlp_only_layers": []}),
    "gemma": Made("gemma"),
    "gemma3n": Made("gemma3n", config=_gemma3n),
    "gemma4": Made("gemma4"),
    "gemma4-experts": Made("gemma4-experts"),
    "phi2": Made("phi", {"num_key_value_heads": 4, "intermediate_size": 256}),
    "phimoe": Made("phimoe", config=_phimoe),
    "ministral3": Made("ministral3"),
    "olmo3": Made("olmo3"),
    "olmoe": Made("olmoe"),
    "gpt-oss": Made("gpt-oss", {"swiglu_limit": 7.0}),
    "deepseek2-lite": Made("deepseek-v2-lite"),
    "deepseek2": Made("deepseek-v2", {"rope_parameters": _MSCALE}),
    "deepseek3": Made("deepseek-v3", saved=partial(_having, scoring_func="sigmoid")),
    "glm4": Made("glm4"),
    "glm4moe": Made("glm4-moe"),
    "granite": Made("granite"),
    "granitemoe": Made("granite-moe"),
    "command-r": Made("cohere"),
    "command-r-plus": Made("command-r-plus"),
    "cohere2": Made("cohere2", {"layer_types": _COHERE2_KINDS, "rotary_pct": 1.0}),
    "ernie4_5": Made("ernie"),
    "ernie4_5-moe": Made("ernie-moe"),
    "exaone4": Made("exaone4"),
    "exaone4-full": Made("exaone4-tied"),
    "seed_oss": Made("seed-oss"),
    "minimax-m2": Made("minimax-m2", saved=partial(_having, rotary_dim=12)),
    "llama4": Made("llama4", {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}),
    "starcoder2": Made("starcoder2", {"sliding_window": 4096}),
    "stablelm": Made("stablelm"),
    "stablelm-12b": Made("stablelm-12b"),
    "nemotron": Made("nemotron"),
    "arcee": Made("arcee"),
    "lfm2": Made("lfm2", {"conv_bias": False}),
    "mamba2": Made("mamba2", {"time_step_limit": (0.0, math.inf)}),
    "bamba": Made("bamba"),
    "granitehybrid": Made("granite-4", saved=_mixers),
    "granitehybrid-dense": Made("granite-4-dense-plain", {"position_embedding_type": "nope"}, _mixers),
    "falcon-h1": Made("falcon-h1"),
    "nemotron_h": Made("nemotron-h-plain", saved=partial(_without, "num_experts_per_tok")),
    "nemotron_h_moe": Made("nemotron-h", {"layers_block_type": _KINDS, "mamba_head_dim": 16}),
    "qwen3next": Made("qwen3-next", {"mlp_only_layers": []}),
    "qwen35": Made("qwen3.5", {"attention_bias": False}),
    "qwen35moe": Made("qwen3.5-moe"),
    "gpt2": Made("gpt2", {"n_inner": None}, partial(_having, n_ctx=CONTEXT)),
    "starcoder": Made("gpt-bigcode"),
    "gptneox": Made("pythia"),
    "bloom": Made("bloom", saved=partial(_having, seq_length=2048)),
    "mpt": Made("mpt"),
    "falcon": Made("falcon", saved=partial(_without, "num_kv_heads")),
    "falcon-40b": Made("falcon-groups", {"ffn_hidden_size": 256, "bias": False}),
}


def build_folder(name: str, folder: Path, **changes: Any) -> None:
    """Write the folder of a model; `changes` are of its configuration, beside those that it has here."""
    made = MADE[name]
    tiny = TINY[made.tiny]
    config = (made.config or tiny.config)()
    for key, value in {**made.changes, **changes}.items():
        setattr(config, key, {**getattr(config, key), **value} if isinstance(value, dict) else value)
    torch.manual_seed(4000 + sorted(MADE).index(name))
    model = getattr(transformers, tiny.architecture)(config).to(torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder, **tiny.save)
    write_tokenizer(folder)
    path = folder / "config.json"
    for change in filter(None, (tiny.saved, made.saved)):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
