"""Says what files of some architectures mean by their keys of attention: windows, positions, norms of heads."""

from __future__ import annotations

from collections.abc import Callable

from headrace.models.gguf.gguf_keys import GgufKeys


def normalised_heads(ours: str) -> Callable[[GgufKeys], None]:
    """Return what says in a key of config.json whether heads are normalised: files have norms of them then."""

    def adjust(keys: GgufKeys) -> None:
        keys.values[ours] = has_head_norms(keys)

    return adjust


def has_head_norms(keys: GgufKeys) -> bool:
    return "blk.0.attn_q_norm.weight" in keys.file.tensors


def windows_of_olmo(keys: GgufKeys) -> None:
    """OLMo-3 is an OLMo-2 with windows."""
    if keys.values.get("sliding_window") is not None:
        keys.values["architectures"] = ["Olmo3ForCausalLM"]


def growing_queries(keys: GgufKeys) -> None:
    """Ministral 3 is a Mistral 3 whose queries grow."""
    growth = keys.get("attention.temperature_scale")
    if growth:
        keys.values["architectures"] = ["Ministral3ForCausalLM"]
        keys.rope["llama_4_scaling_beta"] = growth
        keys.spell("rope_scaling.llama_4_scaling_beta", f"{keys.name}.attention.temperature_scale")


def granite_positions(keys: GgufKeys) -> None:
    keys.refuse("rope.scaling.finetuned", "Layers must have a rope", unless=(True,))
    keys.values.pop("head_dim", None)
