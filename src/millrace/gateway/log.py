"""The server's log: one event a line on standard error, as text or as JSON.

Owns the form of a line. What clients say may stand in one, so no control character gets through, no text is long, and
a traceback shows no values of variables, where keys and prompts would be.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, Final, TextIO, cast

import structlog

from millrace.config import Log

_LONGEST: Final = 1024  # characters of one value


def configure_log(config: Log, stream: TextIO | None = None) -> None:
    """`stream`: standard error by default."""
    output: TextIO = sys.stderr if stream is None else stream
    level = getattr(logging, config.level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any] = (
        [_traceback, _shortened, structlog.processors.JSONRenderer()]
        if config.format == "json"
        else [
            _traceback,
            _printable,
            _shortened,
            structlog.dev.ConsoleRenderer(
                colors=output.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("millrace").setLevel(level)


Event = MutableMapping[str, Any]


def _traceback(_logger: Any, _method: str, event: Event) -> Event:
    """In the place of exc_info, the traceback as text."""
    given: Any = event.pop("exc_info", None)
    error = cast("Any", given[1] if isinstance(given, tuple) else sys.exc_info()[1] if given is True else given)
    if isinstance(error, BaseException):
        lines = "".join(traceback.format_exception(error, limit=-32)).rstrip().split("\n")
        event["exception"] = "\n".join("  | " + line[:_LONGEST] for line in lines[:200])
    return event


def _printable(_logger: Any, _method: str, event: Event) -> Event:
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            # Each line of a traceback has a mark before it, so that no message of an error looks like a line of ours.
            parts = value.split("\n") if name == "exception" else [value]
            event[name] = "\n".join(map(_escaped, parts))
    return event


def _escaped(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shortened(_logger: Any, _method: str, event: Event) -> Event:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > _LONGEST and name != "exception":
            event[name] = value[:_LONGEST] + "…"
    return event
