"""Defines the sizes of the models and the config.json that follows from them.

Every size that a product reads is a multiple of 128, so integer groups of any size fit without a remainder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

CONTEXT: Final = 2048  # tokens
ROPE_THETA: Final = 10_000.0
NORM_EPS: Final = 1e-5


@dataclass(frozen=True)
class Shape:
    """A Llama decoder with tied embeddings."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int

    @property
    def weights(self) -> int:
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden


MINI: Final = Shape(vocabulary=4096, hidden=384, layers=6, heads=6, kv_heads=2, head_size=64, inner=1024)
DRAFT: Final = Shape(vocabulary=4096, hidden=128, layers=3, heads=4, kv_heads=2, head_size=32, inner=384)
# The toy keeps the recipe alive in a minute; what it writes is of no use.
TOY_MINI: Final = Shape(vocabulary=1024, hidden=128, layers=2, heads=2, kv_heads=1, head_size=64, inner=256)
TOY_DRAFT: Final = Shape(vocabulary=1024, hidden=64, layers=1, heads=2, kv_heads=1, head_size=32, inner=128)


def config_json(shape: Shape, *, begin: int, end: int, pad: int) -> dict[str, Any]:
    """What transformers' LlamaForCausalLM reads; the arguments are ids of special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": begin,
        "eos_token_id": end,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": pad,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
