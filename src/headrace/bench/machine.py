"""Probes the machine: cores, memory, bandwidth, peak rates.

Rates on shared machines change within seconds, so each probe runs several times and the best run counts: a floor must
be what no program can beat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

import headrace._core as _core

PEAKS: Final = ("fma_f32", "dot_int8", "dot_bf16", "amx_int8", "amx_bf16")
_RUNS: Final = 4


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    threads: int
    isa: str
    memory: int  # bytes available to this process
    # Operations per second, where a multiply and an add are two; 0 without such an instruction.
    peaks: dict[str, float]


def probe_machine(pool: _core.Pool, *, seconds: float = 0.1) -> Machine:
    peaks = {kind: max(_core.measure_peak(pool, kind, seconds) for _ in range(_RUNS)) for kind in PEAKS}
    return Machine(
        cpu=_cpu_name(), threads=pool.threads, isa=_core.isa_default(), memory=available_memory(), peaks=peaks
    )


def bandwidth(pool: _core.Pool, size: int, *, seconds: float = 0.15) -> float:
    """Measure the bytes per second of reading a buffer of `size` bytes repeatedly; a small one stays in the caches."""
    mebibytes = min(max(size >> 20, pool.threads), 1024)
    return max(_core.measure_bandwidth(pool, mebibytes, seconds) for _ in range(_RUNS))


def available_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that the system and a container's limit leave, in bytes; 0 if unknown."""
    bounds: list[int] = []
    for line in _lines(proc):
        if line.startswith("MemAvailable:"):
            bounds.append(int(line.split()[1]) * 1024)  # kB
    limit = _number(cgroup / "memory.max")
    if limit is not None:
        bounds.append(max(0, limit - (_number(cgroup / "memory.current") or 0)))
    return min(bounds, default=0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # "max" is no limit


def _cpu_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
