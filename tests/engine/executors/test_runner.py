"""The executor driven directly: chunked prompts, greedy tokens, bounds and embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headrace._core as _core
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner, embed, greedy, hidden_states, logits
from headrace.errors import RequestError
from headrace.models.model_folder import open_model
from headrace.models.synthetic.random_model import write_random_model

PROMPT = list(range(5, 60))


@pytest.fixture(scope="module")
def executor(tiny_folder: Path) -> CpuExecutor:
    return CpuExecutor.load(open_model(tiny_folder), weights="int8", kv="bf16", threads=2, context=256)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> CpuExecutor:
    folder = tmp_path_factory.mktemp("encoder") / "minilm"
    write_random_model("minilm-l6", folder)
    return CpuExecutor.load(open_model(folder), weights="bf16", kv="f32", threads=2)


def test_prompts_are_cut_to_the_rows_of_a_step_without_a_trace(tiny_folder: Path, executor: CpuExecutor) -> None:
    narrow = CpuExecutor.load(open_model(tiny_folder), weights="int8", kv="bf16", max_rows=7)
    prompts = [PROMPT, PROMPT[:3], PROMPT[10:41]]
    for found, expected in zip(logits(narrow, prompts), logits(executor, prompts), strict=True):
        assert np.array_equal(found, expected)


def test_many_prompts_decode_as_each_does_alone(executor: CpuExecutor) -> None:
    prompts = [PROMPT[:1], PROMPT[:17], PROMPT]
    assert greedy(executor, prompts, 9) == [greedy(executor, [prompt], 9)[0] for prompt in prompts]


def test_blocks_come_back_when_a_sequence_is_closed(executor: CpuExecutor) -> None:
    runner = Runner(executor)
    for _ in range(3 * executor.capacity.blocks):
        runner.close(runner.open(PROMPT))


@pytest.mark.parametrize(
    ("tokens", "total", "parameter"), [([], None, "prompt"), (PROMPT, 257, "max_tokens"), (PROMPT * 5, None, "prompt")]
)
def test_what_does_not_fit_is_refused(
    tokens: list[int], total: int | None, parameter: str, executor: CpuExecutor
) -> None:
    with pytest.raises(RequestError) as caught:
        Runner(executor).open(tokens, total=total)
    assert caught.value.parameter == parameter


def test_a_runner_without_free_blocks_refuses(executor: CpuExecutor) -> None:
    runner = Runner(executor)
    for _ in range(4):
        runner.open(PROMPT, total=256)
    with pytest.raises(RequestError, match="blocks"):
        runner.open(PROMPT)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"weights": "int5"}, "weights"),
        ({"kv": "int3"}, "kv"),
        ({"threads": 0}, "threads"),
        ({"context": 0}, "context"),
        ({"context": 10**9}, "context"),
        ({"isa": "mmx"}, "isa"),
        ({"arithmetic": "exact"}, "arithmetic"),
        ({"keep": ["nothing=bf16"]}, "keep"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], parameter: str, tiny_folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        CpuExecutor.load(open_model(tiny_folder), **options)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


def test_an_unknown_forced_instruction_set_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ISA", "mmx")
    with pytest.raises(RequestError, match="mmx") as caught:
        CpuExecutor.load(open_model(tiny_folder))
    assert caught.value.parameter == "HEADRACE_ISA"


def test_portable_arithmetic_limits_the_instruction_sets(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_ISA", raising=False)
    executor = CpuExecutor.load(open_model(tiny_folder), arithmetic="portable")
    assert (executor.isa, executor.arithmetic) == (_core.isa_default("portable"), "portable")
    executor.close()
    for isa in _core.isa_emulated():
        with pytest.raises(RequestError, match="does not compute the portable arithmetic"):
            CpuExecutor.load(open_model(tiny_folder), isa=isa, arithmetic="portable")
    monkeypatch.setenv("HEADRACE_ARITHMETIC", "exact")
    with pytest.raises(RequestError, match="Unknown arithmetic 'exact'") as caught:
        CpuExecutor.load(open_model(tiny_folder))
    assert caught.value.parameter == "HEADRACE_ARITHMETIC"


def test_a_wrong_token_fails_the_step_and_not_the_executor(executor: CpuExecutor) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        logits(executor, [[1, 10**6]])
    assert np.isfinite(logits(executor, [PROMPT])[0]).all()


def test_embeddings_are_unit_vectors_and_do_not_depend_on_company(encoder: CpuExecutor) -> None:
    texts = [list(range(10, 30)), [7], list(range(100, 300))]
    vectors = embed(encoder, texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    assert all(np.array_equal(embed(encoder, [text])[0], vector) for text, vector in zip(texts, vectors, strict=True))


def test_more_texts_than_a_step_takes_are_embedded_whole(encoder: CpuExecutor) -> None:
    texts = [list(range(start, start + 200)) for start in (5, 50, 500, 5000)]
    states = hidden_states(encoder, texts)
    assert [len(rows) for rows in states] == [200] * 4
    assert np.array_equal(states[2], hidden_states(encoder, [texts[2]])[0])


def test_the_time_of_steps_is_told_stage_by_stage(executor: CpuExecutor) -> None:
    before = executor.stage_seconds()
    logits(executor, [PROMPT])
    spent = {stage: seconds - before[stage] for stage, seconds in executor.stage_seconds().items()}
    assert {stage for stage, seconds in spent.items() if seconds > 0} >= {"qkv", "attention", "up", "down", "head"}
    assert spent["route"] == 0  # no experts
