"""What goes wrong with an upstream, and what a client is told of it.

Owns the typed errors and the translation of other servers' errors (OpenAI, vLLM, SGLang, llama.cpp, TGI, FastAPI,
Anthropic's shape, plain text) into ours. What a stranger is told names the model as clients know it, and never the
upstream's address, its key, a path or a stack trace. Knows no connection.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, cast

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice

FailureReason = Literal[
    "connect",  # no connection came about
    "reset",  # it broke off
    "timeout",
    "garbled",  # what came cannot be read
    "rate_limit",  # it takes no more from us now
    "overloaded",
    "failed",  # it says that it failed
    "key",  # it does not know our key
    "misconfigured",  # it has no such model or path
    "quota",  # our account there is at its end
    "busy",  # our own queue before it is full, or took too long
    "open",  # the breaker lets nothing through
    "unhealthy",
    "invalid",  # the request itself is wrong
    "filtered",  # its content filter ended the answer
]
# Where another attempt may do better.
_AGAIN: Final = frozenset[FailureReason](
    {"connect", "reset", "timeout", "garbled", "rate_limit", "overloaded", "failed"}
)
# What says nothing about the upstream's health.
_NO_FAULT: Final = frozenset[FailureReason]({"invalid", "filtered", "busy", "open", "unhealthy"})

_LONGEST: Final = 300  # characters of an upstream's own words


class UpstreamError(ApiError):
    """An upstream that did not answer as it should have."""

    def __init__(
        self,
        message: str,
        *,
        reason: FailureReason,
        again: bool | None = None,  # whether another attempt makes sense; as the reason has it by default
        wait: float | None = None,  # seconds that the upstream wants us to wait before that
        kind: str = "server_error",
        parameter: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, parameter=parameter, code=code, status=status, retry_after=retry_after)
        self.reason: FailureReason = reason
        self.again = reason in _AGAIN if again is None else again
        self.wait = wait

    @property
    def fault(self) -> bool:
        """Whether it counts against the upstream."""
        return self.reason not in _NO_FAULT


class BrokenStreamError(UpstreamError):
    """An answer that broke off after some of it had been handed on: nothing more comes, unless somebody goes on."""

    def __init__(self, cause: UpstreamError, delivered: Sequence[Choice], ended: Collection[int]) -> None:
        super().__init__(
            cause.message,
            reason=cause.reason,
            again=False,
            kind=cause.kind,
            parameter=cause.parameter,
            code=cause.code,
            status=cause.status,
            retry_after=cause.retry_after,
        )
        self.delivered = tuple(delivered)  # every choice as far as it came
        self.ended = frozenset(ended)  # which of them were whole


def unreachable(name: str) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' cannot be reached",
        reason="connect",
        kind="overloaded_error",
        code="upstream_unreachable",
        retry_after=1.0,
    )


def connection_lost(name: str) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' broke off the connection", reason="reset", status=502, code="upstream_broke_off"
    )


def too_slow(name: str, what: str, *, again: bool = True) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' took too long {what}",
        reason="timeout",
        again=again,
        status=504,
        code="upstream_timeout",
    )


def invalid_answer(name: str, what: str, *, again: bool = True) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' {what}", reason="garbled", again=again, status=502, code="upstream_garbled"
    )


def busy(name: str, what: str, retry_after: float) -> UpstreamError:
    return UpstreamError(
        f"'{name}' {what}", reason="busy", kind="overloaded_error", code="upstream_busy", retry_after=retry_after
    )


def unavailable(name: str, reason: FailureReason, retry_after: float) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' does not work at the moment",
        reason=reason,
        kind="overloaded_error",
        code="upstream_unavailable",
        retry_after=retry_after,
    )


def filtered(name: str) -> UpstreamError:
    return UpstreamError(
        f"the content filter of the server behind '{name}' ended the answer",
        reason="filtered",
        kind="invalid_request_error",
        code="content_filter",
    )


class ReportedError(msgspec.Struct):
    """What an error's body says, whatever its shape."""

    message: str = ""
    kind: str = ""
    parameter: str | None = None
    code: str = ""  # numbers as texts


