"""Names the tensors of a GGUF file: where each of a spec's tensors is, in which parts and in which order of rows.

Names are the same in all architectures but few. Where files may have a tensor under one of several names, or in one
piece or several, the first is taken that the file has whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.models.families.family import TensorPart, TensorSources, products_by_head
from headrace.models.spec import LayerSpec, ModelSpec, RecurrentSpec
from headrace.models.tensor_shapes import tensor_shapes

# Names of a tensor of a layer, or of its parts; other names it may have. Files have ".weight" or ".bias" after a name,
# but nothing after one that ends with a point.
Choices = tuple[tuple[str, ...], ...]
GgufNames = Mapping[str, Choices]

NAMES: Final[GgufNames] = {
    "attn.norm": (("attn_norm",),),
    "attn.qkv": (("attn_q", "attn_k", "attn_v"), ("attn_qkv",)),
    "attn.q_norm": (("attn_q_norm",),),
    "attn.k_norm": (("attn_k_norm",),),
    "attn.o": (("attn_output",),),
    "attn.out_norm": (("post_attention_norm",),),
    "attn.residual_norm": (("attn_output_norm",),),
    "attn.q_latent_norm": (("attn_q_a_norm",),),
    "attn.q_up": (("attn_q_b",),),
    "attn.kv_latent_norm": (("attn_kv_a_norm",),),
    "attn.kv_up": (("attn_kv_b",),),
    "attn.q_to_latent": (("attn_kv_b",),),
    "attn.v_from_latent": (("attn_kv_b",),),
    "mlp.norm": (("ffn_norm",), ("post_attention_norm",), ("ffn_norm.",)),
    "mlp.gate_up": (("ffn_gate", "ffn_up"), ("ffn_up",)),
    "mlp.up": (("ffn_up",),),
    "mlp.down": (("ffn_down",),),
    "mlp.out_norm": (("post_ffw_norm",),),
    "mlp.residual_norm": (("layer_output_norm",),),
    "mlp.router": (("ffn_gate_inp",),),
    "mlp.experts.gate_up": (
        ("ffn_gate_exps.{expert}", "ffn_up_exps.{expert}"),
        ("ffn_gate_up_exps.{expert}",),
    ),
    "mlp.experts.up": (("ffn_up_exps.{expert}",),),
    "mlp.experts.down": (("ffn_down_exps.{expert}",),),
    "mlp.shared.gate_up": (("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_up_shexp",)),
    "mlp.shared.up": (("ffn_up_shexp",),),
    "mlp.shared.down": (("ffn_down_shexp",),),
    "mlp.shared_gate": (("ffn_gate_inp_shexp",),),
    "mlp.experts_norm": (("pre_ffw_norm_2",),),
    "mlp.experts_out_norm": (("post_ffw_norm_2",),),
    "mlp.dense_out_norm": (("post_ffw_norm_1",),),
    "recurrent.in": (("ssm_in",),),
    "recurrent.conv": (("ssm_conv1d",),),
    "recurrent.norm": (("ssm_norm",),),
    "recurrent.out": (("ssm_out",),),
    "inputs.in": (("inp_gate",),),
    "inputs.out": (("proj",),),
    "inputs.norm": (("post_norm",),),
    "streams.router_norm": (("altup_router_norm",),),
    "streams.router": (("altup_router",),),
    "streams.predict": (("altup_predict_coef",),),
    "streams.correct": (("altup_correct_coef",),),
    "past.in": (("laurel_l",),),
    "past.out": (("laurel_r",),),
    "past.norm": (("laurel_post_norm",),),
}
# Tensors outside of the layers.
_OUTER: Final[GgufNames] = {
    "embed": (("token_embd",),),
    "embed_norm": (("token_embd_norm",),),
    "positions": (("position_embd",),),
    "token_types": (("token_types",),),
    "norm": (("output_norm",), ("token_embd_norm",)),
    "head": (("output",),),
    "inputs.embed": (("per_layer_token_embd",),),
    "inputs.in": (("per_layer_model_proj",),),
    "inputs.norm": (("per_layer_proj_norm",),),
}
# Names of tensors of a layer with what is after them in files, where that is not ".weight".
_WHOLE: Final[Mapping[str, str]] = {
    "attn.sinks": "attn_sinks.weight",
    "mlp.router_bias": "exp_probs_b.bias",
    "mlp.router_norm": "ffn_gate_inp.scale",
    "mlp.expert_scales": "ffn_down_exps.scale",
    "scale": "layer_output_scale.weight",
    "streams.out_scale": "altup_correct_scale.weight",
    "recurrent.step_bias": "ssm_dt.bias",
    "recurrent.decay": "ssm_a",
    "recurrent.skip": "ssm_d",
}
# Vectors that files may have with two dimensions.
_FLAT: Final = (
    "q_norm",
    "k_norm",
    "mlp.router_bias",
    "recurrent.conv",
    "recurrent.norm",
    "recurrent.decay",
    "recurrent.skip",
)


def file_sources(
    spec: ModelSpec, names: frozenset[str], *, own: GgufNames, fused: bool = False, pairs: bool = False
) -> TensorSources:
    """Map the spec's tensors to those of a file, of which `names` are there.

    `own` has the names of the architecture that differ from those above. `fused` says that files have queries, keys
    and values, and gates and values, in one tensor; `pairs` that the rows of queries and keys are in the pairs that the
    rope rotates.
    """
    table = {**NAMES, **own}
    return {
        name: _parts(spec, name, names, table, fused=fused, pairs=pairs)
        for name in tensor_shapes(spec)
        if not name.startswith("pooled.")
    }


def _parts(
    spec: ModelSpec, name: str, names: frozenset[str], table: GgufNames, *, fused: bool, pairs: bool
) -> tuple[TensorPart, ...]:
    stem, end = (name.removesuffix(".bias"), ".bias") if name.endswith(".bias") else (name, ".weight")
    flat = stem.endswith(_FLAT)
    if stem.startswith("streams."):
        _, number, side = stem.split(".")
        return (TensorPart(f"altup_{'proj' if side == 'in' else 'unembd_proj'}.weight", int(number)),)
    if not stem.startswith("layers."):
        choices, where, number, expert = _OUTER[stem], "", "0", ""
    else:
        _, number, leaf = stem.split(".", 2)
        where, expert = f"blk.{number}.", ""
        if spec.recurrent is not None and spec.recurrent.kind == "delta" and leaf.startswith("recurrent."):
            return _delta_parts(spec.recurrent, where, leaf, names)
        if leaf in _WHOLE:
            return (TensorPart(f"{where}{_WHOLE[leaf]}", flat=flat),)
        if ".experts." in leaf:
            feed, _, expert, last = leaf.split(".")
            leaf = f"{feed}.experts.{last}"
        choices = table[leaf]
    spelled = [
        tuple(_spelled(f"{where}{part.replace('{expert}', expert)}", end) for part in choice)
        for choice in (reversed(choices) if fused else choices)
    ]
    found = next((choice for choice in spelled if names.issuperset(choice)), spelled[0])
    parts = tuple(TensorPart(part, flat=flat) for part in found)
    if stem.endswith(".attn.qkv"):
        return _attention_parts(spec, spec.layers[int(number)], parts, pairs=pairs)
    if spec.latent is not None and stem.endswith(".attn.q_up"):
        return (_turning_last(parts[0].name, spec.head_size, spec.latent.turning),)
    if stem.endswith(("_to_latent", "_from_latent")):
        return products_by_head(spec, parts[0].name)[stem.rpartition(".")[2]]
    if pairs and spec.qk_norm == "each_head" and stem.endswith((".attn.q_norm", ".attn.k_norm")):
        return (TensorPart(parts[0].name, pairs=_pairs(spec), flat=True),)
    return parts


def _spelled(name: str, end: str) -> str:
    return name.removesuffix(".") if name.endswith(".") else f"{name}{end}"


def _attention_parts(
    spec: ModelSpec, layer: LayerSpec, parts: tuple[TensorPart, ...], *, pairs: bool
) -> tuple[TensorPart, ...]:
    """Return where queries, keys and values are, and the gates of a layer that has those."""
    queries = parts[0].name
    if (latent := spec.latent) is not None:
        stem, end = queries.rsplit("attn_q", 1)
        both = _turning_last(f"{stem}attn_kv_a_mqa{end}", latent.turning + latent.rank, latent.turning)
        narrow = TensorPart(f"{stem}attn_q_a{end}")
        return (narrow if latent.query_rank else _turning_last(queries, spec.head_size, latent.turning), both)
    if spec.attention_gate:
        sizes = (spec.head_size, spec.head_size)
        return (TensorPart(queries, split=(sizes, 0)), *parts[1:], TensorPart(queries, split=(sizes, 1)))
    if layer.shares is not None:
        return parts[:1]
    if layer.keys_as_values:
        return (*parts[:2], parts[1])
    if not pairs or len(parts) != 3:
        return parts
    return (*(TensorPart(part.name, pairs=_pairs(spec)) for part in parts[:2]), parts[2])


def _delta_parts(delta: RecurrentSpec, where: str, leaf: str, names: frozenset[str]) -> tuple[TensorPart, ...]:
    """Return where the tensors of a delta net are. Files of Qwen3.5 have the heads of values group by turns."""
    before, each = 2 * delta.groups * delta.state_size, delta.heads // delta.groups
    apart = f"{where}ssm_beta.weight" in names

    def part(name: str, before: int, size: int, *, flat: bool = False) -> TensorPart:
        order = (before, delta.groups, size) if apart and each > 1 else None
        return TensorPart(f"{where}{name}", tiled=order, flat=flat)

    match leaf:
        case "recurrent.in":
            mixed = (part("attn_qkv.weight", before, delta.head_size), part("attn_gate.weight", 0, delta.head_size))
            if apart:
                return (*mixed, part("ssm_beta.weight", 0, 1), part("ssm_alpha.weight", 0, 1))
            return (*mixed, *(TensorPart(f"{where}ssm_ba.weight", split=((each, each), place)) for place in (0, 1)))
        case "recurrent.conv":
            return (part("ssm_conv1d.weight", before * delta.taps, delta.head_size * delta.taps, flat=True),)
        case "recurrent.out":
            inputs = (delta.groups, delta.head_size) if apart and each > 1 else None
            return (TensorPart(f"{where}ssm_out.weight", tiled_inputs=inputs),)
        case "recurrent.norm":
            return (TensorPart(f"{where}ssm_norm.weight"),)
        case _:
            return (part(_WHOLE[leaf], 0, 1),)


def _pairs(spec: ModelSpec) -> tuple[int, int]:
    """Return the rows of a head, and how many are in pairs: those that turn; of Bamba, all."""
    whole = spec.family == "bamba" or not spec.ropes
    return spec.head_size, spec.head_size if whole else 2 * len(spec.ropes[0].inv_freq)


def _turning_last(name: str, rows: int, turning: int) -> TensorPart:
    return TensorPart(name, pairs=(rows, turning), pairs_last=True)
