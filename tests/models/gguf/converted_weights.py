"""What llama.cpp's converters do to the tensors of a model, one function for each kind: each gives the names in the
file and their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from tests.models.gguf.converted_model import Model

Tensor = torch.Tensor
Named = Iterator[tuple[str, Tensor]]
# Ends of the names of experts' tensors, all experts of a layer in one.
_EXPERTS = {
    "w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip


def plain(model: Model, source: str, tensor: Tensor) -> Named:
    """Names alone change, and the experts of a layer are in one tensor each for gates, values and results."""
    found = re.search(r"layers\.(\d+)\.(?:.*\.)?experts\.(\w+?)(?:\.weight)?$", source)
    if found is None:
        yield model.name(source), tensor
        return
    layer, leaf = found.groups()
    if leaf == "gate_up_proj":
        for kind, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"blk.{layer}.ffn_{kind}_exps.weight", half
    else:
        yield f"blk.{layer}.ffn_{_EXPERTS[leaf]}_exps.weight", tensor


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def permuted(model: Model, source: str, tensor: Tensor) -> Named:
    """Rows of queries and keys are in the pairs that the rope rotates."""
    for part, heads in (("q_proj", model.heads), ("k_proj", model.find("num_key_value_heads"))):
        if f".{part}." in source:
            tensor = in_pairs(tensor, heads)
    yield from plain(model, source, tensor)


def norms_plus_one(model: Model, source: str, tensor: Tensor) -> Named:
    yield from plain(model, source, tensor + 1 if source.endswith("norm.weight") else tensor)


def turned_experts(model: Model, source: str, tensor: Tensor) -> Named:
    """Llama 4's experts are [inputs, outputs] in the folder."""
    yield from plain(model, source, tensor.transpose(-1, -2) if ".experts." in source else tensor)


def gpt_oss(model: Model, source: str, tensor: Tensor) -> Named:
    """Gates and values are rows by turns in the folder, of [inputs, outputs]."""
    found = re.search(r"layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?$", source)
    if found is None:
        yield model.name(f"{source}.weight" if source.endswith("sinks") else source), tensor
        return
    layer, leaf, bias = found.groups()
    end = "bias" if bias else "weight"
    rows = tensor if bias else tensor.transpose(-1, -2)
    if leaf == "down":
        yield f"blk.{layer}.ffn_down_exps.{end}", rows
        return
    for kind, start in (("gate", 0), ("up", 1)):
        part = rows[:, start::2] if not bias else rows[..., start::2]
        yield f"blk.{layer}.ffn_{kind}_exps.{end}", part


def granite(model: Model, source: str, tensor: Tensor) -> Named:
    """Gates and values are halves in the folder, of experts and of the MLP that all tokens go to."""
    layer = source.split(".")[2] if ".layers." in source else ""
    experts = bool(model.config.get("num_local_experts"))
    if source.endswith("block_sparse_moe.input_linear.weight"):
        names, rows = ("ffn_gate_exps", "ffn_up_exps"), tensor.chunk(2, dim=-2)
    elif source.endswith("block_sparse_moe.output_linear.weight"):
        names, rows = ("ffn_down_exps",), (tensor,)
    elif source.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if experts else ""
        names, rows = (f"ffn_gate{end}", f"ffn_up{end}"), tensor.chunk(2, dim=-2)
    elif source.endswith("shared_mlp.output_linear.weight"):
        names, rows = ("ffn_down_shexp" if experts else "ffn_down",), (tensor,)
    elif ".mamba." in source:
        yield from mamba(model, source, tensor)
        return
    else:
        yield from permuted(model, source, tensor)
        return
    for name, part in zip(names, rows, strict=True):
        yield f"blk.{layer}.{name}.weight", part


