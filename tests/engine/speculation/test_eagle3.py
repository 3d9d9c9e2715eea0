"""EAGLE-3 drafters in their published layouts: they draft as defined, and answers stay the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.engine.speculation.layer_drafter import LayerDrafter
from headrace.llm import LLM
from headrace.models.model_folder import open_model
from headrace.models.spec import ModelSpec
from tests.support.models.eagle3_definition import TorchDrafter
from tests.support.models.eagle3_drafter import (
    HEAD_SIZE,
    HIDDEN,
    drafter_config,
    drafter_tensors,
    nested_config,
    write_drafter,
)

PROMPTS = [[5, 9, 30, 41, 7], [100, 20, 21, 22, 23, 24, 4000], list(range(40, 80))]
COMMON: dict[str, Any] = {"weights": "f32", "kv": "f32", "threads": 1, "context": 128, "checks": True}
BIASES = {f"layers.0.self_attn.{part}_proj.bias": size for part, size in (("q", 128), ("k", 64), ("v", 64), ("o", 128))}


def published(kind: str, target: ModelSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and the tensors of a drafter."""
    match kind:
        case "of its authors":  # its layers are the usual ones
            return drafter_config(target, architectures=["LlamaForCausalLM"]), drafter_tensors(target)
        case "SGLang":
            ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
            more = {f"midlayer.self_attn.{part}_norm.weight": (HEAD_SIZE,) for part in "qk"}
            more |= {f"fc_norm.{place}.weight": (target.hidden_size,) for place in range(3)}
            return drafter_config(target, eagle_config=ids, fc_norm=True), drafter_tensors(target, **more)
        case _:
            more = {name: (size,) for name, size in BIASES.items()}
            more |= {"input_norm.weight": (3 * target.hidden_size,), "embed_tokens.weight": (target.vocab_size, HIDDEN)}
            flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
            return nested_config(target, **flags), drafter_tensors(target, "layers.0", **more)


@pytest.mark.parametrize(
    ("kind", "layers"), [("of its authors", (2, 3, 3)), ("SGLang", (1, 3, 5)), ("speculators", (1, 3, 5))]
)
def test_drafts_are_those_of_the_definition_and_answers_the_same_bytes(
    tiny_folder: Path, tmp_path: Path, kind: str, layers: tuple[int, ...]
) -> None:
    config, tensors = published(kind, open_model(tiny_folder).spec)
    path = write_drafter(tmp_path / "drafter", config, tensors)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    reference = TorchDrafter(config, tensors, model.get_input_embeddings().weight.detach())
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 14},
        {"temperature": 0.9, "seed": 3, "max_tokens": 14},
    ]
    own = {"speculation": "heads", "draft_heads": str(path), "draft_weights": "f32"}
    with LLM(tiny_folder, **COMMON, speculation="none") as plain, LLM(tiny_folder, **COMMON, **own) as drafted:
        seen = watch(drafted)
        for each in wanted:
            expected, found = (llm.generate(PROMPTS, ignore_eos=True, **each) for llm in (plain, drafted))
            for one, other in zip(found, expected, strict=True):
                assert one.completions[0].tokens == other.completions[0].tokens
            assert sum(each.completions[0].usage.drafted for each in found) > 0
    checked = 0
    with torch.no_grad():
        for tokens, drafts in seen:
            out = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            states = torch.stack([out[layer][0] for layer in layers], dim=1)
            assert drafts == reference.draft(tokens, states, len(drafts))
            checked += len(drafts)
    assert checked > 30


def watch(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Let the engine draft as much as it can. Return what it drafts greedily, as tokens and the drafts after them."""
    engine = llm.opened.engine
    engine._step_time.predict = lambda rows, pairs: 1.0  # pyright: ignore[reportPrivateUsage]
    assert engine.speculator is not None
    engine.speculator.lengths.prior = engine.speculator.lengths.memory = 0.99
    drafter = engine.speculator.drafter
    assert isinstance(drafter, LayerDrafter)
    drafter.pass_seconds = lambda sequences: 0.0
    seen: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose_all

    def watched(wanted: Any) -> list[list[int]]:
        found = propose(wanted)
        seen.extend(
            (list(sequence.tokens), drafts)
            for (sequence, _), drafts in zip(wanted, found, strict=True)
            if drafts and sequence.request.sampling.temperature == 0.0
        )
        return found

    drafter.propose_all = watched
    return seen


def test_a_drafter_of_another_width_reads_its_own_embedding(tiny_folder: Path, tmp_path: Path) -> None:
    target = open_model(tiny_folder).spec
    wide = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    random = np.random.default_rng(1)
    shapes = {
        "fc.weight": (64, 3 * target.hidden_size),
        "norm.weight": (64,),
        "lm_head.weight": (target.vocab_size, 64),
        "embed_tokens.weight": (target.vocab_size, 64),
        **{f"midlayer.{name}.weight": (64,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        **{f"midlayer.self_attn.{part}_proj.weight": (64 if part == "q" else 32, 128) for part in "qkv"},
        "midlayer.self_attn.o_proj.weight": (64, 64),
        **{f"midlayer.mlp.{part}_proj.weight": (96, 64) for part in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (64, 96),
    }
    tensors = {name: random.normal(0.0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    path = write_drafter(tmp_path / "narrow", drafter_config(target, **wide), tensors)
    with (
        LLM(tiny_folder, **COMMON, speculation="none") as plain,
        LLM(tiny_folder, **COMMON, speculation="heads", draft_heads=str(path)) as drafted,
    ):
        seen = watch(drafted)
        found, expected = (llm.generate(PROMPTS, max_tokens=6, temperature=0.0) for llm in (drafted, plain))
    assert [each.completions[0].tokens for each in found] == [each.completions[0].tokens for each in expected]
    assert seen
