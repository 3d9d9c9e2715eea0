"""What `headrace doctor` says about memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.doctor.memory_checks import check_huge_pages, check_memory_of, configured_memory
from headrace.config import Config, ModelConfig
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.models.model_folder import open_model


def test_the_memory_of_a_variant_is_what_its_executor_takes(tiny_folder: Path) -> None:
    options = {"weights": "int8", "kv_tokens": 100, "context": 64}
    need = configured_memory(Config(models={"a": ModelConfig(path=str(tiny_folder), options=options)}))
    executor = CpuExecutor.load(open_model(tiny_folder), weights="int8", kv_tokens=100, context=64, threads=1)
    try:
        assert need.weights == executor.load_report.weight_bytes
        assert need.kv == executor.capacity.blocks * executor.block_bytes
    finally:
        executor.close()


def test_replicas_share_weights_and_not_kv_memory(tiny_folder: Path) -> None:
    def need(**changes: object) -> tuple[int, int]:
        model = {"path": str(tiny_folder), "replicas": 1} | changes
        found = configured_memory(Config(models={"a": ModelConfig(**model)}))  # type: ignore[arg-type]
        return found.weights, found.kv

    weights, kv = need()
    assert need(replicas=3) == (weights, 3 * kv)
    assert need(replicas=3, options={"cache": False}) == (3 * weights, 3 * kv)
    assert need(variants={"short": {"kv": "bf16"}}) == (weights, 2 * kv)
    draft = {"speculation": "model", "draft_model": str(tiny_folder)}
    assert need(options=draft) == (weights, 2 * kv)


def test_a_model_that_is_not_here_is_a_warning() -> None:
    memory, models = check_memory_of(Config(models={"far": ModelConfig(path="some/model")}))
    assert (memory.state, models.state) == ("ok", "warn")
    assert "far" in models.found


def test_little_memory_beside_the_models_is_a_warning(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(models={"a": ModelConfig(path=str(tiny_folder))})
    need = configured_memory(config).total
    states = []
    for share in (0.9, 1.05, 2):
        monkeypatch.setenv("HEADRACE_MEMORY_GIB", f"{need * share / 2**30:.9f}")
        states += [each.state for each in check_memory_of(config)]
    assert states == ["fail", "warn", "ok"]


def test_a_limit_that_is_no_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "much")
    (found,) = check_memory_of(None)
    assert (found.state, "HEADRACE_MEMORY_GIB" in found.advice) == ("fail", True)


@pytest.mark.parametrize(
    ("text", "state"),
    [(None, "ok"), ("[always] madvise never\n", "ok"), ("always [madvise] never\n", "warn")],
)
def test_huge_pages_that_are_not_always_used_are_a_warning(tmp_path: Path, text: str | None, state: str) -> None:
    if text is not None:
        folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
        folder.mkdir(parents=True)
        (folder / "enabled").write_text(text)
    (found,) = check_huge_pages(tmp_path)
    assert found.state == state