def parse_error_body(body: bytes) -> ReportedError:
    """Of a reply's body, or of an event's data."""
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ReportedError(message=body[:4096].decode("utf-8", "replace"))
    return parse_error(found)


def parse_error(found: object) -> ReportedError:
    """
    OpenAI, llama.cpp      {"error": {"message", "type", "param", "code"}}
    vLLM (older)           {"object": "error", "message", "type", "param", "code"}
    Anthropic              {"type": "error", "error": {"type", "message"}}
    TGI                    {"error": "...", "error_type": "..."}
    FastAPI                {"detail": "..."} or {"detail": [{"loc", "msg", "type"}]}
    """
    if isinstance(found, str):
        return ReportedError(message=found)
    if not isinstance(found, dict):
        return ReportedError()
    table = cast("dict[str, Any]", found)
    inner = table.get("error")
    if isinstance(inner, dict):
        return _told(cast("dict[str, Any]", inner))
    if isinstance(inner, str):
        return ReportedError(message=inner, kind=_text(table.get("error_type")), code=_text(table.get("code")))
    detail = table.get("detail")
    if isinstance(detail, str):
        return ReportedError(message=detail)
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        first = cast("dict[str, Any]", detail[0])
        place: object = first.get("loc")
        names = cast("list[object]", place) if isinstance(place, list) else []
        path = ".".join(str(name) for name in names if name != "body")
        return ReportedError(message=_text(first.get("msg")), kind="invalid_request_error", parameter=path or None)
    return _told(table)


def _told(table: Mapping[str, Any]) -> ReportedError:
    parameter = table.get("param")
    return ReportedError(
        message=_text(table.get("message")),
        kind=_text(table.get("type")),
        parameter=parameter if isinstance(parameter, str) and parameter else None,
        code=_text(table.get("code")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else ""


_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|context (?:size|window|length)"
    r"|(?:prompt|input) is too long|longer than the maximum|max_new_tokens.{0,20} must be",
    re.IGNORECASE,
)
_QUOTA: Final = re.compile(r"insufficient_quota|billing|credit|quota exceeded", re.IGNORECASE)
_OVERLOADED: Final = re.compile(r"overloaded|unavailable|loading|capacity", re.IGNORECASE)
_FILTERED: Final = re.compile(r"content_filter|content_policy|ResponsibleAI", re.IGNORECASE)
_INVALID: Final = re.compile(r"invalid_request|BadRequest|validation|exceed_context_size|NotSupported", re.IGNORECASE)


def error_for_status(
    status: int,
    body: bytes | ReportedError,
    *,
    name: str,
    hidden: Sequence[str] = (),
    retry_after: float | None = None,
) -> UpstreamError:
    """The error that an upstream's answer stands for. `hidden`: texts that must not be told, such as its address."""
    told = body if isinstance(body, ReportedError) else parse_error_body(body)
    said = f"{told.kind} {told.code} {told.message}"
    match status:
        case 401 | 403 if not _FILTERED.search(said):
            return UpstreamError(
                f"the server behind '{name}' does not accept this server's key",
                reason="key",
                status=502,
                code="upstream_refused_key",
            )
        case 402:
            return _quota(name)
        case 408 | 504:
            return too_slow(name, "by its own account")
        case 429:
            if _QUOTA.search(f"{told.kind} {told.code}"):
                return _quota(name)
            return UpstreamError(
                f"the server behind '{name}' takes no more requests at the moment",
                reason="rate_limit",
                kind="rate_limit_error",
                code="upstream_rate_limit",
                retry_after=1.0 if retry_after is None else retry_after,
                wait=retry_after,
            )
        case 502 | 503 | 529:
            return _overloaded(name, retry_after)
        case 424:
            return _failed(name, retry_after)  # TGI's word for a generation that failed
        case 404 | 405 | 501 | 421:
            return _misconfigured(name)
        case _ if status < 400:
            return _misconfigured(name)  # it sends us elsewhere, and nobody is followed there
        case _ if status < 500:
            return _invalid(told, said, name, hidden)
        case _ if _TOO_LONG.search(said) and _INVALID.search(said):
            return _invalid(told, said, name, hidden)
        case _:
            return _failed(name, retry_after)


def error_for_event(told: ReportedError, *, name: str, hidden: Sequence[str] = ()) -> UpstreamError:
    """The error that came as an event within an answer, where there is no status but perhaps one in the words."""
    status = int(told.code) if told.code.isascii() and told.code.isdigit() and len(told.code) == 3 else 0
    said = f"{told.kind} {told.code}"
    if not 400 <= status <= 599:
        if _OVERLOADED.search(said):
            status = 503
        elif "rate_limit" in said:
            status = 429
        elif _INVALID.search(said) or _FILTERED.search(said):
            status = 400
        else:
            status = 500
    return error_for_status(status, told, name=name, hidden=hidden)


def _failed(name: str, retry_after: float | None = None) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' failed",
        reason="failed",
        status=502,
        code="upstream_failed",
        retry_after=retry_after,
        wait=retry_after,
    )


