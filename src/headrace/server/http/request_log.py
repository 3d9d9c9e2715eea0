"""The server's log: one event per line on standard error, as text or JSON.

Lines may quote clients, so control characters are escaped, texts are cut, and tracebacks show no values of variables,
which may be keys or prompts. Our own loggers write to the stream directly, past the standard library's handlers,
because there is a line for every request.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, Final, TextIO, cast

import msgspec
import structlog

from headrace.config import LogConfig

_LONGEST: Final = 1024  # characters of one value
_BARE: Final = re.compile(r"[^\s\"=]+")  # text that needs no quotes


def configure_log(config: LogConfig, stream: TextIO | None = None) -> None:
    """Configure all loggers. `stream` is standard error by default."""
    output: TextIO = sys.stderr if stream is None else stream
    level = getattr(logging, config.level.upper())
    shared: list[Any] = [structlog.stdlib.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    last: list[Any] = (
        [_traceback, _shortened, structlog.processors.JSONRenderer(serializer=_as_json)]
        if config.format == "json"
        else [_traceback, _shortened, _Text(colours=output.isatty())]
    )

    def lines(name: str = "headrace") -> _Lines:
        return _Lines(output, name)

    structlog.configure(
        processors=[_add_name, *shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lines,
        cache_logger_on_first_use=False,  # or loggers would keep the first stream for ever
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("headrace").setLevel(level)


class _Lines:
    """Writes finished lines. A line that cannot be written is lost: no request fails because of its log line."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.name = name
        self._stream = stream

    def debug(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    info = warning = error = critical = debug


Event = MutableMapping[str, Any]


def _traceback(_logger: Any, _method: str, event: Event) -> Event:
    """Replace exc_info by the traceback as text."""
    given: Any = event.pop("exc_info", None)
    error = cast("Any", given[1] if isinstance(given, tuple) else sys.exc_info()[1] if given is True else given)
    if isinstance(error, BaseException):
        lines = "".join(traceback.format_exception(error, limit=-32)).rstrip().split("\n")
        event["exception"] = "\n".join("  | " + line[:_LONGEST] for line in lines[:200])
    return event


class _Text:
    """Renders a line for people: time, level, event, logger, and the other fields by name."""

    def __init__(self, *, colours: bool) -> None:
        self._bold, self._plain = ("\x1b[1m", "\x1b[0m") if colours else ("", "")

    def __call__(self, _logger: Any, _method: str, event: Event) -> str:
        said = dict(event)
        exception: str | None = said.pop("exception", None)
        when, level, logger = said.pop("timestamp", ""), said.pop("level", ""), said.pop("logger", "")
        what = _escaped(str(said.pop("event", "")))
        values = " ".join([f"{name}={_value(said[name])}" for name in sorted(said)])
        line = f"{when} [{level:<9}] {self._bold}{what}{self._plain} [{logger}] {values}".rstrip()
        if exception is not None:
            # Each of its lines is marked, so that no error message looks like a log line.
            line = "\n".join([line, *map(_escaped, exception.split("\n"))])
        return line


def _value(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, str) and not _BARE.fullmatch(text):
        text = json.dumps(text, ensure_ascii=False)
    return _escaped(text)


def _as_json(event: Event, **_: Any) -> str:
    """Encode on one line; as ASCII if it has a character that could end or hide a line."""
    try:
        text = msgspec.json.encode(event, enc_hook=repr).decode()
    except (msgspec.MsgspecError, UnicodeEncodeError):  # a lone surrogate, say
        return json.dumps(event, default=repr)
    return text if text.isprintable() else json.dumps(msgspec.json.decode(text))


def _add_name(logger: _Lines, _method: str, event: Event) -> Event:
    event["logger"] = logger.name
    return event


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shortened(_logger: Any, _method: str, event: Event) -> Event:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > _LONGEST and name != "exception":
            event[name] = value[:_LONGEST] + "…"
    return event
