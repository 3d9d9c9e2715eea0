"""Probes the machine: cores, memory, bandwidth, peak rates.

Rates on shared machines change within seconds, so each probe runs several times and the best run counts: a floor must
be what no program can beat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

import headrace._core as _core
from headrace.engine.executors.memory import available_memory

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
        cpu=cpu_name(), threads=pool.threads, isa=_core.isa_default(), memory=available_memory(), peaks=peaks
    )


def bandwidth(pool: _core.Pool, size: int, *, seconds: float = 0.15) -> float:
    """Measure the bytes per second of reading a buffer of `size` bytes repeatedly; a small one stays in the caches."""
    mebibytes = min(max(size >> 20, pool.threads), 1024)
    return max(_core.measure_bandwidth(pool, mebibytes, seconds) for _ in range(_RUNS))


def cpu_name(root: Path = Path("/")) -> str:
    """Return the model name of the processor; "unknown" if the system does not say.

    64-bit ARM has no such name: there it is the board's name and the processor's part number, as far as they are known.
    """
    found: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    if model := found.get("model name"):
        return model
    board = _text(root / "proc/device-tree/model").strip("\0\n ")
    part = f"ARM part {found['CPU part']}" if found.get("CPU part") else ""
    return ", ".join(filter(None, (board, part))) or "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
