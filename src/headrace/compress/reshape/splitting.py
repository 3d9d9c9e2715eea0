"""Writes a dense model as a mixture: every MLP is split into shared and routed experts, layer by layer.

The result is a GLM-4.5 mixture (`Glm4MoeForCausalLM`): attention like Llama's with or without biases and head norms,
shared experts without a gate, and routed experts whose weights are sigmoids that need not sum to one. Does not measure.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import asdict, replace

from headrace.compress.compressed_folder import copy_other_files, joined_tensors
from headrace.compress.compression import OVERHEAD, check_model, model_digest
from headrace.compress.disk_layout import dense_type
from headrace.compress.layer_pass import F32, LayerPass, Tokens, embed, load_layer
from headrace.compress.recipe import Recipe, SplitPlan
from headrace.compress.reshape.expert_split import SPLIT_ROWS, WEIGHT_SCALE, split_mlp
from headrace.compress.stored_product import Stored, store_dense
from headrace.compress.work_folder import SUFFIX, Job, SplitReport, WorkFolder
from headrace.errors import ModelError, RequestError
from headrace.models.config_json import ConfigJson
from headrace.models.families import TensorSources, family_of, family_sources, model_spec
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.json_file import read_json
from headrace.models.formats.model_weights import SINGLE_FILE
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.model_folder import ModelFolder
from headrace.models.spec import ExpertSpec, ModelSpec
from headrace.models.tensor_shapes import tensor_shapes

ARCHITECTURE: Final = "Glm4MoeForCausalLM"
_CONFIG_LIMIT: Final = 16 << 20
_COPIED_KEYS: Final = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "hidden_act", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "attention_dropout", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
)


class SplitModel(NamedTuple):
    """A mixture whose folder is complete but not in its place yet."""

    folder: Path
    reports: list[SplitReport]
    resumed: int  # layers that an earlier process had finished
    work: WorkFolder

    def publish(self, out: Path) -> None:
        os.replace(self.folder, out)
        self.work.remove()


def split_spec(spec: ModelSpec, plan: SplitPlan) -> ModelSpec:
    """Return the spec of the mixture. Raise RequestError for experts that the model cannot have."""
    if spec.experts is not None:
        raise RequestError(f"{spec.architecture} has experts already.", parameter="split_experts")
    if plan.routed < 2:
        raise RequestError(f"'split_experts' must be at least 2, not {plan.routed}.", parameter="split_experts")
    if not 1 <= plan.active <= plan.routed:
        raise RequestError(f"'active' must be 1 to {plan.routed}, not {plan.active}.", parameter="active")
    if plan.shared < 1:
        raise RequestError(f"'shared' must be at least 1, not {plan.shared}.", parameter="shared")
    neurons = spec.intermediate_size
    if not neurons or neurons % plan.parts:
        near = [count for count in range(3, 257) if neurons and neurons % count == 0]
        near.sort(key=lambda count: abs(count - plan.parts))
        raise RequestError(
            f"The {neurons} neurons of a layer cannot be split into {plan.routed} routed and {plan.shared} shared "
            f"experts of equal size. Choose numbers whose sum is {' or '.join(map(str, sorted(near[:3])))}.",
            parameter="split_experts",
        )
    size = neurons // plan.parts
    return replace(
        spec,
        family="glm",
        architecture=ARCHITECTURE,
        intermediate_size=0,
        layers=tuple(replace(layer, experts=True) for layer in spec.layers),
        experts=ExpertSpec(
            count=plan.routed,
            top_k=plan.active,
            intermediate_size=size,
            normalise=False,
            scoring="sigmoid",
            correction=True,
            scale=WEIGHT_SCALE,
            shared_size=plan.shared * size,
            group_best=2,
        ),
    )


def split_model(
    folder: ModelFolder,
    out: Path,
    sequences: Sequence[Sequence[int]],
    plan: SplitPlan,
    *,
    restart: bool = False,
    watch: Callable[[int, int], None] = lambda _, __: None,
) -> SplitModel:
    """Split a model into the folder `out` + ".partial"; continue the work there if it is the same.

    `sequences` are the calibration tokens. Publish the result to move it to `out`.
    """
    check_model(folder, Recipe(bits={name: 16 for name in folder.shapes}), command="reshape")
    spec = split_spec(folder.spec, plan)
    config = _mixture_config(folder, spec, plan)
    if out.exists():
        raise RequestError(f"{out} exists. Choose another name, or remove it first.", parameter="out")
    tokens = Tokens.join(sequences)
    job = Job(model_digest(folder), Recipe(), hashlib.sha256(tokens.ids.tobytes()).hexdigest(), "dense", plan)
    work = WorkFolder.open(out.with_name(out.name + SUFFIX), job, restart=restart)
    sources = _mixture_sources(spec)
    resumed, count = work.layers, len(spec.layers)
    hidden = work.hidden() if 0 < resumed < count else embed(folder, tokens)
    for index in range(resumed, count):
        watch(index - resumed, count - resumed)
        tensors, report = _split_layer(folder, index, hidden, tokens, plan)
        stored = _stored_layer(folder, spec, sources, index, tensors)
        work.finish_layer(stored, None if index + 1 == count else hidden, [], report)
    watch(count - resumed, count - resumed)
    made = work.path / out.name
    made.mkdir(exist_ok=True)
    copied = {
        part.name: sources[name][0].name
        for name, (part, *_) in folder.sources.items()
        if not name.startswith("layers.") and name in sources
    }
    write_safetensors(made / SINGLE_FILE, joined_tensors(folder, work.shards(), copied), {"format": "pt"})
    copy_other_files(folder.path, made)
    with new_file(made / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
    return SplitModel(made, work.progress.splits, resumed, work)


def memory_to_split(spec: ModelSpec, tokens: int, longest: int, plan: SplitPlan) -> int:
    """Return a bound of the bytes of arrays that `split_model` holds: see the terms."""
    neurons, hidden = spec.intermediate_size, spec.hidden_size
    states = 4 * tokens * (4 * hidden + spec.q_size)  # before and behind attention, with copies, and the outputs
    layer = 4 * sum(math.prod(shape) for name, shape in tensor_shapes(spec).items() if name.startswith("layers.0."))
    rows = 4 * SPLIT_ROWS * (6 * neurons + 4 * hidden + 2 * spec.heads * spec.head_size)
    scores = 3 * 4 * (spec.heads // spec.kv_heads + 1) * longest * longest
    # Sums of products of neurons in f32; for the fit they and what the solver copies in f64.
    fit = (4 + 3 * 8) * neurons * neurons + 4 * 8 * neurons * hidden if plan.active < plan.routed else 0
    router = 8 * hidden * (2 * hidden + 2 * plan.routed)
    return states + 3 * layer + rows + scores + fit + router + OVERHEAD


def _split_layer(
    folder: ModelFolder, index: int, hidden: F32, tokens: Tokens, plan: SplitPlan
) -> tuple[dict[str, F32], SplitReport]:
    """Return a layer's tensors. `hidden` becomes the states behind the new layer."""
    layer = LayerPass(folder.spec, index, load_layer(folder, index))
    after = np.concatenate(
        [
            layer.after_attention(hidden[rows], layer.attend(layer.attention_inputs(hidden[rows]), ends))
            for rows, ends in tokens.chunks()
        ]
    )
    found = split_mlp(layer, after, plan)
    rows = found.held_out
    expected = layer.after_mlp(after[rows], layer.mlp_inputs(after[rows]))
    change = float(np.square(expected - hidden[rows]).sum(dtype=np.float64))
    np.add(after, found.outputs, out=hidden)
    error = float(np.square(hidden[rows] - expected).sum(dtype=np.float64))
    kept = {name: values for name, values in layer.tensors.items() if not name.startswith("mlp.") or "norm" in name}
    report = SplitReport(index, found.routed_size, found.kept, found.best, error / max(change, 1e-30))
    return kept | found.tensors, report