def mamba(model: Model, source: str, tensor: Tensor) -> Named:
    groups = model.find("n_groups", "mamba_n_groups")
    if source.endswith(".A_log"):
        tensor = -torch.exp(tensor).reshape(-1, 1)
    elif source.endswith(".D"):
        tensor = tensor.reshape(-1, 1)
    elif source.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif source.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    name = (
        source.replace(".dt_bias", ".dt_proj.bias")
        if "backbone" not in source
        else source.replace(".dt_bias", ".dt.bias")
    )
    found = model.table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        found = model.table.get_name(source.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
    assert found is not None, source
    yield found, tensor


def nemotron_h(model: Model, source: str, tensor: Tensor) -> Named:
    found = re.search(r"layers\.(\d+)\.mixer\.experts\.(up|down)_proj\.weight$", source)
    if found is not None:
        yield f"blk.{found[1]}.ffn_{found[2]}_exps.weight", tensor
    elif source.endswith("e_score_correction_bias"):
        yield f"blk.{source.split('.')[2]}.exp_probs_b.bias", tensor
    else:
        yield from mamba(model, source, tensor)


def falcon_h1(model: Model, source: str, tensor: Tensor) -> Named:
    """Factors are in the weights."""
    config = model.config
    read = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * read,
        "q_proj": read,
        "v_proj": read,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    leaf = source.split(".")[-2]
    if leaf == "in_proj":
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, keys, keys, config["mamba_n_heads"])
        rows = [torch.full((size, 1), factor) for size, factor in zip(sizes, config["ssm_multipliers"], strict=True)]
        tensor = tensor * config["ssm_in_multiplier"] * torch.cat(rows)
    elif leaf in factors:
        tensor = tensor * factors[leaf]
    if source.endswith("pre_ff_layernorm.weight"):
        yield f"blk.{source.split('.')[2]}.ffn_norm", tensor
    else:
        yield from mamba(model, source, tensor)


