"""Errors of upstreams: their types, and the translation of what other servers report.

Understands the error shapes of OpenAI, vLLM, SGLang, llama.cpp, TGI, FastAPI and Anthropic, and plain text. A client
sees the model's name as it knows it, and never the upstream's address, key, paths or stack traces.
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
    "connect",  # no connection
    "reset",  # the connection was lost
    "timeout",
    "garbled",  # the response cannot be read
    "rate_limit",
    "overloaded",
    "failed",  # the upstream reports a failure
    "key",  # the upstream rejects our key
    "misconfigured",  # the upstream has no such model or path
    "quota",  # our account there is exhausted
    "busy",  # our own queue for it is full, or took too long
    "open",  # the circuit breaker is open
    "unhealthy",
    "invalid",  # the request itself is wrong
    "filtered",  # the upstream's content filter ended the answer
]
# Failures that a retry may cure.
_RETRYABLE: Final = frozenset[FailureReason](
    {"connect", "reset", "timeout", "garbled", "rate_limit", "overloaded", "failed"}
)
# Failures that say nothing about the upstream's health.
_NOT_ITS_FAULT: Final = frozenset[FailureReason]({"invalid", "filtered", "busy", "open", "unhealthy"})

_LONGEST: Final = 300  # characters of an upstream's message


class UpstreamError(ApiError):
    """A request to an upstream that failed."""

    def __init__(
        self,
        message: str,
        *,
        reason: FailureReason,
        again: bool | None = None,  # whether to retry; default: by reason
        wait: float | None = None,  # seconds to wait before a retry, as the upstream asks
        kind: str = "server_error",
        parameter: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, parameter=parameter, code=code, status=status, retry_after=retry_after)
        self.reason: FailureReason = reason
        self.again = reason in _RETRYABLE if again is None else again
        self.wait = wait

    @property
    def fault(self) -> bool:
        """True if the error counts against the upstream's health."""
        return self.reason not in _NOT_ITS_FAULT


class BrokenStreamError(UpstreamError):
    """A stream that broke off after part of it was delivered."""

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
        self.delivered = tuple(delivered)  # every choice, as far as it was received
        self.ended = frozenset(ended)  # indices of the complete ones


def unreachable(name: str) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' cannot be reached.",
        reason="connect",
        kind="overloaded_error",
        code="upstream_unreachable",
        retry_after=1.0,
    )


def connection_lost(name: str) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' closed the connection.", reason="reset", status=502, code="upstream_broke_off"
    )


def too_slow(name: str, what: str, *, again: bool = True) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' took too long {what}.",
        reason="timeout",
        again=again,
        status=504,
        code="upstream_timeout",
    )


def invalid_answer(name: str, what: str, *, again: bool = True) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' {what}.", reason="garbled", again=again, status=502, code="upstream_garbled"
    )


def busy(name: str, what: str, retry_after: float) -> UpstreamError:
    return UpstreamError(
        f"'{name}' {what}. Try again later.",
        reason="busy",
        kind="overloaded_error",
        code="upstream_busy",
        retry_after=retry_after,
    )


def unavailable(name: str, reason: FailureReason, retry_after: float) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' is unavailable. Try again later.",
        reason=reason,
        kind="overloaded_error",
        code="upstream_unavailable",
        retry_after=retry_after,
    )


def filtered(name: str) -> UpstreamError:
    return UpstreamError(
        f"The content filter of the upstream of '{name}' ended the answer.",
        reason="filtered",
        kind="invalid_request_error",
        code="content_filter",
    )


class ReportedError(msgspec.Struct):
    """An error as an upstream reports it, independent of its shape."""

    message: str = ""
    kind: str = ""
    parameter: str | None = None
    code: str = ""  # a number becomes a string


def parse_error_body(body: bytes) -> ReportedError:
    """Read the error from a response's body or an event's data."""
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ReportedError(message=body[:4096].decode("utf-8", "replace"))
    return parse_error(found)


