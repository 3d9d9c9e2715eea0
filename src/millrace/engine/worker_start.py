"""How a worker's process begins: when its configuration is there, or ahead of it.

Owns the command, and the one process that may wait for its configuration. Most of what a worker does before it reads
that is importing modules, and so is most of what a server does before it can write it: begun ahead, it does that
meanwhile. Imports next to nothing itself.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator

_ahead: subprocess.Popen[bytes] | None = None


def start_worker() -> subprocess.Popen[bytes]:
    """A worker that waits for its configuration on standard input: the one begun ahead, where there is one, or a new
    one. OSError where there can be no process more."""
    global _ahead
    process, _ahead = _ahead, None
    if process is not None:
        if process.poll() is None:
            return process
        _close(process)
    return _start()


@contextlib.contextmanager
def worker_ahead() -> Generator[None]:
    """Within it, a worker begins at once for the first who starts one. It is ended where nobody did."""
    global _ahead
    end_worker_ahead()
    with contextlib.suppress(OSError):  # whoever needs one tries again, and tells
        _ahead = _start()
    try:
        yield
    finally:
        end_worker_ahead()


def end_worker_ahead() -> None:
    """Nobody will need the one that was begun ahead. Does nothing where it is somebody's already."""
    global _ahead
    process, _ahead = _ahead, None
    if process is not None:
        process.kill()
        process.wait()
        _close(process)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "millrace.engine.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is the supervisor's to act on: it drains
    )


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