def _stored_layer(
    folder: ModelFolder, spec: ModelSpec, sources: TensorSources, index: int, tensors: Mapping[str, F32]
) -> Stored:
    kind = dense_type(folder, f"layers.{index}.mlp.down")
    found: Stored = {}
    for name, values in tensors.items():
        full = f"layers.{index}.{name}"
        parts = sources[full]
        rows = spec.qkv_parts if ".attn.qkv" in full else (len(values) // len(parts),) * len(parts)
        stored = "f32" if "router" in name else dense_type(folder, full) if full in folder.sources else kind
        begin = 0
        for part, size in zip(parts, rows, strict=True):
            found |= store_dense(part.name, values[begin : begin + size], stored)
            begin += size
    return found


def _mixture_sources(spec: ModelSpec) -> TensorSources:
    """Return the names of the result's tensors."""
    config = ConfigJson({"architectures": [ARCHITECTURE]}, path=Path("config.json"))
    sources = family_sources(family_of(config), spec, frozenset({"model.embed_tokens.weight"}))
    return {name: sources[name] for name in tensor_shapes(spec)}


def _mixture_config(folder: ModelFolder, spec: ModelSpec, plan: SplitPlan) -> dict[str, Any]:
    """Return the config of the result. Raise RequestError if it cannot say what the model is."""
    path = folder.path / "config.json"
    old = read_json(path, limit=_CONFIG_LIMIT)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "glm4_moe",
        **{key: old[key] for key in _COPIED_KEYS if key in old},
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.qkv_bias,
        "use_qk_norm": spec.qk_norm == "head",
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "n_routed_experts": plan.routed,
        "num_experts_per_tok": plan.active,
        "n_shared_experts": plan.shared,
        "moe_intermediate_size": folder.spec.intermediate_size // plan.parts,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": WEIGHT_SCALE,
        "num_nextn_predict_layers": 0,
    }
    if isinstance(config.get("rope_parameters"), dict):
        config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
    try:
        said = model_spec(ConfigJson(config, path=path))
    except ModelError as error:
        raise RequestError(
            f"{folder.spec.architecture} cannot be split into experts: {error}", parameter="model"
        ) from None
    unlike = [name for name, value in asdict(replace(said, tied=spec.tied)).items() if value != getattr(spec, name)]
    if unlike or "text_config" in old:
        reason = f"a {ARCHITECTURE} has no place for its {', '.join(unlike or ['text_config'])}"
        raise RequestError(
            f"{folder.spec.architecture} cannot be split into experts: {reason}. Models like Llama, Qwen2, Qwen3 and "
            "Mistral without a sliding window can.",
            parameter="model",
        )
    return config
