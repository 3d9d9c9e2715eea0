"""Starts a worker process before anyone knows what it will run, so that its imports overlap those of the server.

The process imports the engine and waits for its configuration. The next worker that the server needs takes it: the
first one at a start, and later one that takes the place of another. Imports next to nothing: the command line starts it
before its own imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from headrace.slim_imports import ONE_BLAS_THREAD

# Where the environment does not set it. As the server sets it for itself (server/process_settings.py).
_ENVIRONMENT: Final = {"TOKENIZERS_PARALLELISM": "false", **ONE_BLAS_THREAD}

_early: subprocess.Popen[bytes] | None = None


def launch() -> subprocess.Popen[bytes]:
    """Start a worker process, which waits for its configuration. Raise OSError if no process can be started."""
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.engine.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches only the supervisor, which drains
        env={**_ENVIRONMENT, **os.environ},
    )


def launch_early() -> None:
    """Start a process for `take`. Does nothing if it cannot be started: the worker starts later then."""
    global _early
    try:
        _early = launch()
    except OSError:
        _early = None


def is_waiting() -> bool:
    """Return whether there is a process for `take`."""
    return _early is not None and _early.poll() is None


def take() -> subprocess.Popen[bytes] | None:
    """Return the process that waits, once. None if there is none, or it has ended."""
    global _early
    process, _early = _early, None
    return process if process is None or process.poll() is None else None


def discard() -> None:
    """End the process that waits, if nothing took it."""
    process = take()
    if process is None:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
