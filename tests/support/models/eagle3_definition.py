"""An EAGLE-3 drafter in torch as its authors define it, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.models.eagle3_drafter import HEAD_SIZE, HEADS, KV_HEADS


class TorchDrafter:
    """The published definition, for one sequence and without a cache: the whole text for each draft."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Any], embedding: Tensor) -> None:
        self._flags = config
        self._eps = 1e-5
        names = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        self._w = {name: torch.from_numpy(value) for name, value in names.items()}
        self._embedding = self._w.get("embed_tokens.weight", embedding)

    def draft(self, tokens: list[int], states: Tensor, count: int) -> list[int]:
        """Draft after `tokens`. `states` [tokens - 1, 3, the model's hidden] are those of all but the newest."""
        w, found = self._w, list(tokens)
        if self._flags.get("fc_norm"):
            states = torch.stack([self._norm(states[:, place], f"fc_norm.{place}") for place in range(3)], dim=1)
        states = states.flatten(1)
        if self._flags.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        hidden = states @ w["fc.weight"].T
        for _ in range(count):
            out = self._layer(self._embedding[found[1:]], hidden)
            normed = self._norm(out, "norm")
            best = int((w["lm_head.weight"] @ normed[-1]).argmax())
            found.append(best + int(w["d2t"][best]))
            hidden = torch.cat((hidden, (normed if self._flags.get("norm_output") else out)[-1:]))
        return found[len(tokens) :]

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, "layers.0.hidden_norm")
        residual = normed if self._flags.get("norm_before_residual") else hidden
        read = torch.cat((self._norm(embedded, "layers.0.input_layernorm"), normed), dim=-1)
        query, key, value = (self._heads(read, part) for part in "qkv")
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (_turned(key), value))
        mixed = functional.scaled_dot_product_attention(_turned(query), key, value, is_causal=True)
        hidden = residual + self._linear(mixed.transpose(0, 1).flatten(1), "layers.0.self_attn.o_proj")
        normed = self._norm(hidden, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(normed, f"layers.0.mlp.{part}_proj") for part in ("gate", "up"))
        return hidden + self._linear(functional.silu(gate) * up, "layers.0.mlp.down_proj")

    def _heads(self, read: Tensor, part: str) -> Tensor:
        found = self._linear(read, f"layers.0.self_attn.{part}_proj").view(len(read), -1, HEAD_SIZE)
        name = f"layers.0.self_attn.{part}_norm"
        return (self._norm(found, name) if f"{name}.weight" in self._w else found).transpose(0, 1)

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return functional.linear(values, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))

    def _norm(self, values: Tensor, name: str) -> Tensor:
        weight = self._w[f"{name}.weight"]
        return functional.rms_norm(values, weight.shape, weight, self._eps)


def _turned(heads: Tensor) -> Tensor:
    """Turn heads [heads, tokens, size] by their positions."""
    angles = torch.arange(heads.shape[1])[:, None] * 5000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    cosines, sines = (torch.cat((each, each), dim=-1) for each in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
