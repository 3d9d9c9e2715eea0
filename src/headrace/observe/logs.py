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
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, TextIO, cast

import msgspec
import structlog

from headrace.observe.log_file import RotatingFile

_EXTRAS: Final = ("worker", "exception")  # that the standard library's records may carry
_LONGEST: Final = 1024  # characters of one value
_PLAIN: Final = frozenset({int, float, bool, type(None)})  # types whose text is printable
_BARE: Final = re.compile(r"[^\s\"=]+")  # text that needs no quotes
_ORDINARY: Final = re.compile(r"[!#-<>-~]+")  # and is printable ASCII


class LogOptions(Protocol):
    """The section [log] of the configuration."""

    @property
    def format(self) -> str: ...

    @property
    def level(self) -> str: ...

    @property
    def file(self) -> str | None: ...

    @property
    def file_bytes(self) -> int: ...

    @property
    def keep(self) -> int: ...


def configure_log(config: LogOptions, stream: TextIO | None = None) -> None:
    """Configure all loggers, and log uncaught exceptions and Python's warnings, so that every line has one format.
    `stream` is the configured file by default, and standard error without one."""
    output: TextIO = _configured_stream(config) if stream is None else stream
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
    _requests.write = (
        _request_writer(output, as_json=config.format == "json", colours=output.isatty())
        if level <= logging.INFO
        else _write_nothing
    )
    handler = logging.StreamHandler(output)
    extras = structlog.stdlib.ExtraAdder(_EXTRAS)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, extras, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("headrace").setLevel(level)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


Fields = dict[str, Any]


class _RequestLog:
    """Where the lines of requests go. Set by `configure_log`."""

    write: Callable[[str, Fields], None]


def _write_nothing(_logger: str, _fields: Fields) -> None:
    """The level leaves these lines out."""


_requests: Final = _RequestLog()
_requests.write = _write_nothing


def log_request(logger: str, fields: Fields) -> None:
    """Write the line of a request, without structlog's processors: there is one for every request. It takes the
    fields over."""
    _requests.write(logger, fields)


def _request_writer(output: TextIO, *, as_json: bool, colours: bool) -> Callable[[str, Fields], None]:
    lines, render = _Lines(output, ""), _Text(colours=colours)
    second, prefix = -1, ""  # of the time, which is formatted once a second

    def write(logger: str, fields: Fields) -> None:
        nonlocal second, prefix
        now = time.time()
        whole = int(now)
        if whole != second:
            second, prefix = whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
        when = f"{prefix}.{int((now - whole) * 1e6):06d}Z"
        _shortened(None, "", fields)  # in place
        if as_json:
            fields |= {"event": "request", "logger": logger, "level": "info", "timestamp": when}
            lines.info(_as_json(fields))
        else:
            lines.info(render.line(when, "info", "request", logger, fields))

    return write


def _configured_stream(config: LogOptions) -> TextIO:
    if config.file is None:
        return sys.stderr
    path = Path(config.file).expanduser()
    return cast("TextIO", RotatingFile(path, most_bytes=config.file_bytes, keep=config.keep))


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger("headrace").critical("the program failed", exc_info=(kind, error, trace))


def _uncaught_in_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        logging.getLogger("headrace").critical("a thread failed", exc_info=failure.exc_value)


def _unraisable(failure: sys.UnraisableHookArgs) -> None:
    if failure.exc_value is not None and not isinstance(failure.exc_value, KeyboardInterrupt):
        logging.getLogger("headrace").error("an exception was ignored", exc_info=failure.exc_value)


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
        line = self.line(when, level, str(said.pop("event", "")), logger, said)
        if exception is not None:
            # Each of its lines is marked, so that no error message looks like a log line.
            line = "\n".join([line, *map(_escaped, exception.split("\n"))])
        return line

    def line(self, when: str, level: str, what: str, logger: str, fields: Mapping[str, Any]) -> str:
        values = " ".join(
            [
                f"{name}={value!r}" if type(value) in _PLAIN else f"{name}={_value(value)}"
                for name, value in sorted(fields.items())
            ]
        )
        return f"{when} [{level:<9}] {self._bold}{_escaped(what)}{self._plain} [{logger}] {values}".rstrip()


def _value(value: object) -> str:
    if type(value) is str and _ORDINARY.fullmatch(value):
        return value
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, str) and not _BARE.fullmatch(text):
        text = json.dumps(text, ensure_ascii=False)
    return text if text.isprintable() else _escaped(text)


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
        if type(value) not in _PLAIN and isinstance(value, str) and len(value) > _LONGEST and name != "exception":
            event[name] = value[:_LONGEST] + "…"
    return event
