"""What memory is available, and what a model that does not fit is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace._core as _core
from headrace import LLM
from headrace.cli import FAILED, main
from headrace.engine.executors.memory import MemoryNeed, available_memory, check_memory, installed_memory
from headrace.errors import InsufficientMemoryError, RequestError
from headrace.models.model_folder import open_model
from headrace.models.packing import packed_size
from headrace.models.precision import parse_plan

GIB = 2**30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_bound_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert available_memory(proc, groups) == 0
    write(proc, meminfo="MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert available_memory(proc, groups) == 1000 * 1024
    write(groups, memory__max="500000\n", memory__current="100000\n")
    assert available_memory(proc, groups) == 400_000
    write(groups, memory__max="max\n")
    assert available_memory(proc, groups) == 1000 * 1024


def test_the_limits_of_all_groups_around_the_process_count(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemAvailable: 1000 kB\n")
    write(proc / "self", cgroup="0::/pod/app\n")
    write(groups / "pod" / "app", memory__max="max\n", memory__current="0\n")
    write(groups / "pod", memory__max="700000\n", memory__current="300000\n")
    assert available_memory(proc, groups) == 400_000
    write(groups / "pod", memory__stat="anon 1\ninactive_file 40000\nactive_file 10000\n")  # the system can drop these
    assert available_memory(proc, groups) == 450_000


def test_the_installed_memory_is_that_of_the_machine_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_MEMORY_GIB", raising=False)
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert installed_memory(proc, groups) == 0
    write(proc, meminfo="MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert installed_memory(proc, groups) == 2000 * 1024
    write(groups, memory__max="500000\n", memory__current="400000\n")
    assert installed_memory(proc, groups) == 500_000
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "2")
    assert installed_memory(proc, groups) == 2 * GIB


def test_groups_of_version_1_count(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemAvailable: 1000 kB\n")
    write(proc / "self", cgroup="5:cpu:/app\n4:memory:/app\n")
    write(groups / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="5\n")
    write(groups / "memory" / "app", memory__limit_in_bytes="600000\n", memory__usage_in_bytes="100000\n")
    assert available_memory(proc, groups) == 500_000


def refused(need: MemoryNeed, monkeypatch: pytest.MonkeyPatch, *, sequences: int | None = 4) -> str:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "8")
    at = {"f32": 28 * GIB, "bf16": 14 * GIB, "int8": 7 * GIB, "int4": 4 * GIB}
    with pytest.raises(InsufficientMemoryError) as error:
        check_memory("seven", need, at.__getitem__, sequence=1024, sequences=sequences)
    return str(error.value)


def test_a_precision_that_fits_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    need = MemoryNeed("bf16", 14 * GIB, kv_token=GIB // 8192, kv_tokens=4096)
    assert refused(need, monkeypatch) == (
        "The model 'seven' needs 14.5 GiB of memory: 14.0 GiB of weights at bf16 and 0.5 GiB of KV cache for 4,096 "
        "tokens. Only 8.0 GiB is available. Use weights int8 (7.5 GiB in all)."
    )


def test_the_image_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    need = MemoryNeed("bf16", 14 * GIB, kv_token=GIB // 8192, kv_tokens=4096, states=GIB, images=2 * GIB)
    assert refused(need, monkeypatch).endswith(
        "tokens, besides 1.0 GiB of recurrent states and 2.0 GiB of its image part. Only 8.0 GiB is available. "
        "Use weights int4 (7.5 GiB in all)."
    )


def test_a_shorter_context_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    need = MemoryNeed("int8", 7 * GIB, kv_token=GIB // 8192, kv_tokens=16384)
    assert refused(need, monkeypatch).endswith("Use weights int4 (6.0 GiB in all) or a context of at most 2048 tokens.")
    need = MemoryNeed("bf16", 14 * GIB, kv_token=GIB // 8192, kv_tokens=65536)
    assert refused(need, monkeypatch).endswith("Use weights int4 with a context of at most 8192 tokens.")
    need = MemoryNeed("int4", 4 * GIB, kv_token=GIB // 8192, kv_tokens=10**6)
    assert refused(need, monkeypatch, sequences=None).endswith("Use kv_tokens of at most 32768.")


def test_nothing_is_offered_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    need = MemoryNeed("bf16", 14 * GIB, kv_token=GIB // 64, kv_tokens=4096)
    assert refused(need, monkeypatch).endswith("Use a smaller model or a machine with more memory.")


def test_a_model_that_fits_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "8")
    check_memory("m", MemoryNeed("f32", 7 * GIB, 1, GIB), lambda _: 0, sequence=1, sequences=None)


@pytest.mark.parametrize("setting", ["much", "-1", "0", "nan", "inf"])
def test_a_wrong_setting_is_an_error(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", setting)
    with pytest.raises(RequestError, match="number of GiB"):
        check_memory("m", MemoryNeed("f32", 1, 1, 1), lambda _: 0, sequence=1, sequences=None)


def test_a_model_too_large_is_refused_before_a_weight_is_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_model(tiny_folder)
    at_int8 = packed_size(folder.spec, folder.shapes, parse_plan("int8"))
    block = _core.Kv.block_bytes(folder.spec.kv_shapes, "bf16")
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", str((at_int8 + 4 * 64 // _core.BLOCK * block + 4096) / GIB))
    monkeypatch.setattr("headrace.engine.executors.cpu_executor.load_tensors", lambda *_, **__: pytest.fail("read"))
    command = ["generate", str(tiny_folder), "-p", "x", "--context", "64"]
    assert main(command) == FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: The model 'tiny' needs ")
    assert "Use weights int8" in line


@pytest.mark.parametrize("tokens", [10**12, 10**30])
def test_more_kv_tokens_than_memory_holds_are_an_error(tokens: int, tiny_folder: Path) -> None:
    with pytest.raises(InsufficientMemoryError, match="Use kv_tokens of at most"):
        LLM(tiny_folder, kv_tokens=tokens, cache=False)


def test_more_kv_tokens_than_block_tables_hold_are_an_error(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MEMORY_GIB", "8e9")
    with pytest.raises(RequestError, match="'kv_tokens' must be at most 34359738352"):
        LLM(tiny_folder, kv_tokens=10**11, cache=False)


@pytest.mark.parametrize("rows", [65_537, 10**30])
def test_more_rows_than_the_core_takes_are_an_error(rows: int, tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match="'max_rows' must be 1 to 65536"):
        LLM(tiny_folder, max_rows=rows, cache=False)
