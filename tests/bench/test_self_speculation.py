"""A model's drafts for itself: which layers are left out, what they share, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bench.self_speculation import Calibration, check_takes_drafts, choose_drafts, predicted_speedup
from headrace.cli import main
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.models.model_folder import open_model
from headrace.models.shorter_model import shorter_spec, shorter_tensors

PROMPTS = [[5, 9, 30, 41, 7], [100, 20, 21, 22, 23, 24]]


@pytest.fixture(scope="module")
def executor(tiny_folder: Path) -> CpuExecutor:
    return CpuExecutor.load(open_model(tiny_folder), weights="bf16", threads=1, context=128)


def test_a_prediction_is_never_below_no_drafts_and_grows_with_agreement() -> None:
    assert predicted_speedup(0.1, 0.9) == 1.0
    assert predicted_speedup(0.99, 0.2) > predicted_speedup(0.8, 0.2) > predicted_speedup(0.8, 0.4) >= 1.0


def test_a_shorter_model_shares_the_tensors_of_the_layers_that_stay(executor: CpuExecutor) -> None:
    spec = executor.spec
    names = {"embed": 0, **{f"layers.{place}.mlp.down": place + 1 for place in range(len(spec.layers))}}
    found = shorter_tensors(spec, names, (0,))
    assert found["embed"] == 0
    assert found["layers.0.mlp.down"] == names["layers.1.mlp.down"]
    assert len(shorter_spec(spec, (0,)).layers) == len(spec.layers) - 1 == len(found) - 1


def test_layers_that_do_not_exist_are_named(executor: CpuExecutor) -> None:
    count = len(executor.spec.layers)
    with pytest.raises(RequestError, match=rf"layer {count}\. This model has the layers 0 to {count - 1}"):
        shorter_spec(executor.spec, (count,))
    with pytest.raises(RequestError, match="names every layer"):
        shorter_spec(executor.spec, range(count))


def test_models_that_generate_no_text_are_rejected(executor: CpuExecutor) -> None:
    check_takes_drafts(executor.spec, "mini")
    with pytest.raises(RequestError, match="'encoder' generates no text"):
        check_takes_drafts(msgspec.structs.replace(executor.spec, kind="encoder"), "encoder")


def test_the_best_way_to_draft_is_first_and_the_whole_model_always_agrees(
    executor: CpuExecutor, tiny_folder: Path
) -> None:
    calibration = Calibration(executor, PROMPTS, 12)
    assert calibration.agreement(executor) == 1.0
    found = choose_drafts(executor, open_model(tiny_folder), PROMPTS, answer=12, precisions=(None, "int4"))
    assert [each.speedup for each in found] == sorted((each.speedup for each in found), reverse=True)
    assert any(each.weights == "int4" and not each.skip_layers for each in found)
    for each in found:
        assert 0.0 < each.cost < 1.0
        draft = executor.drafting(open_model(tiny_folder), each.skip_layers, weights=each.weights)
        assert calibration.agreement(draft) == each.agreement
        draft.close()


def test_answers_are_the_same_with_the_options_that_it_finds(tiny_folder: Path) -> None:
    common: dict[str, Any] = {"weights": "bf16", "threads": 1, "context": 128}
    own: dict[str, Any] = {"speculation": "self", "skip_layers": [1], "draft_weights": "int8"}
    wanted: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with (
        LLM(str(tiny_folder), speculation="none", **common) as plain,
        LLM(str(tiny_folder), **common, **own) as drafted,
    ):
        expected = plain.generate(PROMPTS, **wanted)
        found = drafted.generate(PROMPTS, **wanted)
    assert [each.completions[0].tokens for each in found] == [each.completions[0].tokens for each in expected]
    with pytest.raises(RequestError, match="skip_layers"):
        LLM(tiny_folder, **common, speculation="self", skip_layers=[99])


def test_the_command_measures_beside_no_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "What is a queue?"}]}) + "\n")
    arguments = ["speculate", "mini", "--prompts", str(prompts), "--tokens", "8", "--rounds", "1", "--threads", "1"]
    assert main([*arguments, "--draft-weights", "int4", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["measured"][:2]] == ["none", "n-grams"]
    assert report["measured"][0]["speedup"] == 1.0
    assert all(0.0 <= each["agreement"] <= 1.0 for each in report["drafts"])
    assert report["drafts"][0]["options"]["speculation"] == "self"
    assert main([*arguments, "--rounds", "0"]) == 2
    assert main(["speculate", "mini", "--prompts", "missing.jsonl"]) == 2
    assert "There is no file missing.jsonl" in capsys.readouterr().err
    assert main([*arguments, "--json", "missing/result.json"]) == 2
    assert "The folder of missing/result.json does not exist" in capsys.readouterr().err
