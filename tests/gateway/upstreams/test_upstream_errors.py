"""What a client is told of another server's errors, in whatever shape they come, and what it is never told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.upstreams.upstream_errors import (
    ReportedError,
    error_for_event,
    error_for_status,
    parse_error_body,
    parse_retry_after,
    redact,
)

SECRETS = ("sk-verysecret", "http://gpu7.internal:8000/v1", "gpu7.internal")


def told(status: int, body: Any, **more: Any) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return error_for_status(status, data, name="mini@far", hidden=SECRETS, **more)


@pytest.mark.parametrize(
    ("body", "message", "kind", "parameter", "code"),
    [
        (
            {"error": {"message": "m", "type": "invalid_request_error", "param": "top_p", "code": "bad"}},
            "m",
            "invalid_request_error",
            "top_p",
            "bad",
        ),
        ({"error": {"code": 400, "message": "m", "type": "t"}}, "m", "t", None, "400"),
        (
            {"object": "error", "message": "m", "type": "BadRequestError", "param": None, "code": 400},
            "m",
            "BadRequestError",
            None,
            "400",
        ),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "m"}}, "m", "overloaded_error", None, ""),
        ({"error": "m", "error_type": "validation"}, "m", "validation", None, ""),
        ({"detail": "m"}, "m", "", None, ""),
        (
            {"detail": [{"loc": ["body", "messages", 0], "msg": "m", "type": "t"}]},
            "m",
            "invalid_request_error",
            "messages.0",
            "",
        ),
        ("m", "m", "", None, ""),
        ([1, 2], "", "", None, ""),
        (b"Bad Gateway", "Bad Gateway", "", None, ""),
        (b"\xff\xfe", "\ufffd\ufffd", "", None, ""),
    ],
)
def test_every_shape_is_read(body: Any, message: str, kind: str, parameter: str | None, code: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert parse_error_body(data) == ReportedError(message, kind, parameter, code)


@pytest.mark.parametrize(
    ("status", "body", "ours", "code", "reason"),
    [
        (400, {"error": {"message": "bad"}}, 400, "upstream_refused", "invalid"),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "bad", "type": "t"}]}, 400, "upstream_refused", "invalid"),
        (413, b"too large", 400, "upstream_refused", "invalid"),
        (
            400,
            {"error": {"message": "This model's maximum context length is 8192 tokens"}},
            400,
            "context_length_exceeded",
            "invalid",
        ),
        (
            400,
            {"error": {"type": "exceed_context_size_error", "message": "m"}},
            400,
            "context_length_exceeded",
            "invalid",
        ),
        (
            422,
            {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096", "error_type": "validation"},
            400,
            "context_length_exceeded",
            "invalid",
        ),
        (400, {"error": {"code": "content_filter", "message": "m"}}, 400, "content_filter", "filtered"),
        (401, {"error": {"message": "Incorrect API key: sk-verysecret"}}, 502, "upstream_refused_key", "key"),
        (403, b"", 502, "upstream_refused_key", "key"),
        (402, b"", 503, "upstream_quota", "quota"),
        (
            404,
            {"error": {"message": "The model `llama` does not exist"}},
            502,
            "upstream_misconfigured",
            "misconfigured",
        ),
        (301, b"", 502, "upstream_misconfigured", "misconfigured"),
        (204, b"", 502, "upstream_misconfigured", "misconfigured"),
        (405, b"", 502, "upstream_misconfigured", "misconfigured"),
        (408, b"", 504, "upstream_timeout", "timeout"),
        (504, b"<html>", 504, "upstream_timeout", "timeout"),
        (429, {"error": {"message": "slow down"}}, 429, "upstream_rate_limit", "rate_limit"),
        (429, {"error": {"type": "insufficient_quota", "message": "m"}}, 503, "upstream_quota", "quota"),
        (429, {"error": "Model is overloaded", "error_type": "overloaded"}, 429, "upstream_rate_limit", "rate_limit"),
        (424, {"error": "CUDA", "error_type": "generation"}, 502, "upstream_failed", "failed"),
        (500, {"error": {"message": "CUDA out of memory"}}, 502, "upstream_failed", "failed"),
        (502, b"<html><body>nginx</body></html>", 503, "upstream_overloaded", "overloaded"),
        (
            503,
            {"error": {"message": "Loading model", "type": "unavailable_error"}},
            503,
            "upstream_overloaded",
            "overloaded",
        ),
        (529, {"type": "error", "error": {"type": "overloaded_error"}}, 503, "upstream_overloaded", "overloaded"),
    ],
)
def test_every_status_has_its_error(status: int, body: Any, ours: int, code: str, reason: str) -> None:
    error = told(status, body)
    assert (error.status, error.code, error.reason) == (ours, code, reason)
    assert "mini@far" in str(error)


def test_only_what_may_do_better_is_tried_again() -> None:
    again = {status: told(status, b"").again for status in (400, 401, 402, 404, 408, 429, 500, 502, 503, 504)}
    assert [status for status, worth in again.items() if worth] == [408, 429, 500, 502, 503, 504]
    assert not told(400, b"").fault
    assert told(401, b"").fault
    assert told(429, b"").fault


def test_retry_after_is_taken_over_and_has_a_default_where_a_client_needs_one() -> None:
    assert told(429, b"", retry_after=7.0).retry_after == 7.0
    assert told(429, b"", retry_after=7.0).wait == 7.0
    assert told(429, b"").retry_after == 1.0
    assert told(429, b"").wait is None
    assert told(500, b"").retry_after is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after": "100000"}, 60.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT", "date": "Wed, 21 Oct 2026 07:28:30 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT"}, None),  # our clock says nothing about theirs
        ({"retry-after": "soon", "date": "Wed, 21 Oct 2026 07:28:30 GMT"}, None),
    ],
)
def test_retry_after_in_every_form(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, 60.0) == seconds


@pytest.mark.parametrize(
    ("told", "code", "reason"),
    [
        (ReportedError("m", "", None, "503"), "upstream_overloaded", "overloaded"),
        (ReportedError("m", "overloaded_error"), "upstream_overloaded", "overloaded"),
        (ReportedError("m", "rate_limit_error"), "upstream_rate_limit", "rate_limit"),
        (ReportedError("m", "BadRequestError"), "upstream_refused", "invalid"),
        (ReportedError("m", "InternalServerError"), "upstream_failed", "failed"),
        (ReportedError("m"), "upstream_failed", "failed"),
        (ReportedError("m", "", None, "content_filter"), "content_filter", "filtered"),
    ],
)
def test_errors_within_an_answer_have_a_status_by_their_words(told: ReportedError, code: str, reason: str) -> None:
    error = error_for_event(told, name="mini")
    assert (error.code, error.reason) == (code, reason)


@pytest.mark.parametrize(
    "text",
    [
        "no route to http://gpu7.internal:8000/v1/chat",
        "key sk-verysecret is unknown",
        "Bearer abc.def.ghi is wrong",
        "connect to 10.0.0.7:8000 failed",
        "connect to [fe80::1]:8000 failed",
        "gpu7.internal does not answer",
        "db.cluster.local:5432 is down",
        "could not open /srv/models/llama/config.json",
        "could not open C:\\models\\llama\\config.json",
        "localhost:9000 refused",
        "hf_abcdefghijklmnop",
    ],
)
def test_no_place_and_no_secret_is_shown(text: str) -> None:
    shown = redact(text, SECRETS)
    assert "(hidden)" in shown
    for secret in ("gpu7", "verysecret", "abc.def", "10.0.0.7", "fe80", "5432", "models", "9000", "abcdefgh"):
        assert secret not in shown


@pytest.mark.parametrize(
    "text",
    [
        'Traceback (most recent call last):\n  File "/x/y.py", line 3, in f\nValueError: z',
        "boom\n    at run (server.js:12)",
        "<!DOCTYPE html><html>gpu7</html>",
    ],
)
def test_stack_traces_and_pages_are_not_shown(text: str) -> None:
    assert redact(text, ()) == ""
    assert str(told(400, {"error": {"message": text}})) == "The upstream of 'mini@far' rejects the request."


def test_ordinary_words_are_shown_as_they_are() -> None:
    text = "temperature must be <= 2.0, and/or top_p in (0, 1]; use n=1 with stream (e.g. 0.5/0.7)"
    assert redact(text, SECRETS) == text


def test_words_are_short_and_on_one_line() -> None:
    assert redact("a\n b\r\x00\x1b[31mc", ()) == "a b [31mc"
    assert len(redact("word " * 500, ())) == 303


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.integers(100, 599))
def test_no_body_breaks_the_reading(body: bytes, status: int) -> None:
    error = error_for_status(status, body, name="mini")
    assert 400 <= error.status <= 599
    assert error.message
