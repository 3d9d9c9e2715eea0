"""SmolLM2-135M-Instruct from its GGUF file: it loads, computes what transformers computes with the file's weights, and
answers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from headrace.cli import main
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.models.model_folder import open_model
from headrace.models.precision import Precision
from headrace.models.weight_choice import choose_plan, describe_choice
from tests.support.models.smollm2 import smollm2_file

TEXT = "The mill turns because the river falls. Explain in two sentences why water that is higher has more energy:"


def test_logits_are_those_of_transformers_on_the_weights_of_the_reference() -> None:
    file = smollm2_file()
    model = open_model(file)
    tokens = model.tokenizer.encode(TEXT)
    expected = reference(file, tokens)
    executor = CpuExecutor.load(model, weights="f32", kv="f32", threads=2, context=64, isa=None)
    try:
        found = logits(executor, [tokens])[0]
    finally:
        executor.close()
    assert np.abs(found - expected).max() < 1e-3
    assert (found.argmax(-1) == expected.argmax(-1)).all()


def reference(file: Path, tokens: list[int]) -> np.ndarray:
    """Logits of transformers on weights that the package gguf dequantises."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    stored = {each.name: each for each in gguf.GGUFReader(file).tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        each = stored[str(table.get_name(name, try_suffixes=(".weight",)))]
        values = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).astype(np.float32))
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                values = values.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(heads * 64, 576)
        state[name] = values
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([tokens])).logits[0].numpy()


def test_its_own_precision_keeps_codes_and_says_what_it_repacks() -> None:
    model = open_model(smollm2_file())
    plan = choose_plan(model)
    assert plan.precision("embed", tied=True).stored
    assert plan.precision("layers.0.attn.qkv") == Precision("int4", 32, stored=True, offsets=True)
    assert describe_choice(model, plan) == (
        "int4-g32 from GGUF's Q4_1, the codes in the file; int8-g32 from GGUF's Q8_0, the codes in the file"
    )


def test_it_chats_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["--prompt", "What is the capital of France?"]
    exact = ["--weights", "auto-a16", "--no-cache"]  # its first word is nearly as likely as another
    code = main(["generate", str(smollm2_file()), "--chat", *prompt, "--max-tokens", "16", "--json", *exact])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["finish_reason"]) == (0, "stop")
    assert report["text"] == "The capital of France is Paris."
