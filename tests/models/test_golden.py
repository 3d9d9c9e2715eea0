"""Headrace against transformers, family by family, in f32.

Each decoder's logits at every position, its greedy tokens, and the same bits alone and in a batch; each encoder's
embeddings. The reference for greedy tokens is one forward pass over prompt and answer: every token must be the one that
transformers finds likeliest after all before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.cli import main
from headrace.engine.executors.cpu_executor import CpuExecutor, memory_of
from headrace.engine.executors.runner import embed, greedy, hidden_states, logits
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.models.model_folder import open_model, with_expanded_kv
from headrace.models.precision import Precision, WeightPlan
from headrace.variant import Variant
from tests.models.tiny_configs import CONTEXT
from tests.models.tiny_models import DECODERS, ENCODERS, WHOLE, Reference, prompt

LENGTHS = (1, 17, 300)  # one token, a few blocks' worth, and far past every window and trained context
RAGGED = (17, 1, 300, 40, 5)
ANSWER = 64  # tokens

Tiny = Callable[[str], Reference]
Executors = Callable[[str], CpuExecutor]


@pytest.fixture(scope="module")
def executors(tiny: Tiny) -> Executors:
    loaded: dict[str, CpuExecutor] = {}

    def get(name: str) -> CpuExecutor:
        if name not in loaded:
            folder = open_model(tiny(name).folder)
            loaded[name] = CpuExecutor.load(folder, weights="f32", kv="f32", threads=2, context=CONTEXT, isa=None)
        return loaded[name]

    return get


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_transformers(name: str, length: int, tiny: Tiny, executors: Executors) -> None:
    tokens = prompt(length)
    (found,) = logits(executors(name), [tokens])
    assert relative_error(found, tiny(name).logits(tokens)) < 1e-4


@pytest.mark.parametrize("name", [*WHOLE, *ENCODERS])
def test_rotated_weights_compute_the_same(
    name: str, tiny: Tiny, executors: Executors, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(300)
    found = hidden_states(executors(name), [tokens])[0]
    plan = WeightPlan(Precision("f32", rotated=True))
    monkeypatch.setattr("headrace.engine.executors.cpu_executor.choose_plan", lambda *_, **__: plan)
    folder = open_model(tiny(name).folder)
    rotated = CpuExecutor.load(folder, weights="f32", kv="f32", threads=2, context=CONTEXT, isa=None)
    assert relative_error(hidden_states(rotated, [tokens])[0], found) < 1e-4
    if name in DECODERS:
        assert relative_error(logits(rotated, [tokens])[0], tiny(name).logits(tokens)) < 1e-4


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", WHOLE)
def test_greedy_tokens_are_those_of_transformers(name: str, length: int, tiny: Tiny, executors: Executors) -> None:
    tokens = prompt(length)
    (answer,) = greedy(executors(name), [tokens], ANSWER)
    assert len(answer) == ANSWER
    expected = tiny(name).logits(tokens + answer)[length - 1 : -1].argmax(-1).tolist()
    assert answer == expected


@pytest.mark.parametrize("name", WHOLE)
def test_ragged_batch_is_one_at_a_time_to_the_bit(name: str, executors: Executors) -> None:
    executor = executors(name)
    prompts = [prompt(length, seed=3) for length in RAGGED]
    together = logits(executor, prompts)
    assert [found.shape[0] for found in together] == list(RAGGED)
    for tokens, found in zip(prompts, together, strict=True):
        (alone,) = logits(executor, [tokens])
        assert found.tobytes() == alone.tobytes()
    assert greedy(executor, prompts, ANSWER) == [greedy(executor, [tokens], ANSWER)[0] for tokens in prompts]


def test_the_latent_of_keys_and_values_may_be_expanded_in_kv_memory(tiny: Tiny, executors: Executors) -> None:
    options: dict[str, Any] = {"weights": "f32", "kv": "f32", "threads": 2, "context": CONTEXT}
    folder, tokens = tiny("deepseek-v3").folder, prompt(40)
    executor = CpuExecutor.load(with_expanded_kv(open_model(folder)), **options)
    assert relative_error(logits(executor, [tokens])[0], tiny("deepseek-v3").logits(tokens)) < 1e-4
    assert executors("deepseek-v3").kv_bytes_per_token == 4 * 3 * 48  # layers, and a rank of 40 with 8 dims that turn
    assert executor.kv_bytes_per_token == 4 * 3 * 4 * (32 + 16)  # 4 heads, whose 24 and 12 dims are padded
    with LLM(folder, latent_kv=False, cache=False, **options) as llm:
        (answer,) = llm.generate([tokens], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert answer.completions[0].tokens == greedy(executor, [tokens], 8)[0]
    assert memory_of(open_model(folder), Variant(model="", kv="f32", latent_kv=False)).kv_token == (
        executor.kv_bytes_per_token
    )
    with pytest.raises(RequestError, match="is for models with latent attention"):
        LLM(tiny("llama").folder, latent_kv=False, cache=False)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_those_of_transformers(name: str, length: int, tiny: Tiny, executors: Executors) -> None:
    tokens = prompt(length)
    (found,) = embed(executors(name), [tokens])
    assert relative_error(found, tiny(name).embedding(tokens)) < 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_ragged_batch_of_texts_is_one_at_a_time_to_the_bit(name: str, executors: Executors) -> None:
    executor = executors(name)
    texts = [prompt(length, seed=3) for length in RAGGED]
    together = embed(executor, texts)
    for tokens, found in zip(texts, together, strict=True):
        assert found.tobytes() == embed(executor, [tokens])[0].tobytes()


@pytest.mark.parametrize(
    ("weights", "kv"),
    [("f32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "bf16"), ("int4", "f32"), ("int4-a16", "int4")],
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe", "phi3", "bert", "mpnet", "modernbert"])
def test_instruction_sets_give_the_same_bits(name: str, weights: str, kv: str, tiny: Tiny) -> None:
    folder = open_model(tiny(name).folder)
    # Dot products of bf16 pairs round rows, queries and weights of attention to bf16 first: an arithmetic of its own.
    own = {"amx", "amx-emulated"} if weights == "bf16" else set[str]()
    own |= {"avx512bf16"} if weights == "bf16" or kv != "f32" else set[str]()
    own |= {"amx", "amx-emulated"} if kv != "f32" else set[str]()
    isas = [isa for isa in [*_core.isa_available(), *_core.isa_emulated()] if isa not in own]
    found = {
        isa: hidden_states(
            CpuExecutor.load(folder, weights=weights, kv=kv, threads=2, context=CONTEXT, isa=isa), [prompt(90)]
        )[0].tobytes()
        for isa in isas
    }
    assert len(set(found.values())) == 1, found.keys()


@pytest.mark.parametrize("name", WHOLE)
def test_the_command_generates_like_transformers(name: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--weights", "f32", "--kv", "f32", "--context", str(CONTEXT), "--no-cache", "--ignore-eos", "--json"]
    assert main(["generate", str(tiny(name).folder), "-p", "The water ran to the wheel.", "-n", "24", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    tokens = report["prompt_tokens"]
    expected = tiny(name).logits(tokens + report["tokens"])[len(tokens) - 1 : -1].argmax(-1).tolist()
    assert report["tokens"] == expected
