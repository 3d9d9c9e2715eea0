"""What `headrace doctor` says about the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace._core as _core
from headrace.cli.doctor.processor_checks import check_cores, check_governor, check_processor
from headrace.config import Config, ModelConfig
from headrace.engine.executors.default_sizes import usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_instruction_set_that_the_machine_lacks_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_ISA", "z80")
    _, found = check_processor(tmp_path)
    assert (found.state, "z80" in found.found) == ("fail", True)
    assert ", ".join(_core.isa_available()) in found.advice


@pytest.mark.skipif(len(_core.isa_available()) == 1, reason="this machine has only the portable instruction set")
def test_a_forced_slower_instruction_set_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_ISA", "portable")
    _, found = check_processor(tmp_path)
    assert (found.state, found.advice) == ("warn", "Unset HEADRACE_ISA.")


def test_portable_arithmetic_explains_a_slower_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_ISA", raising=False)
    monkeypatch.setenv("HEADRACE_ARITHMETIC", "portable")
    monkeypatch.setattr(_core, "isa_available", lambda: ["amx", "avx512", "portable"])
    monkeypatch.setattr(_core, "isa_default", lambda arithmetic: {"portable": "avx512"}[arithmetic])
    found = list(check_processor(tmp_path))[1]
    assert (found.state, "avx512" in found.found) == ("ok", True)
    monkeypatch.setenv("HEADRACE_ARITHMETIC", "exact")
    found = list(check_processor(tmp_path))[1]
    assert (found.state, "HEADRACE_ARITHMETIC" in found.advice) == ("fail", True)


def test_amx_that_the_system_does_not_allow_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_ISA", raising=False)
    monkeypatch.setattr(_core, "isa_available", lambda: ["avx512bf16", "portable"])
    monkeypatch.setattr(_core, "isa_default", lambda arithmetic: "avx512bf16")
    assert list(check_processor(tmp_path))[1].state == "ok"
    write(tmp_path / "proc/cpuinfo", "flags\t: avx512f amx_tile amx_int8\n")
    found = list(check_processor(tmp_path))[1]
    assert (found.state, "Linux 5.16" in found.advice) == ("warn", True)


@pytest.mark.parametrize(
    ("cpuinfo", "board", "name"),
    [
        ("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n", "", "A CPU @ 2 GHz"),
        (
            "processor\t: 0\nCPU part\t: 0xd0b\n",
            "Raspberry Pi 5 Model B Rev 1.0\0",
            "Raspberry Pi 5 Model B Rev 1.0, ARM part 0xd0b",
        ),
        ("processor\t: 0\nCPU part\t: 0xd40\n", "", "ARM part 0xd40"),
        ("", "", "unknown"),
    ],
)
def test_a_processor_has_its_name_or_that_of_its_board(tmp_path: Path, cpuinfo: str, board: str, name: str) -> None:
    write(tmp_path / "proc/cpuinfo", cpuinfo)
    write(tmp_path / "proc/device-tree/model", board)
    assert next(check_processor(tmp_path)).found == name


def test_neon_is_the_instruction_set_of_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_ISA", raising=False)
    monkeypatch.setattr(_core, "isa_available", lambda: ["neon-dotprod", "neon", "portable"])
    monkeypatch.setattr(_core, "isa_default", lambda arithmetic: "neon-dotprod")
    found = list(check_processor(tmp_path))[1]
    assert (found.state, found.found) == ("ok", "the core uses neon-dotprod (also here: neon, portable)")


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({}, "ok"),
        ({"cpu.max": "max 100000\n"}, "ok"),
        ({"cpu.max": "100000 100000\n"}, "ok"),
        ({"cpu.max": "50000 100000\n"}, "warn"),
        ({"a/cpu.max": "50000 100000\n"}, "warn"),
        ({"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, "ok"),
        ({"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, "warn"),
    ],
)
def test_a_quota_below_one_core_is_a_warning(tmp_path: Path, files: dict[str, str], state: str) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/a\n0::/a\n")
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    (found,) = check_cores(None, tmp_path)
    assert found.state == state
    quota = next((text for name, text in files.items() if "period" not in name), "max")
    assert found.found.startswith("1 usable, CPU quota") == quota[0].isdigit()


def test_more_threads_than_cores_are_a_warning(tmp_path: Path) -> None:
    config = Config(models={"mini": ModelConfig(options={"threads": usable_cores() + 1})})
    cores, threads = check_cores(config, tmp_path)
    assert (cores.state, threads.state) == ("ok", "warn")


@pytest.mark.parametrize(("governors", "state"), [([], "ok"), (["performance"], "ok"), (["performance", "x"], "warn")])
def test_another_governor_than_performance_is_a_warning(tmp_path: Path, governors: list[str], state: str) -> None:
    for place, governor in enumerate(governors):
        write(tmp_path / f"sys/devices/system/cpu/cpu{place}/cpufreq/scaling_governor", f"{governor}\n")
    (found,) = check_governor(tmp_path)
    assert found.state == state
