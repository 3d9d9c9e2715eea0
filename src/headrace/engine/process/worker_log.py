"""A worker's log: lines of JSON on its standard error, which the supervisor's process logs as its own.

So the server's log has one format, whatever a worker writes. Lines that are not JSON, such as those of a crash in the
core, are logged as they are.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    import asyncio  # the worker itself has no event loop

_LONGEST: Final = 64 * 1024  # bytes of a line; a longer one is cut into several
_LEVELS: Final = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}

log = logging.getLogger("headrace.engine.process.worker")


class LogLine(msgspec.Struct, omit_defaults=True):
    level: str
    logger: str
    event: str
    exception: str = ""  # a traceback


class LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        exception = "" if record.exc_info is None else self.formatException(record.exc_info)
        line = LogLine(record.levelname, record.name, record.getMessage(), exception)
        return msgspec.json.encode(line).decode()


def configure_worker_log() -> None:
    """Write this process's log, and its uncaught exceptions, as lines of JSON to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda failure: log.critical(
        "a thread of the worker failed", exc_info=failure.exc_value or failure.exc_type()
    )


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("the worker failed", exc_info=(kind, error, trace))


async def relay_log(lines: asyncio.StreamReader, worker: str) -> None:
    """Log what a worker writes to its standard error, to the end."""
    rest = b""
    while data := await lines.read(_LONGEST):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            relay_line(line, worker)
        if len(rest) > _LONGEST:
            relay_line(rest, worker)
            rest = b""
    relay_line(rest, worker)


def relay_line(line: bytes, worker: str) -> None:
    if not line.strip():
        return
    try:
        said = msgspec.json.decode(line, type=LogLine)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        log.warning("%s", line.decode(errors="replace"), extra={"worker": worker})
        return
    extra = {"worker": worker} | ({"exception": said.exception} if said.exception else {})
    logging.getLogger(said.logger).log(_LEVELS.get(said.level, logging.ERROR), "%s", said.event, extra=extra)
