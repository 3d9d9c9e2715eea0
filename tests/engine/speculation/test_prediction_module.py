"""A checkpoint's own prediction module: its logits and drafts are those of the published definition, and answers are
the same bytes with and without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headrace.cli import main
from headrace.engine.executors.cpu_executor import CpuExecutor, memory_of
from headrace.engine.executors.executor import StepBatch
from headrace.engine.executors.runner import hidden_states
from headrace.engine.speculation.head_drafter import HeadDrafter
from headrace.engine.speculation.joined_layer import prediction_layer
from headrace.engine.speculation.layer_drafter import LayerDrafter
from headrace.errors import InsufficientMemoryError, ModelError, RequestError
from headrace.llm import LLM
from headrace.models.model_folder import open_model
from headrace.models.own_module import own_module
from headrace.models.prediction_module import has_prediction_module, open_prediction_module
from headrace.models.weight_choice import choose_plan, describe_choice
from headrace.variant import Variant
from tests.models.gguf.converted import write_converted
from tests.models.tiny_models import prompt
from tests.support.models.prediction_modules import Checkpoint, add_foreseeing_module, build_checkpoint

ALL = ("deepseek-v3", "glm4-moe", "qwen3-next", "qwen3.5")
SERVED = ("deepseek-v3", "qwen3-next")
FILES = {"glm4-moe": "glm4moe", "deepseek-v3": "deepseek2", "qwen3.5": "qwen35"}  # architectures in GGUF files
COMMON: dict[str, Any] = {"weights": "f32", "kv": "f32", "threads": 1, "context": 128, "checks": True, "cache": False}
PROMPTS = [prompt(5), prompt(21), prompt(40)]

Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    built: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in built:
            built[name] = build_checkpoint(name, tmp_path_factory.mktemp(name))
        return built[name]

    return get


def eager(llm: LLM) -> LayerDrafter:
    """Let the engine draft as much as it can, whatever that costs on this machine."""
    llm.opened.engine._step_time.predict = lambda rows, pairs: 1.0  # pyright: ignore[reportPrivateUsage]
    speculator = llm.opened.engine.speculator
    assert speculator is not None
    drafter = speculator.drafter
    assert isinstance(drafter, HeadDrafter)
    assert isinstance(drafter, LayerDrafter)
    drafter.pass_seconds = lambda sequences: 0.0
    speculator.lengths.prior = speculator.lengths.memory = 0.99
    return drafter


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_definition(name: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints(name)
    folder = open_model(checkpoint.folder)
    executor = CpuExecutor.load(folder, weights="f32", kv="f32", threads=1, context=64)
    own = own_module(folder, Variant(model=str(checkpoint.folder), weights="f32", speculation="mtp"))
    assert own is not None
    layer = prediction_layer(executor, own)
    tokens = prompt(40)
    (states,) = hidden_states(executor, [tokens])
    expected = checkpoint.states(tokens).numpy()
    assert np.abs(states - expected).max() < 1e-4 * np.abs(expected).max()
    features = layer.features(np.array(tokens[1:], dtype=np.int32), states[:-1])
    rows = np.arange(len(features), dtype=np.int32)
    batch = StepBatch(
        tokens=np.zeros(len(rows), dtype=np.int32),
        offsets=np.array([0, len(rows)], dtype=np.int32),
        computed=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
        rope_variants=np.zeros(1, dtype=np.int32),
        wanted=rows,
        features=features,
        feature_rows=rows,
    )
    found: NDArray[np.float32] = layer.executor.collect(layer.executor.launch(batch)).values
    wanted = checkpoint.logits(tokens)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    layer.executor.close()
    executor.close()


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_has_the_module_of_its_folder(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints(name)
    write_converted(checkpoint.folder, tmp_path / "model.gguf", FILES[name])
    model = open_model(tmp_path / "model.gguf")
    assert len(model.spec.layers) == len(open_model(checkpoint.folder).spec.layers)
    module, expected = open_prediction_module(model), open_prediction_module(open_model(checkpoint.folder))
    assert module.shapes == expected.shapes
    for each in expected.shapes:
        added = expected.spec.norm_offset if each.endswith("norm") and "recurrent" not in each else 0
        assert np.allclose(module.tensor(each).to_f32(), expected.tensor(each).to_f32() + added, atol=1e-6), each
    assert 'speculation = "mtp" drafts with them' in describe_choice(model, choose_plan(model))


def test_a_gguf_file_without_the_module_says_which_tensor_it_lacks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def drop(writer: Any) -> None:
        for tensor in [each for each in writer.tensors[0] if each.endswith(dropped)]:
            del writer.tensors[0][tensor]

    dropped = "nextn.eh_proj.weight"
    write_converted(checkpoints("glm4-moe").folder, tmp_path / "a.gguf", "glm4moe", change=drop)
    with pytest.raises(RequestError, match=r"Expected the tensor blk\.\d\.nextn\.eh_proj\.weight"):
        open_prediction_module(open_model(tmp_path / "a.gguf"))
    dropped = "nextn.hnorm.weight"
    write_converted(checkpoints("glm4-moe").folder, tmp_path / "b.gguf", "glm4moe", change=drop)
    with pytest.raises(ModelError, match="no such tensor") as caught:
        open_prediction_module(open_model(tmp_path / "b.gguf"))
    assert str(caught.value.tensor).endswith(dropped)


@pytest.mark.parametrize("place", ["folder", "file"])
def test_each_draft_reads_the_drafts_before_it(place: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("glm4-moe")
    path = checkpoint.folder
    if place == "file":
        path = tmp_path / "model.gguf"
        write_converted(checkpoint.folder, path, "glm4moe")
    with LLM(path, **COMMON, speculation="mtp") as llm:
        drafter = eager(llm)
        seen: list[tuple[list[int], list[int]]] = []
        propose = drafter.propose_all

        def watched(wanted: Any) -> list[list[int]]:
            found = propose(wanted)
            seen.append((list(wanted[0][0].tokens), found[0]))
            return found

        drafter.propose_all = watched
        llm.generate([PROMPTS[1]], max_tokens=8, temperature=0.0, ignore_eos=True)
        assert drafter.free_blocks == llm.opened.executor.capacity.blocks
    drafted = [(tokens, drafts) for tokens, drafts in seen if drafts]
    assert len(drafted) > 2
    for tokens, drafts in drafted:
        assert drafts == checkpoint.drafts(tokens, len(drafts), first=0)


def test_the_context_is_the_prompt_in_chunks_but_for_what_is_cached(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints("glm4-moe")
    long = prompt(90)
    with LLM(checkpoint.folder, **COMMON, speculation="mtp", max_rows=40) as llm:
        drafter = eager(llm)
        seen: list[tuple[list[int], list[int]]] = []
        propose = drafter.propose_all

        def watched(wanted: Any) -> list[list[int]]:
            found = propose(wanted)
            seen.append((list(wanted[0][0].tokens), found[0]))
            return found

        drafter.propose_all = watched
        for first in (0, len(long) - 1):  # the second time, all but the last token is in the cache
            seen.clear()
            llm.generate([long], max_tokens=5, temperature=0.0, ignore_eos=True)
            tokens, drafts = seen[0]
            assert tokens[:-1] == long
            assert len(drafts) >= 3
            assert drafts == checkpoint.drafts(tokens, len(drafts), first=first)
        assert drafter.free_blocks == llm.opened.executor.capacity.blocks


@pytest.mark.parametrize("name", SERVED)
def test_answers_are_the_same_bytes_with_the_module(name: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(name).folder
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 20},
        {"temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 20},
    ]
    with LLM(folder, **COMMON, speculation="none") as plain, LLM(folder, **COMMON, speculation="mtp") as drafted:
        eager(drafted)
        for wanted in ways:
            expected = plain.generate(PROMPTS, ignore_eos=True, **wanted)
            found = drafted.generate(PROMPTS, ignore_eos=True, **wanted)
            for one, other in zip(found, expected, strict=True):
                assert [each.tokens for each in one.completions] == [each.tokens for each in other.completions]
            assert sum(each.usage.drafted for one in found for each in one.completions) > 0


def test_a_recurrent_model_is_measured_and_learns_heads(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints("qwen3-next").folder
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the mill", "the water wheel")))
    common = ["--threads", "1", "--drafts", "2", "--epochs", "1", "--answer-tokens", "8", "--vocabulary", "64"]
    heads = tmp_path / "heads"
    assert main(["adapt", str(folder), "--data", str(prompts), "--out", str(heads), "--heads", "medusa", *common]) == 0
    capsys.readouterr()
    wanted = ["--heads", str(heads), "--tokens", "8", "--rounds", "1", "--threads", "1", "--json", "-"]
    assert main(["speculate", str(folder), "--prompts", str(prompts), *wanted]) == 0  # answers are compared
    report = json.loads(capsys.readouterr().out)
    assert report["drafts"] == []
    names = [each["name"] for each in report["measured"]]
    assert names == ["none", "n-grams", "its prediction module", "heads, heads"]


@pytest.fixture
def foreseeing(tiny_folder: Path, copy_of: Callable[[Path], Path]) -> Path:
    folder = copy_of(tiny_folder)
    add_foreseeing_module(folder)
    return folder


@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_drafts_of_a_module_that_knows_the_model_are_accepted(foreseeing: Path, weights: str) -> None:
    options = COMMON | {"weights": weights}
    with LLM(foreseeing, **options, speculation="none") as plain:
        expected = plain.generate(PROMPTS, max_tokens=30, temperature=0.0, ignore_eos=True)
    with LLM(foreseeing, **options, speculation="mtp", most_drafts=4) as llm:
        eager(llm)
        found = llm.generate(PROMPTS, max_tokens=30, temperature=0.0, ignore_eos=True)
    assert [each.completions[0].tokens for each in found] == [each.completions[0].tokens for each in expected]
    usages = [each.completions[0].usage for each in found]
    assert sum(each.accepted for each in usages) > 0.9 * sum(each.drafted for each in usages) > 40


def test_the_memory_of_the_module_is_counted(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_model(foreseeing)
    plain = Variant(model=str(foreseeing), weights="f32", kv="f32", context=64)
    drafted = Variant(model=str(foreseeing), weights="f32", kv="f32", context=64, speculation="mtp")
    own = own_module(folder, drafted)
    assert own is not None
    without, need = memory_of(folder, plain), memory_of(folder, drafted)
    layers = len(folder.spec.layers)
    assert need.drafts == own.weight_bytes + need.kv // layers
    hidden = folder.spec.hidden_size
    assert own.weight_bytes > 4 * 2 * hidden * hidden
    assert need.total == without.total + need.drafts
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", str((without.total + need.drafts // 2) / 2**30))
    CpuExecutor.load(folder, weights="f32", kv="f32", context=64, threads=1).close()
    with pytest.raises(InsufficientMemoryError, match="of its prediction module"):
        LLM(foreseeing, weights="f32", kv="f32", context=64, threads=1, speculation="mtp")


def test_a_model_without_a_module_is_rejected_by_name(tiny_folder: Path) -> None:
    assert not has_prediction_module(open_model(tiny_folder))
    with pytest.raises(RequestError, match="'tiny' has no prediction module that Headrace reads") as raised:
        LLM(tiny_folder, **COMMON, speculation="mtp")
    assert raised.value.parameter == "speculation"


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("hnorm.weight", None, "hnorm.weight"),
        ("eh_proj.weight", lambda tensor: tensor[:, :-1].clone(), "Expected 128x256"),
        ("self_attn.q_proj.weight", None, "q_proj.weight"),
    ],
)
def test_a_wrong_module_names_its_tensor(foreseeing: Path, part: str, change: Any, expected: str) -> None:
    path = foreseeing / "model.safetensors"
    stored = load_file(path)
    name = f"model.layers.{len(open_model(foreseeing).spec.layers)}.{part}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor)
    save_file(stored, path)
    with pytest.raises(ModelError) as raised:
        LLM(foreseeing, **COMMON, speculation="mtp")
    assert raised.value.tensor == name
    assert expected in str(raised.value)
    LLM(foreseeing, **COMMON, speculation="none").close()


def test_a_module_that_is_not_used_is_named(foreseeing: Path) -> None:
    folder = open_model(foreseeing)
    plan = choose_plan(folder)
    assert describe_choice(folder, plan).endswith('are not used (speculation = "mtp" drafts with them)')
    assert describe_choice(folder, plan, drafts=True) == ""
