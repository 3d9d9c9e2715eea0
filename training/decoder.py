"""A decoder in torch with the names and the arithmetic of transformers' LlamaForCausalLM.

Does not know data, optimisers or files.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.adapt.attention import attend
from training.shape import CONTEXT, NORM_EPS, ROPE_THETA, Shape


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = shape.heads, shape.kv_heads, shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the attention output of each position, before `o_proj`."""
        rows, length, _ = states.shape

        def heads(values: Tensor, count: int) -> Tensor:
            return values.view(rows, length, count, self.head_size).transpose(1, 2)

        queries = turned(heads(self.q_proj(states), self.heads), cosine, sine)
        keys = turned(heads(self.k_proj(states), self.kv_heads), cosine, sine)
        values = heads(self.v_proj(states), self.kv_heads)
        mixed = attend(queries, keys, values)
        return mixed.transpose(1, 2).reshape(rows, length, -1)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = Mlp(shape)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, places: Tensor | None = None) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(states), cosine, sine)
        if places is not None:
            states, mixed = states.flatten(0, 1)[places], mixed.flatten(0, 1)[places]
        states = states + self.self_attn.o_proj(mixed)
        return states + self.mlp(self.post_attention_layernorm(states))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        cosine, sine = angles(shape.head_size)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        states = self.embed_tokens(tokens)
        length = tokens.shape[1]
        cosine, sine = self.get_buffer("cosine")[:length], self.get_buffer("sine")[:length]
        for layer in self.layers[:-1]:
            states = layer(states, cosine, sine)
        return self.norm(self.layers[-1](states, cosine, sine, places))


class Decoder(nn.Module):
    """Maps tokens [rows, length] to final hidden states; `logits` turns these into logits.

    With `places` in the flat rows it gives the states [places, hidden] of those alone: what the last layer does after
    its attention is then done for them only.
    """

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                spread = 0.02 if "embed" in name else 1 / math.sqrt(weight.shape[1])
                # What is added to the residual stream starts small, and smaller in a deeper model.
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    spread /= math.sqrt(2 * shape.layers)
                with torch.no_grad():
                    weight.normal_(0.0, spread, generator=generator)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        return self.model(tokens, places)

    def logits(self, states: Tensor) -> Tensor:
        """Return f32 logits for hidden states [..., hidden]; the head is the embedding."""
        return functional.linear(states, self.model.embed_tokens.weight).float()


def angles(head_size: int) -> tuple[Tensor, Tensor]:
    """Return the rope's cosines and sines [position, head size], equal in both halves of a head."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    turns = torch.outer(torch.arange(CONTEXT, dtype=torch.float64), frequencies)
    turns = torch.cat((turns, turns), dim=-1)
    return turns.cos().float(), turns.sin().float()


def turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate [rows, heads, length, head size], pairing the two halves of a head."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosine + torch.cat((-second, first), dim=-1) * sine).to(heads.dtype)