def deepseek(model: Model, source: str, tensor: Tensor) -> Named:
    """Keys and values from the latent are apart, and keys turned to multiply queries by."""
    if not source.endswith("kv_b_proj.weight"):
        name = source.replace("gate.e_score_correction_bias", "gate.e_score_correction.bias")
        yield from plain(model, name, tensor)
        return
    config, layer = model.config, source.split(".")[2]
    plain_size = config["qk_nope_head_dim"]
    each = tensor.reshape(model.heads, plain_size + config["v_head_dim"], -1)
    yield f"blk.{layer}.attn_k_b.weight", each[:, :plain_size].transpose(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", each[:, plain_size:]


def corrected(model: Model, source: str, tensor: Tensor) -> Named:
    """The bias of a router has a name of its own."""
    if source.endswith("e_score_correction_bias"):
        yield f"blk.{source.split('.')[2]}.exp_probs_b.bias", tensor
    else:
        yield from plain(model, source, tensor)


def delta(model: Model, source: str, tensor: Tensor) -> Named:
    config = model.config
    groups, each = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    layer = source.split(".")[2] if ".layers." in source else ""
    own = model.kind.name == "QWEN3NEXT"

    def tiled(rows: Tensor, size: int, dim: int = 0) -> Tensor:
        if own:
            return rows
        rows = rows.movedim(dim, 0)
        return rows.reshape(groups, each, size, -1).swapaxes(0, 1).reshape(rows.shape).movedim(0, dim)

    leaf = source.split("linear_attn.")[-1]
    match leaf:
        case "in_proj_qkvz.weight":
            parts = tensor.reshape(groups, -1, tensor.shape[1]).split([key, key, each * value, each * value], dim=1)
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([q, k, v])
            yield f"blk.{layer}.attn_gate.weight", z
        case "in_proj_ba.weight":
            yield f"blk.{layer}.ssm_ba.weight", tensor
        case "in_proj_qkv.weight":
            before = 2 * groups * key
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([tensor[:before], tiled(tensor[before:], value)])
        case "in_proj_z.weight":
            yield f"blk.{layer}.attn_gate.weight", tiled(tensor, value)
        case "in_proj_b.weight":
            yield f"blk.{layer}.ssm_beta.weight", tiled(tensor, 1)
        case "in_proj_a.weight":
            yield f"blk.{layer}.ssm_alpha.weight", tiled(tensor, 1)
        case "A_log":
            yield f"blk.{layer}.ssm_a", -torch.exp(tiled(tensor, 1))
        case "dt_bias":
            yield f"blk.{layer}.ssm_dt.bias", tiled(tensor, 1)
        case "conv1d.weight":
            rows, before = tensor.squeeze(1), 2 * groups * key
            yield f"blk.{layer}.ssm_conv1d.weight", torch.cat([rows[:before], tiled(rows[before:], value)])
        case "out_proj.weight":
            yield f"blk.{layer}.ssm_out.weight", tiled(tensor, value, 1)
        case "norm.weight" if "linear_attn" in source:
            yield f"blk.{layer}.ssm_norm.weight", tensor
        case _ if source.endswith("shared_expert_gate.weight"):
            yield model.name(source), tensor.reshape(-1)
        case _:
            yield from norms_plus_one(model, source, tensor)


def shared_gate(model: Model, source: str, tensor: Tensor) -> Named:
    yield from plain(model, source, tensor.reshape(-1) if source.endswith("shared_expert_gate.weight") else tensor)


def gemma3n(model: Model, source: str, tensor: Tensor) -> Named:
    found = re.match(r"(?:model\.)?altup_(unembed_)?projections\.(\d+)\.weight$", source)
    if found is None:
        yield model.name(f"{source}.weight" if source.endswith("_scale") else source), tensor
    elif found[2] == "0":
        stem = source.replace(".0.weight", "")
        parts = [model.tensors[f"{stem}.{index}.weight"] for index in range(3)]
        yield f"altup_{'unembd_proj' if found[1] else 'proj'}.weight", torch.stack(parts)


def gemma4(model: Model, source: str, tensor: Tensor) -> Named:
    layer = source.split(".")[2] if ".layers." in source else ""
    if source.endswith("layer_scalar"):
        yield f"blk.{layer}.layer_output_scale.weight", tensor
    elif source.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif source.endswith("router.per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif source.endswith("experts.gate_up_proj"):
        yield f"blk.{layer}.ffn_gate_up_exps.weight", tensor
    else:
        yield from plain(model, source, tensor)


def stablelm(model: Model, source: str, tensor: Tensor) -> Named:
    """The norms of all heads are in one tensor."""
    found = re.search(r"layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight$", source)
    if found is None:
        yield model.name(source), tensor
    elif found[3] == "0":
        heads = model.heads if found[2] == "q" else int(model.find("num_key_value_heads"))
        each = [model.tensors[source.replace("norms.0.", f"norms.{head}.")] for head in range(heads)]
        yield f"blk.{found[1]}.attn_{found[2]}_norm.weight", torch.stack(each)


def lfm2(model: Model, source: str, tensor: Tensor) -> Named:
    yield model.name(source), tensor.squeeze(1) if "conv.conv" in source else tensor


def gpt2(model: Model, source: str, tensor: Tensor) -> Named:
    turned = source.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) and model.kind.name == "GPT2"
    yield model.name(source), tensor.T if turned else tensor


def head_by_head(model: Model, source: str, tensor: Tensor) -> Named:
    """Queries, keys and values of all heads are together, where the folder has those of each head."""
    if "query_key_value" in source:
        each = tensor.reshape(model.heads, 3, -1, *tensor.shape[1:])
        tensor = each.swapaxes(0, 1).reshape(tensor.shape)
    name = source.removeprefix("transformer.") if model.kind.name == "BLOOM" else source
    yield model.name(name), tensor


def falcon(model: Model, source: str, tensor: Tensor) -> Named:
    if "query_key_value" in source:
        config = model.config
        heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        each = tensor.reshape(heads, model.heads // heads + 2, model.head_size, -1)
        parts = (each[:, :-2], each[:, -2], each[:, -1])
        tensor = torch.cat([part.reshape(-1, tensor.shape[1]) for part in parts])
    yield model.name(source), tensor


WEIGHTS: dict[str, Callable[[Model, str, Tensor], Named]] = {
    **dict.fromkeys(("llama", "arcee", "mistral3", "granite"), permuted),
    **dict.fromkeys(("granitemoe", "granitehybrid"), granite),
    **dict.fromkeys(("gemma", "nemotron"), norms_plus_one),
    **dict.fromkeys(("glm4moe", "minimax-m2", "ernie4_5-moe"), corrected),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), nemotron_h),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), delta),
    **dict.fromkeys(("bloom", "gptneox"), head_by_head),
    **dict.fromkeys(("gpt2", "starcoder"), gpt2),
    "qwen2moe": shared_gate,
    "llama4": turned_experts,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek,
    "mamba2": mamba,
    "falcon-h1": falcon_h1,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "lfm2": lfm2,
    "stablelm": stablelm,
    "falcon": falcon,
}
