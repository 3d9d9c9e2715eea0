"""Compares the memory that a model needs with what this process may use, before anything is read.

Counts what a step touches: the packed weights and the KV memory, the rows of latent attention, and the weights of the
image part with the memory that its largest image takes. Other scratch memory and the tokenizer are small beside.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.engine.executors.cgroups import cgroup_folders, read_lines, read_number
from headrace.errors import InsufficientMemoryError, RequestError

SETTING: Final = "HEADRACE_MEMORY_GIB"
OFFERED: Final = ("bf16", "int8", "int4")  # precisions to propose, the most exact first
_SHORTEST: Final = 256  # tokens; no shorter context is proposed
_CGROUP_FILES: Final = (  # of both versions: the limit, the use, and what of it can be dropped
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
_UNLIMITED: Final = 2**60  # bytes; cgroups of version 1 write "no limit" as a number near 2**63


class MemoryNeed(msgspec.Struct, frozen=True):
    """The memory of a model at a precision, in bytes."""

    precision: str
    weights: int
    kv_token: int  # KV memory of one token
    kv_tokens: int
    states: int = 0  # recurrent states
    images: int = 0  # of the image part, where images are read: weights, and to encode the largest
    drafts: int = 0  # weights and KV memory of the model's own prediction module, where it drafts
    scratch: int = 0  # of latent attention, for the rows of a step

    @property
    def kv(self) -> int:
        return self.kv_token * self.kv_tokens

    @property
    def besides(self) -> int:
        """Bytes that do not depend on the precision of the weights or the size of the KV cache."""
        return self.states + self.images + self.drafts + self.scratch

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.besides


def check_memory(
    model: str, need: MemoryNeed, weights_at: Callable[[str], int], *, sequence: int, sequences: int | None
) -> None:
    """Raise InsufficientMemoryError, with what would fit, if the model does not fit.

    `weights_at` returns the bytes of the weights at another precision. `sequence` is the context in tokens; `sequences`
    is how many such sequences the KV memory holds, or None if its size was given by `kv_tokens`.
    """
    available = usable_memory()
    if not available or need.total <= available:
        return
    offers = list(_offers(need, weights_at, available, sequence=sequence, sequences=sequences))
    advice = f"Use {' or '.join(offers)}." if offers else "Use a smaller model or a machine with more memory."
    others = (
        (need.states, "recurrent states"),
        (need.drafts, "its prediction module"),
        (need.scratch, "its latent attention"),
        (need.images, "its image part"),
    )
    besides = " and ".join(f"{gib(size)} of {name}" for size, name in others if size)
    besides = besides and f", besides {besides}"
    raise InsufficientMemoryError(
        f"The model '{model}' needs {gib(need.total)} of memory: {gib(need.weights)} of weights at {need.precision} "
        f"and {gib(need.kv)} of KV cache for {need.kv_tokens:,} tokens{besides}. Only {gib(available)} is available. "
        f"{advice}"
    )


def _offers(
    need: MemoryNeed, weights_at: Callable[[str], int], available: int, *, sequence: int, sequences: int | None
) -> Iterator[str]:
    fixed = need.besides
    smaller = [(each, at) for each in OFFERED if (at := weights_at(each)) < need.weights]
    for precision, weights in smaller:
        if weights + need.kv + fixed <= available:
            yield f"weights {precision} ({gib(weights + need.kv + fixed)} in all)"
            break

    def shorter(weights: int) -> str | None:
        room = (available - weights - fixed) // need.kv_token if need.kv_token else 0
        if sequences is None:
            return f"kv_tokens of at most {room}" if room >= sequence else None
        return f"a context of at most {room // sequences} tokens" if room >= sequences * _SHORTEST else None

    if (advice := shorter(need.weights)) is not None:
        yield advice
    elif smaller and smaller[-1][1] + need.kv + fixed > available and (advice := shorter(smaller[-1][1])) is not None:
        yield f"weights {smaller[-1][0]} with {advice}"


def gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def usable_memory() -> int:
    """Return the bytes that this process may use: HEADRACE_MEMORY_GIB, or what is available; 0 if unknown."""
    setting = os.environ.get(SETTING)
    if not setting:
        return available_memory()
    try:
        gibibytes = float(setting)
    except ValueError:
        gibibytes = -1.0
    if not 0.0 < gibibytes < 2**33:
        raise RequestError(f"Expected a number of GiB above 0, found '{setting}'.", parameter=SETTING)
    return int(gibibytes * 2**30)


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that the system, a container's limit and this process's own limit leave, in bytes; 0 if
    unknown. Pages of files that the system can drop count as available."""
    bounds: list[int] = []
    for line in read_lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            bounds.append(int(line.split()[1]) * 1024)  # kB
    for group in cgroup_folders("memory", proc, cgroups):
        for limit, used, dropped in _CGROUP_FILES:
            bound = read_number(group / limit)
            if bound is not None and bound < _UNLIMITED:
                taken = (read_number(group / used) or 0) - _sum(group / "memory.stat", dropped)
                bounds.append(max(0, bound - max(0, taken)))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = read_lines(proc / "self" / "statm")
    if soft != resource.RLIM_INFINITY and pages:
        bounds.append(max(0, soft - int(pages[0].split()[0]) * resource.getpagesize()))
    return min(bounds, default=0)


def installed_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of the machine within a container's limit, in bytes, whoever uses it now; 0 if unknown.
    HEADRACE_MEMORY_GIB replaces it."""
    if os.environ.get(SETTING):
        return usable_memory()
    bounds = [int(line.split()[1]) * 1024 for line in read_lines(proc / "meminfo") if line.startswith("MemTotal:")]
    for group in cgroup_folders("memory", proc, cgroups):
        limits = (read_number(group / limit) for limit, _, _ in _CGROUP_FILES)
        bounds += [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    return min(bounds, default=0)


def _sum(path: Path, names: Sequence[str]) -> int:
    found = dict(line.split(" ", 1) for line in read_lines(path) if " " in line)
    return sum(int(found.get(name, 0)) for name in names)
