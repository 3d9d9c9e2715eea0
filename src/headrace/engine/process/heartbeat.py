"""Decides whether a worker process is frozen, from its unanswered pings and from whether the system schedules it.

A worker answers pings while a step runs, so silence means that its process is stopped, deadlocked, or starved by a busy
machine. Only the last is worth waiting for: a process that uses the processor, wants it, or waits for a disk gets
`longest_step` seconds; a process that does none of these gets `silence` seconds.

Time is counted in pings, so a supervisor that was held up itself blames no worker. Sends nothing and kills nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

_STOPPED: Final = "Tt"  # states in /proc: by a signal, by a debugger
_WAITS_FOR_MACHINE: Final = "RD"  # for a processor, for a disk


class ProcessActivity(msgspec.Struct, frozen=True):
    """A process's state and CPU time, as the system reports them."""

    state: str  # the letter in /proc/PID/stat
    processor_ticks: int  # used so far, by all its threads


def read_activity(pid: int) -> ProcessActivity | None:
    """Return a process's activity; None if the process is gone or the system has no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces and parentheses
    return ProcessActivity(fields[0], int(fields[11]) + int(fields[12]))


class Heartbeat:
    """The heartbeat of one process. Call `beat` for each answer, and `tick` once per ping interval."""

    def __init__(
        self,
        pid: int,
        *,
        ping: float,
        silence: float,
        longest_step: float,
        activity: Callable[[int], ProcessActivity | None] = read_activity,
    ) -> None:
        """All times are in seconds."""
        self._pid = pid
        self._ping = ping
        self._silence = silence
        self._longest_step = longest_step
        self._activity = activity
        self._unanswered = 0  # pings
        self._idle = 0  # pings since the process was last seen to be active
        self._seen: ProcessActivity | None = None
        self._busy = 0.0
        self._answered = True  # since the last tick

    @property
    def silent(self) -> float:
        """Seconds without an answer."""
        return self._unanswered * self._ping

    def beat(self, busy: float) -> None:
        """Count an answer. `busy`: seconds that the step under way has run."""
        self._unanswered = self._idle = 0
        self._seen = None
        self._busy = busy
        self._answered = True

    def tick(self) -> str | None:
        """Count one ping interval. Return why the worker must be replaced, or None."""
        if self._busy > self._longest_step:
            return f"has been in one step for {self._busy:.0f} s"
        if self._answered:
            self._answered = False
            return None
        self._unanswered += 1
        stopped = self._observe()
        if self._idle * self._ping >= self._silence:
            return f"{'is stopped' if stopped else 'is frozen'}: it has not answered for {self.silent:g} s"
        if self.silent >= max(self._longest_step, self._silence):
            return f"has not answered for {self.silent:g} s"
        return None

    def _observe(self) -> bool:
        """Update how long the process has been inactive. Return whether a signal or a debugger has stopped it."""
        found, before = self._activity(self._pid), self._seen
        self._seen = found
        stopped = found is not None and found.state in _STOPPED
        active = found is not None and (
            found.state in _WAITS_FOR_MACHINE or (before is not None and found.processor_ticks > before.processor_ticks)
        )
        self._idle = 0 if active and not stopped else self._idle + 1
        return stopped
