"""Training and what it writes, on tiny models with random weights and a few steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from headrace.adapt.adaptation import AdaptedModel, adapt_model
from headrace.adapt.modules import parse_targets, trained_modules
from headrace.adapt.recipe import AdaptRecipe
from headrace.adapt.training import TrainingProgress
from headrace.adapt.training_rows import TrainingRow
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import logits
from headrace.errors import RequestError
from headrace.models.model_folder import ModelFolder, open_model
from tests.models.gguf.gguf_models import write_gguf
from tests.models.tiny_models import Reference, prompt

ROWS = [TrainingRow([*prompt(6, seed=seed), *range(40, 46)], 6) for seed in range(12)]
HELD_OUT = [TrainingRow([*prompt(6, seed=seed), *range(40, 46)], 6) for seed in range(20, 23)]
RECIPE = AdaptRecipe(rank=4, alpha=8.0, rate=0.02, epochs=3, batch=4, evaluations=1)

Tiny = Callable[[str], Reference]


@pytest.fixture
def llama(tiny: Tiny) -> ModelFolder:
    return open_model(tiny("llama").folder)


def adapt(folder: ModelFolder, out: Path, recipe: AdaptRecipe = RECIPE, **options: object) -> AdaptedModel:
    adapted = adapt_model(folder, ROWS, HELD_OUT, recipe, out, base="tiny", **options)  # type: ignore[arg-type]
    adapted.publish(out, out.with_name("merged") if options.get("merge") else None)
    return adapted


def answer_loss(path: Path, row: TrainingRow) -> float:
    """Return the engine's mean loss of a row's answer, in nats."""
    executor = CpuExecutor.load(open_model(path), weights="f32", kv="f32", threads=1, context=64)
    (found,) = logits(executor, [row.tokens])
    executor.close()
    shifted = found - found.max(axis=1, keepdims=True)
    chances = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    places = range(row.first, len(row.tokens))
    return -float(np.mean([chances[place - 1, row.tokens[place]] for place in places]))


def test_the_loss_falls_and_the_best_weights_are_written(llama: ModelFolder, tmp_path: Path) -> None:
    shown: list[TrainingProgress] = []
    adapted = adapt(llama, tmp_path / "adapter", watch=shown.append)
    losses = [each.held_out_loss for each in adapted.state.evaluations]
    assert adapted.state.best_loss == min(losses) < 0.8 * losses[0]
    assert [each.step for each in shown] == list(range(1, 10))
    assert {each.steps for each in shown} == {9}
    assert not (tmp_path / "adapter.partial").exists()


def test_an_adapter_has_the_layout_of_peft(llama: ModelFolder, tmp_path: Path) -> None:
    recipe = AdaptRecipe(rank=2, alpha=4.0, targets=parse_targets(llama, "attention"), epochs=1, batch=12)
    adapt(llama, tmp_path / "adapter", recipe)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    assert tensors[f"{name}.lora_A.weight"].shape == (2, 64)
    assert tensors[f"{name}.lora_B.weight"].shape == (48, 2)
    assert len(tensors) == 3 * 4 * 2


def test_the_merged_model_is_the_base_with_the_adapters_products(llama: ModelFolder, tmp_path: Path) -> None:
    adapt(llama, tmp_path / "adapter", merge=True)
    base = load_file(llama.path / "model.safetensors")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.2.{module}"
        a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(merged[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * (b @ a), atol=1e-6)
    np.testing.assert_array_equal(merged["model.norm.weight"], base["model.norm.weight"])
    assert answer_loss(tmp_path / "merged", ROWS[0]) < answer_loss(llama.path, ROWS[0])


@pytest.mark.parametrize("full", [False, True])
def test_a_run_that_was_killed_ends_with_the_same_bytes(full: bool, llama: ModelFolder, tmp_path: Path) -> None:
    recipe = AdaptRecipe(full=full, rank=2, rate=0.005, epochs=2, batch=4, evaluations=1)
    adapt(llama, tmp_path / "whole", recipe)

    class KilledError(Exception):
        pass

    def kill(state: TrainingProgress) -> None:
        if state.step == 4:
            raise KilledError

    with pytest.raises(KilledError):
        adapt(llama, tmp_path / "cut", recipe, watch=kill, checkpoint_s=0.0)
    continued = adapt(llama, tmp_path / "cut", recipe)
    assert continued.resumed == 4
    name = "model.safetensors" if full else "adapter_model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_job_does_not_continue_a_checkpoint(llama: ModelFolder, tmp_path: Path) -> None:
    def kill(_: TrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapt(llama, tmp_path / "adapter", watch=kill, checkpoint_s=0.0)
    other = AdaptRecipe(rank=3, epochs=1, batch=12)
    with pytest.raises(RequestError, match="--restart"):
        adapt(llama, tmp_path / "adapter", other)
    assert adapt(llama, tmp_path / "adapter", other, restart=True).resumed == 0


def test_training_stops_when_the_held_out_loss_no_longer_falls_and_keeps_the_best(
    llama: ModelFolder, tmp_path: Path
) -> None:
    recipe = AdaptRecipe(rank=2, rate=0.05, epochs=6, batch=4, evaluations=1, patience=2)
    others = [TrainingRow([*row.tokens[:6], *range(60, 66)], 6) for row in HELD_OUT]  # little that is learnt helps
    adapted = adapt_model(llama, ROWS, others, recipe, tmp_path / "adapter", base="tiny", merge=True)
    state = adapted.state
    assert state.best_step < state.step == state.best_step + 2 * 3 < 18
    assert adapted.model is not None
    losses = [answer_loss(adapted.model, row) for row in others]
    assert sum(losses) / len(losses) == pytest.approx(state.best_loss, abs=1e-3)


def test_a_full_model_is_served_with_the_trained_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("gemma3").folder)  # its norms are stored with an offset
    adapt(folder, tmp_path / "model", AdaptRecipe(full=True, rate=1e-3, epochs=1, batch=12, evaluations=1))
    before, after = (load_file(path / "model.safetensors") for path in (folder.path, tmp_path / "model"))
    assert before.keys() == after.keys()
    moved = {name: np.abs(after[name] - before[name]).max() for name in before}
    assert all(0 < value < 0.01 for value in moved.values()), moved


def test_experts_are_trained_but_not_what_chooses_them(tiny: Tiny, tmp_path: Path) -> None:
    folder = open_model(tiny("qwen2-moe").folder)
    adapted = adapt(folder, tmp_path / "model", replace(RECIPE, full=True, rate=0.005))
    assert adapted.state.best_loss < 0.9 * adapted.state.evaluations[0].held_out_loss
    made = open_model(tmp_path / "model")
    for name, changes in {"router": False, "experts.0.down": True, "shared.gate_up": True, "shared_gate": True}.items():
        one, other = (each.tensor(f"layers.2.mlp.{name}").to_f32() for each in (made, folder))
        assert np.array_equal(one, other) is not changes
    losses = [answer_loss(tmp_path / "model", row) for row in HELD_OUT]
    assert np.mean(losses) == pytest.approx(adapted.state.best_loss, rel=0.01)


def test_an_adapter_of_a_mixture_leaves_its_experts(tiny: Tiny) -> None:
    folder = open_model(tiny("qwen2-moe").folder)
    names = {module.name for module in trained_modules(folder)}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"} < names  # layer 1 is dense
    assert not [name for name in names if "expert" in name]
    mixtral = open_model(tiny("mixtral").folder)
    for targets in ("mlp", "w1"):
        with pytest.raises(RequestError, match="experts, which take no adapters"):
            parse_targets(mixtral, targets)


def test_a_student_learns_its_teachers_predictions(tiny: Tiny, llama: ModelFolder, tmp_path: Path) -> None:
    recipe = AdaptRecipe(full=True, rate=0.003, epochs=3, batch=4, evaluations=1, teacher_share=1.0)
    # Its own teacher has nothing to teach; another model has.
    itself = adapt_model(llama, ROWS, HELD_OUT, recipe, tmp_path / "itself", base="tiny", teacher=llama)
    assert itself.state.evaluations[0].held_out_loss == pytest.approx(0.0, abs=1e-5)
    teacher = open_model(tiny("olmo2").folder)
    taught = adapt_model(llama, ROWS, HELD_OUT, recipe, tmp_path / "taught", base="tiny", teacher=teacher)
    first, *_, last = taught.state.evaluations
    assert last.train_loss < 0.75 * first.train_loss
    assert last.held_out_loss < first.held_out_loss


def test_a_gguf_file_gets_the_adapter_and_the_model_of_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    reference = tiny("llama-linear-tied")
    file = tmp_path / "model.gguf"
    write_gguf(file, reference.model, reference.folder / "tokenizer.json")
    recipe = AdaptRecipe(rank=2, rate=0.02, epochs=1, batch=6, evaluations=1)
    adapt(open_model(file), tmp_path / "of-file", recipe, merge=True)
    adapt(open_model(reference.folder), tmp_path / "of-folder", recipe)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("of-file", "of-folder"))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-4)
    merged = open_model(tmp_path / "merged")
    assert merged.tokenizer.encode("The mill") == open_model(file).tokenizer.encode("The mill")
    name = "layers.0.mlp.down"
    before, after = open_model(file).tensor(name).to_f32(), merged.tensor(name).to_f32()
    assert 0 < np.abs(after - before).max() < 0.2


def test_unknown_targets_and_existing_folders_are_rejected(llama: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Unknown target 'w_proj'"):
        parse_targets(llama, "q_proj,w_proj")
    (tmp_path / "adapter").mkdir()
    with pytest.raises(RequestError, match="exists"):
        adapt(llama, tmp_path / "adapter")
    with pytest.raises(RequestError, match="'rank' must be at least 1"):
        adapt(llama, tmp_path / "new", AdaptRecipe(rank=0))