def _quota(name: str) -> UpstreamError:
    return UpstreamError(
        f"the account of this server with the one behind '{name}' is exhausted",
        reason="quota",
        kind="overloaded_error",
        code="upstream_quota",
    )


def _misconfigured(name: str) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' does not have what this server was told that it has",
        reason="misconfigured",
        status=502,
        code="upstream_misconfigured",
    )


def _overloaded(name: str, retry_after: float | None) -> UpstreamError:
    return UpstreamError(
        f"the server behind '{name}' is overloaded",
        reason="overloaded",
        kind="overloaded_error",
        code="upstream_overloaded",
        retry_after=1.0 if retry_after is None else retry_after,
        wait=retry_after,
    )


def _invalid(told: ReportedError, said: str, name: str, hidden: Sequence[str]) -> UpstreamError:
    words = redact(told.message, hidden)
    if _FILTERED.search(said):
        code = "content_filter"
    elif _TOO_LONG.search(said):
        code = "context_length_exceeded"
    else:
        code = "upstream_refused"
    parameter = None if told.parameter is None else redact(told.parameter, hidden)[:100] or None
    message = f"the server behind '{name}' refuses the request"
    return UpstreamError(
        f"{message}: {words}" if words else message,
        reason="filtered" if code == "content_filter" else "invalid",
        kind="invalid_request_error",
        parameter=parameter,
        code=code,
    )


_PAGE: Final = re.compile(r"<\s*(?:!doctype|html|head|body)", re.IGNORECASE)
_TRACE: Final = re.compile(
    r"Traceback \(most recent call last\)|^\s+at .+\(.+:\d+\)|File \".*\", line \d+", re.MULTILINE
)
_PLACES: Final = re.compile(
    r"[a-zA-Z][a-zA-Z0-9+.-]*://\S+"  # addresses
    r"|\[[0-9a-fA-F:]{3,}\](?::\d+)?"  # IPv6
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # IPv4
    r"|\b[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+:\d{2,5}\b"  # hosts with ports
    r"|\blocalhost(?::\d+)?\b"
    r"|(?<![\w.])(?:~|[A-Za-z]:)?[/\\](?:[\w.@+-]+[/\\])+[\w.@+-]*"  # paths
    r"|\b(?:sk|hf|pk|key|gsk|xai)[-_][A-Za-z0-9_*.-]{6,}"  # keys
    r"|\bBearer\s+\S+"
)


def redact(text: str, hidden: Sequence[str]) -> str:
    """An upstream's words as far as they are fit to show: short, on one line, with no place and no secret in them."""
    if _PAGE.search(text) or _TRACE.search(text):
        return ""
    for secret in sorted(filter(None, hidden), key=len, reverse=True):
        text = text.replace(secret, "(hidden)")
    text = _PLACES.sub("(hidden)", text)
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def parse_retry_after(headers: Mapping[str, str], most: float) -> float | None:
    """Seconds from now, as the upstream asks; `most` at most. Of a date, from the upstream's own date."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return min(milliseconds / 1000.0, most)
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is None and text is not None and "date" in headers:
        try:
            wait = parsedate_to_datetime(text) - parsedate_to_datetime(headers["date"])
            seconds = max(0.0, wait.total_seconds())
        except (ValueError, TypeError, IndexError):
            return None
    return None if seconds is None else min(seconds, most)


_NUMBER: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and _NUMBER.fullmatch(text.strip()) else None
