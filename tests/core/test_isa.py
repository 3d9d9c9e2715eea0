"""Which instruction set is used, and what the machine is measured to do at most."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import headrace._core as _core
from headrace.engine.executors.cpu_executor import describe
from headrace.models.precision import KvType, WeightFormat
from tests.core.tiny import ISAS, SPECS, Tiny, packed_model, same_bits, text

PROGRAM = "from headrace import _core; print(_core.isa_default())"


def with_isa(value: str | None, arithmetic: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "HEADRACE_ISA"}
    environment["HEADRACE_ARITHMETIC"] = arithmetic
    if value is not None:
        environment["HEADRACE_ISA"] = value
    flags = ["-S"] if sys.flags.no_site else []  # as this process was started: the sanitized build is found so
    return subprocess.run(
        [sys.executable, *flags, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_there_is_always_a_portable_instruction_set_and_it_is_the_last() -> None:
    assert _core.isa_available()[-1] == "portable"
    assert len(set(ISAS)) == len(ISAS)


def test_what_is_emulated_is_never_chosen() -> None:
    assert not set(_core.isa_available()) & set(_core.isa_emulated())
    assert with_isa(None).stdout.strip() not in _core.isa_emulated()


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_forces_an_instruction_set(isa: str) -> None:
    assert with_isa(isa).stdout.strip() == isa


@pytest.mark.parametrize("value", [None, ""])
def test_without_one_the_best_is_used(value: str | None) -> None:
    assert with_isa(value).stdout.strip() == ISAS[0]


@pytest.mark.parametrize("value", ["sse2", "AVX2", "avx2 ", "portable,avx2"])
def test_one_that_is_not_there_is_an_error_that_says_what_is(value: str) -> None:
    done = with_isa(value)
    assert done.returncode != 0
    assert f"ValueError: instruction set '{value}'" in done.stderr
    assert ", ".join(_core.isa_available()) in done.stderr


def test_portable_arithmetic_uses_the_best_that_shares_its_bits() -> None:
    sharing = ("avx512", "avx2", "neon-dotprod", "neon", "portable")
    fitting = [isa for isa in _core.isa_available() if isa in sharing]
    assert with_isa(None, "portable").stdout.strip() == fitting[0]
    assert _core.isa_default("portable") == fitting[0]
    assert with_isa("portable", "portable").stdout.strip() == "portable"
    assert with_isa(None, "native").stdout.strip() == ISAS[0]


@pytest.mark.parametrize("isa", [isa for isa in ISAS if _core.isa_arithmetic(isa) != "portable"])
def test_an_instruction_set_of_another_arithmetic_is_an_error(isa: str) -> None:
    done = with_isa(isa, "portable")
    assert f"instruction set '{isa}' does not compute the portable arithmetic" in done.stderr


def test_an_unknown_arithmetic_is_an_error_that_says_what_is_known() -> None:
    assert "unknown arithmetic 'exact': expected native or portable" in with_isa(None, "exact").stderr


@pytest.mark.parametrize("name", SPECS)
def test_instruction_sets_of_one_arithmetic_give_the_same_bits(name: str) -> None:
    model = SPECS[name]
    tokens = text(70, model)
    precisions: list[tuple[WeightFormat, int, KvType]] = [
        ("f32", 0, "f32"),
        ("bf16", 0, "bf16"),
        ("int8", 0, "int8"),
        ("int4", 32, "bf16"),
        ("f32", 0, "fp8"),
        ("f32", 0, "int4"),
    ]
    for format, group, kv in precisions:
        found = {isa: Tiny(model, format, group, kv=kv, isa=isa).rows(tokens, range(5)) for isa in ISAS}
        for isa, logits in found.items():
            assert same_bits(logits, found["portable"]) or _core.isa_arithmetic(isa) != "portable", isa


@pytest.mark.parametrize("isa", ISAS)
def test_a_model_says_which_one_it_uses_and_what_memory_it_took(isa: str) -> None:
    model = SPECS["plain"]
    small, large = (
        _core.Model(describe(model), dict(packed_model(model)), _core.Pool(1), rows, isa) for rows in (16, 256)
    )
    assert small.isa == isa
    assert 0 < small.scratch_bytes < large.scratch_bytes


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_is_measured(threads: int) -> None:
    rate = _core.measure_bandwidth(_core.Pool(threads), 16, 0.02)
    assert 1e7 < rate < 1e14  # bytes a second: a floor and a ceiling of any machine


@pytest.mark.parametrize("kind", ["fma_f32", "dot_int8", "dot_bf16", "amx_int8", "amx_bf16"])
def test_peaks_are_measured_or_zero_where_there_are_no_such_instructions(kind: str) -> None:
    rate = _core.measure_peak(_core.Pool(2), kind, 0.02)
    assert rate == 0 or 1e7 < rate < 1e15
    if kind == "fma_f32" or (kind == "dot_int8" and ISAS[0] != "portable"):
        assert rate > 0


@pytest.mark.parametrize("mebibytes", [0, -1, -(2**43), 2**43, 2**60])
def test_a_buffer_of_no_sensible_size_is_refused(mebibytes: int) -> None:
    with pytest.raises(ValueError, match="MiB"):
        _core.measure_bandwidth(_core.Pool(1), mebibytes, 0.01)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_time_without_end_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        _core.measure_peak(_core.Pool(1), "fma_f32", seconds)
    with pytest.raises(ValueError, match="seconds"):
        _core.measure_bandwidth(_core.Pool(1), 1, seconds)


def test_an_unknown_peak_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown peak 'fma_f64'"):
        _core.measure_peak(_core.Pool(1), "fma_f64", 0.01)
