"""A GPU as its driver reports it. Reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """None: the driver does not say."""

    number: int  # as the vendor's own tool counts
    name: str
    vendor: Literal["nvidia", "amd"] = "nvidia"
    memory_used: int | None = None  # bytes, of all processes
    memory_total: int | None = None
    busy: float | None = None  # share of the last sample's time in which a kernel ran
    celsius: float | None = None
    watts: float | None = None

    @property
    def memory_free(self) -> int | None:
        if self.memory_used is None or self.memory_total is None:
            return None
        return max(0, self.memory_total - self.memory_used)

    def as_json(self) -> dict[str, Any]:
        return {
            "gpu": self.number,
            "name": self.name,
            "busy_share": self.busy,
            "memory_used_bytes": self.memory_used,
            "memory_free_bytes": self.memory_free,
            "memory_total_bytes": self.memory_total,
            "celsius": self.celsius,
            "watts": self.watts,
        }


def numbered_gpus(gpus: Sequence[Gpu]) -> dict[int, Gpu]:
    """Return the GPUs that engines name by number: NVIDIA's, or AMD's on a machine without any of NVIDIA's."""
    vendor = "nvidia" if any(gpu.vendor == "nvidia" for gpu in gpus) else "amd"
    return {gpu.number: gpu for gpu in gpus if gpu.vendor == vendor}


GpuReader = Callable[[], Sequence[Gpu]]  # may take long where a driver hangs
