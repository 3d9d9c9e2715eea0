"""The threads and the context of an engine whose variant sets none. Does not import the engine."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from headrace.engine.executors.cgroups import cpu_quota
from headrace.models.spec import ModelSpec

DEFAULT_CONTEXT: Final = 8192  # tokens of one sequence, if the model allows that many


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may keep busy: those it may run on, within the CPU quota of its container.

    A part of a core does not count: the threads of a step wait for each other, so one that is throttled stops them all.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cpu_quota(proc, cgroups)
    return allowed if quota is None else min(allowed, max(1, math.floor(quota)))


def default_context(spec: ModelSpec) -> int:
    """Return the default context: tokens of one sequence."""
    return min(spec.context, DEFAULT_CONTEXT)
