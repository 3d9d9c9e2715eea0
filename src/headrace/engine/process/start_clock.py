"""Records how long each part of a worker's start takes. Knows nothing of what the parts are."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_seconds(proc: Path = Path("/proc")) -> float:
    """Return the seconds since this process was started, to 10 ms; 0 if the system does not tell."""
    try:
        fields = (proc / "self" / "stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine started
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (AttributeError, IndexError, OSError, ValueError):
        return 0.0


class StartClock:
    def __init__(self, imported: float = 0.0) -> None:
        """`imported`: seconds that the process took to import its modules. A worker that was started early has waited
        for its configuration since, which does not count."""
        self.stages: dict[str, float] = {"imports": imported} if imported else {}  # seconds, in order
        self._entered = time.monotonic()

    def end(self, done: str) -> None:
        """Record the time since the last call as that of a part that is done now."""
        now = time.monotonic()
        self.stages[done] = self.stages.get(done, 0.0) + now - self._entered
        self._entered = now

    def describe(self) -> str:
        """Return the parts with their milliseconds."""
        return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.stages.items())
