"""Dense models as mixtures: with every expert on they compute the same, and fewer experts cost what is reported."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.cli import main
from headrace.compress.compression import OVERHEAD
from headrace.compress.layer_pass import LayerPass, load_layer
from headrace.compress.recipe import SplitPlan
from headrace.compress.reshape import splitting
from headrace.compress.reshape.expert_split import balanced_clusters, most_active, split_mlp
from headrace.compress.reshape.splitting import ARCHITECTURE, memory_to_split, split_model, split_spec
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import RequestError
from headrace.models.model_folder import open_model
from headrace.models.synthetic.public_shapes import find_shape
from headrace.models.synthetic.random_model import write_shape
from tests.models.tiny_configs import SIZES
from tests.models.tiny_models import Reference, prompt, randomise

Tiny = Callable[[str], Reference]
PROMPTS = [prompt(40, seed=each) for each in range(4)]
ASKED = prompt(40, seed=9)


def core_logits(folder: Path) -> NDArray[np.float32]:
    return logits(CpuExecutor.load(open_model(folder), weights="f32", kv="f32", threads=1, context=64), [ASKED])[0]


def split_into(source: Path, out: Path, plan: SplitPlan) -> Path:
    made = split_model(open_model(source), out, PROMPTS, plan)
    made.publish(out)
    return out


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 without windows: head norms, and no biases."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(4)
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=32, use_sliding_window=False))
    randomise(model)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama-linear-tied", "qwen2-yarn", "qwen3"])
def test_a_mixture_with_every_expert_on_is_the_dense_model(name: str, tiny: Tiny, qwen3: Path, tmp_path: Path) -> None:
    source = qwen3 if name == "qwen3" else tiny(name).folder
    out = split_into(source, tmp_path / "mixture", SplitPlan(4, 4, 2))
    spec = open_model(out).spec
    assert spec.architecture == ARCHITECTURE
    assert spec.experts is not None
    assert spec.experts.count == 4
    assert spec.experts.shared_size == 32
    expected = core_logits(source)
    assert distance(core_logits(out), expected) < 1e-5
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(model).__name__ == ARCHITECTURE
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([ASKED])).logits[0].numpy()
    assert distance(theirs, expected) < 1e-4


def test_fewer_experts_are_chosen_as_transformers_chooses_and_lose_what_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama-linear-tied").folder
    made = split_model(open_model(source), tmp_path / "mixture", PROMPTS, SplitPlan(4, 2, 2))
    made.publish(tmp_path / "mixture")
    found = core_logits(tmp_path / "mixture")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixture", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([ASKED])).logits[0].numpy()
    assert distance(found, theirs) < 1e-4
    assert distance(found, core_logits(source)) > 1e-3
    for each in made.reports:
        assert 0 < each.error < 1
        assert 0 < each.kept <= each.best < 1
        assert each.best > 0.5  # half of the experts are on


def test_neurons_that_fire_together_become_an_expert_that_the_router_chooses(tiny: Tiny) -> None:
    folder = open_model(tiny("llama-linear-tied").folder)
    rng = np.random.default_rng(0)
    hidden_size, size = folder.spec.hidden_size, 16
    tensors = load_layer(folder, 0)
    topics = np.linalg.qr(rng.standard_normal((hidden_size, 6)))[0].T.astype(np.float32)
    gates = np.repeat(topics, size, axis=0) * 8  # six topics, each with neurons of its own
    gates[:size] = topics.sum(axis=0) * 4  # those of the first fire for every topic
    order = rng.permutation(len(gates))
    tensors["mlp.gate_up"] = np.concatenate([gates, gates])[np.concatenate([order, len(gates) + order])]
    tensors["mlp.norm"] = np.ones(hidden_size, dtype=np.float32)
    layer = LayerPass(folder.spec, 0, tensors)
    about = rng.integers(1, 6, 400)
    hidden = topics[about] + 0.02 * rng.standard_normal((400, hidden_size)).astype(np.float32)
    found = split_mlp(layer, hidden, SplitPlan(5, 1, 1))
    assert found.kept > 0.95
    assert found.best > 0.95
    expected = layer.after_mlp(hidden, layer.mlp_inputs(hidden)) - hidden
    assert np.square(found.outputs - expected).sum() < 0.01 * np.square(expected).sum()
    scores = layer.mlp_inputs(hidden) @ found.tensors["mlp.router"].T
    assert len({(topic, expert) for topic, expert in zip(about, scores.argmax(axis=1), strict=True)}) == 5


def test_clusters_are_equal_in_size_and_the_same_each_time() -> None:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((3, 8)) * 5
    points = (np.repeat(centres, 10, axis=0) + rng.standard_normal((30, 8)) * 0.1).astype(np.float32)
    order = rng.permutation(30)
    groups = balanced_clusters(points[order], 3)
    assert sorted(map(tuple, np.sort(order[groups] // 10, axis=1).tolist())) == [(each,) * 10 for each in range(3)]
    assert np.array_equal(groups, balanced_clusters(points[order], 3))
    skewed = rng.standard_normal((12, 4)).astype(np.float32)
    skewed[:9] *= 0.01  # one natural cluster is larger than a share
    assert sorted(balanced_clusters(skewed, 4).ravel().tolist()) == list(range(12))


def test_neurons_that_fire_most_often_are_shared() -> None:
    sizes = np.full((40, 8), 0.1, dtype=np.float32)
    sizes[:, 5] = 1  # always
    sizes[:30, 2] = 2
    sizes[:4, 7] = 100  # rarely, but strongly
    assert most_active(sizes, 2).tolist() == [2, 5]


def test_work_that_was_killed_continues_with_the_same_bytes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plan = open_model(tiny("llama-linear-tied").folder), SplitPlan(4, 2, 2)
    whole = split_model(folder, tmp_path / "whole", PROMPTS, plan)
    plain = splitting.split_mlp

    def killed(layer: LayerPass, *given: Any) -> Any:
        if np.array_equal(layer.tensors["mlp.down"], load_layer(folder, 2)["mlp.down"]):
            raise KeyboardInterrupt
        return plain(layer, *given)

    monkeypatch.setattr(splitting, "split_mlp", killed)
    with pytest.raises(KeyboardInterrupt):
        split_model(folder, tmp_path / "again", PROMPTS, plan)
    monkeypatch.setattr(splitting, "split_mlp", plain)
    with pytest.raises(RequestError, match="another model or other calibration text"):
        split_model(folder, tmp_path / "again", PROMPTS, SplitPlan(4, 1, 2))
    again = split_model(folder, tmp_path / "again", PROMPTS, plan)
    assert again.resumed == 2
    assert again.reports == whole.reports
    files = (each.folder / "model.safetensors" for each in (whole, again))
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize(
    ("name", "plan", "expected"),
    [
        ("llama-linear-tied", SplitPlan(4, 2, 1), "Choose numbers whose sum is 3 or 4 or 6"),
        ("llama-linear-tied", SplitPlan(1, 1, 1), "'split_experts' must be at least 2"),
        ("llama-linear-tied", SplitPlan(5, 6, 1), "'active' must be 1 to 5"),
        ("llama-linear-tied", SplitPlan(5, 2, 0), "'shared' must be at least 1"),
        ("qwen3-moe", SplitPlan(5, 2, 1), "has experts already"),
        ("llama", SplitPlan(5, 2, 1), "no place for its o_bias, mlp_bias"),
        ("mistral", SplitPlan(5, 2, 1), "no place for its layers"),
        ("gemma2", SplitPlan(5, 2, 1), "cannot be split into experts"),
        ("olmo2", SplitPlan(5, 2, 1), "no place for its"),
    ],
)
def test_what_cannot_be_split_is_rejected(
    name: str, plan: SplitPlan, expected: str, tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=expected):
        split_model(open_model(tiny(name).folder), tmp_path / "mixture", PROMPTS, plan)
    assert not list(tmp_path.iterdir())


def test_the_memory_is_bounded_by_the_formula(tmp_path: Path) -> None:
    prompts = [[(row + at) % 250 for at in range(64)] for row in range(48)]
    shape = find_shape("tiny")
    for neurons in (384, 1536):  # the sums of products of neurons grow with their square
        path = tmp_path / f"model-{neurons}"
        write_shape(replace(shape, config={**shape.config, "intermediate_size": neurons}), path, "bf16", 1)
        folder, plan = open_model(path), SplitPlan(4, 2, 2)
        tracemalloc.start()
        split_model(folder, tmp_path / f"out-{neurons}", prompts, plan)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        bound = memory_to_split(folder.spec, 64 * 48, 64, plan) - OVERHEAD
        assert bound / 4 < peak < bound


def test_the_command_measures_the_mixture_and_writes_a_card(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old mill stands by the river, and its wheel turns. " * 20)
    model, out = str(tiny("llama-linear-tied").folder), tmp_path / "mixture"
    arguments = ["reshape", model, str(out), "--calibrate", str(text), "--window", "64", "--calibrate-tokens", "200"]
    assert main([*arguments, "--split-experts", "4", "--shared", "2", "--neurons", "64", "--active", "2"]) == 2
    assert "cannot be combined with --neurons" in capsys.readouterr().err
    assert main([*arguments, "--split-experts", "4"]) == 2
    assert "Pass --active K too" in capsys.readouterr().err
    for unused in (("--shared", "2"), ("--threads", "1"), ("--measure-tokens", "9"), ("--no-quality",)):
        assert main([*arguments, "--neurons", "64", *unused]) == 2
        assert f"{unused[0]} is for --split-experts" in capsys.readouterr().err
    arguments += ["--split-experts", "4", "--shared", "2", "--active", "2", "--threads", "1", "--no-speed"]
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "0.01")
    assert main(arguments) == 1
    assert "calibration tokens takes up to" in capsys.readouterr().err
    monkeypatch.delenv("HEADRACE_MEMORY_GIB")
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of them kept, %" in printed
    assert "KL per token" in printed
    assert "67% of the neurons" in printed
    card = (out / "README.md").read_text()
    assert "| routed experts | 4, of which a token goes through 2 |" in card
    assert "KL per token" in card
    assert card.count("\n| 0 | ") == 1
    assert not out.with_name("mixture.partial").exists()
    assert main(["generate", str(out), "--prompt", "The old", "--max-tokens", "2", "--no-cache"]) == 0


def test_the_spec_of_a_mixture_keeps_everything_but_the_neurons(tiny: Tiny) -> None:
    spec = open_model(tiny("qwen2-yarn").folder).spec
    found = split_spec(spec, SplitPlan(5, 2, 1))
    assert found.experts is not None
    assert found.experts.intermediate_size == 16
    layers = tuple(replace(layer, experts=False) for layer in found.layers)
    back = replace(
        found, family=spec.family, architecture=spec.architecture, layers=layers, experts=None, intermediate_size=96
    )
    assert back == spec
