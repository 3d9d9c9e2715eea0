"""An engine under measurement: one long-lived process that answers JSON lines.

The process writes `{"ready": true, "facts": {...}}` once it can serve. Each request is `{"prompts": [[ids]], "new": n}`
and its answer `{"times": [[seconds]]}`: for each sequence, when each of its tokens was there, by the engine's own clock
from the moment it had the request; or `{"error": "why"}`. A request may have `"late": [{"at": seconds, "prompt": [ids],
"new": n}]`, prompts that arrive while the others are answered; its answer then has `"late": [[seconds]]` too, each from
its own arrival. With `"late"`, and be it empty, each prompt is a stream that somebody watches; without it, all of them
are one job, whose measure is when its last token is there. `"host"` in an answer says where the engine's time went.

Owns the process: the bound of every wait, its log, its peak memory, and that it ends with this program, whatever ends
that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import commands
import places
from workloads import Answer, Late, request_of

START_SECONDS: Final = 600.0  # vLLM compiles for more than a minute
REQUEST_SECONDS: Final = 900.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


class EngineError(Exception):
    """The engine reported an error, died or timed out; the message says which."""


class Child:
    def __init__(self, command: Sequence[str | Path], *, env: Mapping[str, str], log: str) -> None:
        places.LOGS.mkdir(parents=True, exist_ok=True)
        self._log_path = places.LOGS / f"{log}.log"
        self._pending = b""
        self.facts: dict[str, Any] = {}
        with self._log_path.open("wb") as errors:
            self.started = time.perf_counter()
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **env},
                bufsize=0,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        with contextlib.suppress(OSError):
            if stdin is not None:
                stdin.close()  # the polite end: the engine's loop is over
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10.0 if kind is None else 0.1)
        commands.end_group(self._process)
        if stdout is not None:
            stdout.close()

    def wait_ready(self) -> float:
        """Return the seconds from the process's start until it was ready."""
        answer = self._answer(START_SECONDS)
        seconds = time.perf_counter() - self.started
        self.facts = answer.get("facts", {})
        return seconds

    def generate(self, prompts: Sequence[Sequence[int]], new: int, late: Sequence[Late] | None = None) -> Answer:
        stdin = self._process.stdin
        assert stdin is not None
        request = json.dumps(request_of(prompts, new, late), separators=(",", ":")) + "\n"
        try:
            view = memoryview(request.encode())
            while view:
                view = view[stdin.write(view) or 0 :]
        except OSError:
            raise EngineError(self._death()) from None
        found = self._answer(REQUEST_SECONDS)
        answer = Answer(found["times"], found.get("late", []), found.get("host"))
        counts = sorted({len(each) for each in answer.times})
        if len(answer.times) != len(prompts) or counts != [new]:
            raise EngineError(
                f"asked for {len(prompts)} sequences of {new} tokens, got {len(answer.times)} of {counts}"
            )
        if [len(each) for each in answer.late] != [each.new for each in late or ()]:
            raise EngineError(f"asked for {len(late or ())} late prompts, and not all were answered")
        return answer

    def peak_memory(self) -> int:
        """Return the peak resident bytes of the process and its children."""
        total = 0
        for pid in _family(self._process.pid):
            with contextlib.suppress(OSError):
                found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                total += int(found.group(1)) * 1024 if found else 0
        return total

    def _answer(self, seconds: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"no answer after {seconds:.0f} s")
            if not select.select([stdout], [], [], left)[0]:
                continue
            data = stdout.read(1 << 16)
            if not data:
                raise EngineError(self._death())
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(commands.without_places(str(answer["error"])))
        return answer

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        return f"the process ended with status {self._process.returncode}: {commands.tail(self._log_path)}"


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += _family(int(child))
    return found