def parse_error(found: object) -> ReportedError:
    """Read the error from decoded JSON.

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
        return _read_table(cast("dict[str, Any]", inner))
    if isinstance(inner, str):
        return ReportedError(
            message=inner, kind=_as_string(table.get("error_type")), code=_as_string(table.get("code"))
        )
    detail = table.get("detail")
    if isinstance(detail, str):
        return ReportedError(message=detail)
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        first = cast("dict[str, Any]", detail[0])
        place: object = first.get("loc")
        names = cast("list[object]", place) if isinstance(place, list) else []
        path = ".".join(str(name) for name in names if name != "body")
        return ReportedError(message=_as_string(first.get("msg")), kind="invalid_request_error", parameter=path or None)
    return _read_table(table)


def _read_table(table: Mapping[str, Any]) -> ReportedError:
    parameter = table.get("param")
    return ReportedError(
        message=_as_string(table.get("message")),
        kind=_as_string(table.get("type")),
        parameter=parameter if isinstance(parameter, str) and parameter else None,
        code=_as_string(table.get("code")),
    )


def _as_string(value: object) -> str:
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
    """Translate an upstream's error response. `hidden`: strings that must not be shown, such as its address."""
    reported = body if isinstance(body, ReportedError) else parse_error_body(body)
    text = f"{reported.kind} {reported.code} {reported.message}"
    match status:
        case 401 | 403 if not _FILTERED.search(text):
            return UpstreamError(
                f"The upstream of '{name}' rejects this server's key.",
                reason="key",
                status=502,
                code="upstream_refused_key",
            )
        case 402:
            return _quota(name)
        case 408 | 504:
            return too_slow(name, "and reported a timeout")
        case 429:
            if _QUOTA.search(f"{reported.kind} {reported.code}"):
                return _quota(name)
            return UpstreamError(
                f"The upstream of '{name}' limits the rate of requests. Try again later.",
                reason="rate_limit",
                kind="rate_limit_error",
                code="upstream_rate_limit",
                retry_after=1.0 if retry_after is None else retry_after,
                wait=retry_after,
            )
        case 502 | 503 | 529:
            return _overloaded(name, retry_after)
        case 424:
            return _failed(name, retry_after)  # TGI: the generation failed
        case 404 | 405 | 501 | 421:
            return _misconfigured(name)
        case _ if status < 400:
            return _misconfigured(name)  # redirects are not followed
        case _ if status < 500:
            return _invalid(reported, text, name, hidden)
        case _ if _TOO_LONG.search(text) and _INVALID.search(text):
            return _invalid(reported, text, name, hidden)
        case _:
            return _failed(name, retry_after)


def error_for_event(reported: ReportedError, *, name: str, hidden: Sequence[str] = ()) -> UpstreamError:
    """Translate an error event of a stream. It has no status, so the status is derived from its code and type."""
    status = (
        int(reported.code) if reported.code.isascii() and reported.code.isdigit() and len(reported.code) == 3 else 0
    )
    text = f"{reported.kind} {reported.code}"
    if not 400 <= status <= 599:
        if _OVERLOADED.search(text):
            status = 503
        elif "rate_limit" in text:
            status = 429
        elif _INVALID.search(text) or _FILTERED.search(text):
            status = 400
        else:
            status = 500
    return error_for_status(status, reported, name=name, hidden=hidden)


def _failed(name: str, retry_after: float | None = None) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' failed.",
        reason="failed",
        status=502,
        code="upstream_failed",
        retry_after=retry_after,
        wait=retry_after,
    )


def _quota(name: str) -> UpstreamError:
    return UpstreamError(
        f"This server's account with the upstream of '{name}' is exhausted.",
        reason="quota",
        kind="overloaded_error",
        code="upstream_quota",
    )


def _misconfigured(name: str) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' does not have the configured model or path.",
        reason="misconfigured",
        status=502,
        code="upstream_misconfigured",
    )


def _overloaded(name: str, retry_after: float | None) -> UpstreamError:
    return UpstreamError(
        f"The upstream of '{name}' is overloaded. Try again later.",
        reason="overloaded",
        kind="overloaded_error",
        code="upstream_overloaded",
        retry_after=1.0 if retry_after is None else retry_after,
        wait=retry_after,
    )


def _invalid(reported: ReportedError, text: str, name: str, hidden: Sequence[str]) -> UpstreamError:
    words = redact(reported.message, hidden)
    if _FILTERED.search(text):
        code = "content_filter"
    elif _TOO_LONG.search(text):
        code = "context_length_exceeded"
    else:
        code = "upstream_refused"
    parameter = None if reported.parameter is None else redact(reported.parameter, hidden)[:100] or None
    message = f"The upstream of '{name}' rejects the request"
    return UpstreamError(
        f"{message}: {words}" if words else f"{message}.",
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
    """Make an upstream's message safe to show: short, on one line, without addresses, paths, keys and stack traces."""
    if _PAGE.search(text) or _TRACE.search(text):
        return ""
    for secret in sorted(filter(None, hidden), key=len, reverse=True):
        text = text.replace(secret, "(hidden)")
    text = _PLACES.sub("(hidden)", text)
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def parse_retry_after(headers: Mapping[str, str], most: float) -> float | None:
    """Return the seconds to wait, at most `most`. A date is compared with the upstream's own clock."""
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
