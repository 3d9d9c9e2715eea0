"""Settings of a process that serves: its event loop, garbage collection, threads and open files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import sys
from typing import Final

import structlog

log: Final = structlog.stdlib.get_logger("headrace")

_GARBAGE: Final = (5_000, 20, 20)  # thresholds of the collector's generations; a request leaves next to no cycles
_OWN_FILES: Final = 512  # open files beside connections: models, the database, uploads, workers' sockets
_SWITCH_S: Final = 0.0005  # seconds after which a thread lets the next one run


def prepare_threads() -> None:
    """Call before models are loaded."""
    # Large requests are read in threads: the event loop must not wait long for them.
    sys.setswitchinterval(_SWITCH_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core for each text; the engine needs the others


def keep_what_is_loaded() -> None:
    """What is loaded now stays, so the collector need not scan it, which takes tens of milliseconds each time. What of
    it is garbage stays too; of a start that is little."""
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    gc.enable()  # see headrace.slim_imports


def event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def open_files_needed(connections: int) -> int:
    return connections + _OWN_FILES


def allow_connections(wanted: int) -> None:
    """Raise the limit of open files to what the connections need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(wanted)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft < needed:
        log.warning("the limit of open files is too low for server.connections", allowed=soft, needed=needed)
