"""A mixture of experts in torch, as the core computes it. What chooses experts is never trained.

Scores that choose are small where a dense model was split into experts, so steps of an optimiser would destroy them.
Gradients pass through the chosen experts' weights to what the router reads.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor

from headrace.models.spec import ExpertSpec


def can_mix(experts: ExpertSpec | None) -> bool:
    """Return whether `mixture` computes these experts."""
    return experts is None or not (
        experts.groups > 1 or experts.margin or experts.scales_inputs or experts.bias or experts.beside
    )


def is_routing(name: str) -> bool:
    """Return whether a tensor chooses experts."""
    return name.endswith((".mlp.router", ".mlp.router_bias"))


def mixture(
    experts: ExpertSpec,
    name: str,
    inputs: Tensor,
    tensors: Mapping[str, Tensor],
    feed_forward: Callable[[str, Tensor], Tensor],
) -> Tensor:
    """Return the outputs of the mixture `name`. `feed_forward` computes an expert by its name."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    scores = functional.linear(rows, tensors[f"{name}.router"])
    weights = scores.sigmoid() if experts.scoring == "sigmoid" else scores.softmax(dim=-1)
    ranks = weights + tensors[f"{name}.router_bias"] if experts.correction else weights
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = weights.gather(-1, chosen)
    if experts.normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights * experts.scale
    outputs = torch.zeros_like(rows)
    for expert in range(experts.count):
        places, ranked = torch.nonzero(chosen == expert, as_tuple=True)
        found = feed_forward(f"{name}.experts.{expert}", rows.index_select(0, places))
        outputs = outputs.index_add(0, places, found * weights[places, ranked, None])
    if experts.shared_size:
        shared = feed_forward(f"{name}.shared", rows)
        if experts.shared_gate:
            shared = shared * functional.linear(rows, tensors[f"{name}.shared_gate"]).sigmoid()
        outputs = outputs + shared
    return outputs.view_as(inputs)
