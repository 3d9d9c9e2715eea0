"""The worker process: reads its configuration, loads the variant, reports, and runs the worker until it is stopped.

stdin   one line of JSON, a WorkerConfig; when it closes, the supervisor is gone: drain and exit
stdout  lines of JSON: LoadProgress now and then, and finally StartReport
stderr  the log, see worker_log
SIGTERM drain and exit; twice: exit at once
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engine.process import wire
from headrace.engine.process.open_engine import open_variant
from headrace.engine.process.start_clock import StartClock, process_seconds
from headrace.engine.process.worker import Worker
from headrace.engine.process.worker_log import configure_worker_log
from headrace.errors import HeadraceError

log = logging.getLogger("headrace.engine.process.worker")

_PROGRESS_SECONDS: Final = 0.2  # between progress reports while weights are packed


def read_config() -> wire.WorkerConfig | None:
    """Read one line from standard input, byte by byte so that nothing after it is consumed. Return None if there is
    none: the process was started early and is not needed."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return msgspec.json.decode(line, type=wire.WorkerConfig) if line else None


class SupervisorGoneError(Exception):
    """The process that started the worker no longer reads its standard output."""


def main(report: Callable[[bytes], Any] | None = None) -> int:
    imported = process_seconds()
    configure_worker_log()
    try:
        config = read_config()
    except (msgspec.MsgspecError, OSError) as error:
        _tell(msgspec.json.encode(wire.StartReport(error=str(error))))
        return 2
    if config is None:
        return 0
    try:
        code, orphaned = _serve(config, report, StartClock(imported))
    except SupervisorGoneError:
        code, orphaned = 1, True
    if orphaned:
        with contextlib.suppress(OSError):  # it has another worker's socket; that worker removes the folder
            Path(config.socket).parent.rmdir()
    return code


def _serve(config: wire.WorkerConfig, report: Callable[[bytes], Any] | None, clock: StartClock) -> tuple[int, bool]:
    """Load and serve. Return the exit code, and whether the supervisor is gone."""
    tell = report or _tell
    try:
        opened = open_variant(
            config.variant, progress=throttled_progress(tell), cuts_texts=False, reads_images=True, clock=clock
        )
        worker = Worker(opened, config)
    except (HeadraceError, OSError, MemoryError) as error:
        tell(msgspec.json.encode(wire.StartReport(error=str(error) or type(error).__name__)))
        return 2, False
    worker.watch_signals()
    if config.watched:
        worker.watch_standard_input()
    if not opened.executor.load_report.mapped:
        gc.collect()  # what packing left
    # The loaded objects live for ever, so keep the garbage collector from scanning them, now and later.
    gc.freeze()
    gc.enable()  # see __main__
    # The thread that waits for the core needs the interpreter when a step is done; the default of 5 ms is too long.
    sys.setswitchinterval(0.0005)
    clock.end("prepare")
    loaded, capacity = opened.executor.load_report, opened.executor.capacity
    log.info("started: %s", clock.describe())
    started = wire.StartReport(
        load_s=loaded.seconds,
        mapped=loaded.mapped,
        weight_bytes=loaded.weight_bytes,
        context=capacity.context,
        blocks=capacity.blocks,
        restored_tokens=opened.pins.restored_tokens,
    )
    try:
        tell(msgspec.json.encode(started))
        if report is None:
            os.dup2(2, 1)  # the reader of the pipe reads no further
        worker.run()
    finally:
        worker.close()
    return 0, worker.orphaned


def _tell(line: bytes) -> None:
    """Write a whole line to standard output."""
    try:
        sys.stdout.flush()
        os.write(1, line + b"\n")
    except BrokenPipeError:
        raise SupervisorGoneError from None


def throttled_progress(tell: Callable[[bytes], Any]) -> Callable[[int, int], None]:
    """Return a callback that reports progress at most every `_PROGRESS_SECONDS`."""
    reported_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported_at
        now = time.monotonic()
        if now - reported_at >= _PROGRESS_SECONDS:
            reported_at = now
            tell(msgspec.json.encode(wire.LoadProgress(done, total)))

    return progress
