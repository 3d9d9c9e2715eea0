"""The machine code of the kernels for AMX and bf16 runs on a processor that lacks them: a library computes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace._core as _core

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("missing_instructions.cpp")
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")

pytestmark = [
    pytest.mark.skipif("avx512" not in _core.isa_available(), reason="needs the registers of AVX-512"),
    pytest.mark.skipif("amx" in _core.isa_available(), reason="this processor has the instructions"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(sys.flags.no_site == 1, reason="the sanitizers' libraries must be loaded first"),
]

SAME_BITS = """
from tests.core.tiny import SPECS, Tiny, same_bits, text
PRECISIONS = [("bf16", 0, "bf16"), ("int8", 0, "int8"), ("int4", 32, "fp8"), ("f32", 0, "int4")]

def logits(isa, model, format, group, kv):
    return Tiny(model, format, group, kv=kv, isa=isa).rows(text(40, model), range(3))

for number, (name, model) in enumerate(SPECS.items()):
    how = PRECISIONS[number % len(PRECISIONS)]
    assert same_bits(logits("amx", model, *how), logits("amx-emulated", model, *how)), (name, how)
    how = ("int8", 32, "f32")
    assert same_bits(logits("amx", model, *how), logits("portable", model, *how)), (name, how)
print("the same bits")
"""

# Sums that start at 1, of tiles of 2 rows and 8 bytes: 2 * 3 for each byte, then a tile that has no shape.
FAULT = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
int main() {
  alignas(64) uint8_t config[64] = {1}, left[16], right[32];
  int32_t sums[2][4] = {{1, 1, 1, 1}, {1, 1, 1, 1}};
  const uint16_t bytes[3] = {16, 8, 16};
  std::memcpy(config + 16, bytes, sizeof bytes);
  std::memset(config + 48, 2, 3);
  std::memset(left, -2, sizeof left);
  std::memset(right, 3, sizeof right);
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  asm volatile("tileloadd (%0,%1,1), %%tmm0" : : "r"(sums), "r"(int64_t{16}) : "memory");
  asm volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(left), "r"(int64_t{8}) : "memory");
  asm volatile("tileloadd (%0,%1,1), %%tmm2" : : "r"(right), "r"(int64_t{16}) : "memory");
  asm volatile("tdpbsud %tmm2, %tmm1, %tmm0");
  asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(sums), "r"(int64_t{16}) : "memory");
  std::printf("%d %d\n", sums[0][0], sums[1][3]);
  std::fflush(stdout);
  asm volatile("tilezero %tmm5");
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("missing") / "missing_instructions.so"
    build(SOURCE, path, "-O3", "-mavx512f", "-shared", "-fPIC")
    return path


def build(source: Path, target: Path, *flags: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++20", *flags, str(source), "-o", str(target)], check=True)


def run(library: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    environment.pop("HEADRACE_ISA", None)
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_core_offers_what_the_library_computes(library: Path) -> None:
    program = "from headrace import _core; print(*_core.isa_available(), *_core.isa_emulated())"
    first, *others = run(library, sys.executable, "-c", program).stdout.split()
    assert first == "amx"
    assert set(others) == {"avx512", "avx512bf16", "avx2", "portable", "amx-emulated"}


def test_tiles_give_the_bits_of_those_in_plain_c(library: Path) -> None:
    done = run(library, sys.executable, "-c", SAME_BITS)
    assert done.stdout == "the same bits\n", done.stderr


def test_tiles_multiply_as_the_manual_says_and_one_without_a_shape_faults(library: Path, tmp_path: Path) -> None:
    source = tmp_path / "fault.cpp"
    source.write_text(FAULT)
    build(source, tmp_path / "fault", "-O1")
    done = run(library, str(tmp_path / "fault"))
    assert done.stdout == f"{1 - 2 * 3 * 8} {1 - 2 * 3 * 8}\n"
    assert "a processor would fault here: a tile without a shape" in done.stderr
    assert done.returncode != 0
