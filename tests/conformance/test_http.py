"""What any HTTP client sees: errors in OpenAI's shape, headers, Headrace's own parameters, keys, curl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from headrace.observe.traces.timeline import STAGES
from tests.conformance.conftest import Server

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "What is time to first token?"}], "max_tokens": 8}


def told(reply: httpx2.Response) -> dict[str, Any]:
    """The error, with its shape checked."""
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    return body["error"]


def events(reply: httpx2.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = reply.text.split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize(
    ("wishes", "parameter", "code"),
    [
        ({"max_token": 5}, "max_token", "unknown_parameter"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": "Hi"}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "contents": "a"}]}, "messages[0].contents", "unknown_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
            None,
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages", "too_many_values"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "w" * 1_000_000}]}, "messages", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"top_p": -1}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", None),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"min_tokens": 99}, "min_tokens", None),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop[0]", "invalid_value"),
        ({"stop": ["a"] * 99}, "stop", None),
        ({"logit_bias": {"7": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"seven": 1}}, "logit_bias", None),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        (
            {"stream": True, "stream_options": {"include_usage_": 1}},
            "stream_options.include_usage_",
            "unknown_parameter",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", None),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"chat_template_kwargs": {"tools": 3}}, "chat_template_kwargs.tools", "unsupported_parameter"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", None),
        ({"surface": "moon"}, "surface", "invalid_value"),
        ({"priority": 1000}, "priority", "invalid_value"),
        ({"deadline_ms": 0}, "deadline_ms", "invalid_value"),
        ({"functions": [{"name": "a"}]}, "functions", "unsupported_parameter"),
        ({"audio": {"voice": "alloy"}}, "audio", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_is_named(http: httpx2.Client, wishes: dict[str, Any], parameter: str, code: str | None) -> None:
    reply = http.post(CHAT, json={**ASKED, **wishes})
    assert reply.status_code == 400
    error = told(reply)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", parameter, code)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"colour": "red"}, "colour"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        ({"stream": True, "stream_options": {"more": True}}, "stream_options.more"),
    ],
)
def test_an_unknown_field_is_ignored_and_named_or_refused_when_strict(
    http: httpx2.Client, fields: dict[str, Any], parameter: str
) -> None:
    reply = http.post(CHAT, json={**ASKED, **fields})
    assert reply.status_code == 200
    assert parameter.replace("[0]", "") in reply.headers["x-headrace-ignored"]
    reply = http.post(CHAT, json={**ASKED, **fields}, headers={"x-headrace-strict-parameters": "true"})
    error = told(reply)
    assert (reply.status_code, error["param"], error["code"]) == (400, parameter, "unknown_parameter")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"[1]",
        b"null",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [',
    ],
)
def test_what_is_no_json_object_is_a_bad_request(http: httpx2.Client, body: bytes) -> None:
    reply = http.post(CHAT, content=body)
    assert reply.status_code == 400
    assert told(reply)["type"] == "invalid_request_error"


def test_a_grammar_that_cannot_be_used_is_a_bad_request(http: httpx2.Client) -> None:
    for wish in (
        {"guided_regex": "("},
        {"guided_choice": []},
        {"guided_json": "{"},
        {"guided_grammar": "nonsense"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nope"}}}},
    ):
        for stream in (False, True):
            reply = http.post(CHAT, json={**ASKED, **wish, "stream": stream})
            assert reply.status_code == 400
            assert told(reply)["param"] is not None


def test_a_body_that_is_too_long_is_not_read(http: httpx2.Client) -> None:
    reply = http.post(CHAT, content=b" " * (8 * 1024 * 1024 + 1))
    assert reply.status_code == 413
    assert told(reply)["code"] == "request_too_large"


def test_paths_and_methods_that_are_not_there(http: httpx2.Client) -> None:
    reply = http.get("/v1/nothing")
    assert (reply.status_code, told(reply)["code"]) == (404, "unknown_url")
    assert http.get(CHAT).status_code == 405
    assert http.put("/v1/models").status_code == 405
    assert http.head("/v1/models").status_code == 200
    assert http.head("/v1/models").content == b""


def test_a_model_that_is_not_there(http: httpx2.Client) -> None:
    for path, asked in ((CHAT, ASKED), ("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
        reply = http.post(path, json={**asked, "model": "none"})
        assert reply.status_code == 404
        error = told(reply)
        assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")


@pytest.mark.parametrize(
    ("wishes", "kind"),
    [
        ({"model": "none"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"extra_headers": {"x-headrace-colour": "red"}}, openai.BadRequestError),
    ],
)
def test_the_package_raises_its_own_kinds(client: openai.OpenAI, wishes: dict[str, Any], kind: type[Exception]) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            client.chat.completions.create(**{"model": "mini", **ASKED, **wishes}, stream=stream)
        assert isinstance(raised.value, openai.APIStatusError)
        assert raised.value.request_id


def test_a_request_has_an_id(http: httpx2.Client, client: openai.OpenAI) -> None:
    reply = http.post(CHAT, json=ASKED, headers={"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert http.post(CHAT, json=ASKED, headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")
    ids = {http.post(CHAT, json=ASKED).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert client.models.list()._request_id  # pyright: ignore[reportPrivateUsage]


def test_an_answer_says_what_took_how_long(http: httpx2.Client) -> None:
    reply = http.post(CHAT, json=ASKED)
    timing = dict(re.findall(r"(\w+);dur=([\d.]+)", reply.headers["server-timing"]))
    assert {"shape", "queue", "prefill", "decode", "post", "total"} <= set(timing) <= {*STAGES, "total"}
    parts = sum(float(timing[name]) for name in timing if name != "total")
    assert parts == pytest.approx(float(timing["total"]), abs=0.02)
    own = reply.json()["headrace"]
    milliseconds = {"queue_ms", "prefill_ms", "decode_ms", "total_ms", "stages_ms"}
    assert set(own) == {*milliseconds, "cached_tokens", "draft_acceptance"}
    assert set(own["stages_ms"]) <= set(timing)
    assert own["prefill_ms"] == pytest.approx(float(timing["prefill"]), abs=0.01)
    assert own["cached_tokens"] == reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    last = events(http.post(CHAT, json={**ASKED, "stream": True, "stream_options": {"include_usage": True}}))[-1]
    assert set(last["headrace"]) == set(own)


def test_events_are_as_openai_writes_them(http: httpx2.Client) -> None:
    reply = http.post(CHAT, json={**ASKED, "stream": True})
    assert reply.headers["cache-control"] == "no-cache"
    found = events(reply)
    assert found[0]["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert found[-1]["choices"][0]["delta"] == {}
    assert found[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert all("usage" not in each for each in found)


def test_a_deadline_ends_an_answer_with_what_there_is(http: httpx2.Client) -> None:
    asked = {**ASKED, "max_tokens": 1800, "ignore_eos": True, "deadline_ms": 700}
    whole = http.post(CHAT, json=asked).json()
    assert whole["choices"][0]["finish_reason"] == "deadline"
    assert whole["choices"][0]["message"]["content"]
    assert 0 < whole["usage"]["completion_tokens"] < 1800
    del asked["deadline_ms"]
    found = events(http.post(CHAT, json={**asked, "stream": True}, headers={"x-headrace-deadline-ms": "700"}))
    assert found[-1]["choices"][0]["finish_reason"] == "deadline"


def test_the_body_has_the_last_word_over_headers(http: httpx2.Client) -> None:
    headers = {"x-headrace-deadline-ms": "1", "x-headrace-surface": "voice", "x-headrace-priority": "3"}
    reply = http.post(CHAT, json={**ASKED, "deadline_ms": 60_000}, headers=headers)
    assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("header", "value"),
    [("deadline-ms", "soon"), ("surface", "moon"), ("priority", "1.5"), ("cache", "maybe"), ("x", "")],
)
def test_a_header_of_ours_that_is_wrong_is_named(http: httpx2.Client, header: str, value: str) -> None:
    reply = http.post(CHAT, json=ASKED, headers={f"X-Headrace-{header}": value})
    assert (reply.status_code, told(reply)["param"]) == (400, f"x-headrace-{header}")


def test_cache_off_computes_the_prompt_anew(http: httpx2.Client) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "A prompt of some length, " * 12}], "temperature": 0}

    def cached(**more: Any) -> int:
        reply = http.post(CHAT, json={**asked, **more.get("body", {})}, headers=more.get("headers"))
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 16
    assert cached(body={"cache": "off"}) == 0
    assert cached(headers={"x-headrace-cache": "off"}) == 0
    assert cached() > 16


def test_it_says_that_it_lives_and_what_it_counts(http: httpx2.Client) -> None:
    assert http.get("/health/live").json() == {"status": "live"}
    for path in ("/health/ready", "/health"):
        assert http.get(path).json() == {"status": "ready", "models": ["mini"]}
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "headrace_" in reply.text


@pytest.fixture(scope="module")
def locked(starting: Callable[..., Server]) -> Server:
    return starting("--api-key", "secret-of-the-test")


def test_a_key_opens_and_nothing_else_does(locked: Server) -> None:
    for key in ("wrong", "secret-of-the-tes", "secret-of-the-test2", "a b", "ö"):
        reply = httpx2.get(f"{locked.url}/v1/models", headers={"authorization": f"Bearer {key}".encode()})
        assert reply.status_code == 401
        assert told(reply)["type"] == "authentication_error"
        assert reply.headers["www-authenticate"] == "Bearer"
    assert httpx2.get(f"{locked.url}/v1/models").status_code == 401
    assert httpx2.post(f"{locked.url}{CHAT}", json=ASKED).status_code == 401
    assert httpx2.get(f"{locked.url}/health/ready").status_code == 200
    for headers in ({"authorization": "Bearer secret-of-the-test"}, {"x-api-key": "secret-of-the-test"}):
        assert httpx2.get(f"{locked.url}/v1/models", headers=headers).status_code == 200


def test_the_package_raises_where_the_key_is_wrong(locked: Server) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="mini", **ASKED, stream=True)


def test_no_key_is_in_the_log(locked: Server) -> None:
    httpx2.get(f"{locked.url}/v1/models", headers={"x-api-key": "another-secret"})
    log = locked.log.read_text()
    assert "secret-of-the-test" not in log
    assert "another-secret" not in log


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_as_the_server_itself_proposes(server: Server) -> None:
    printed = server.log.read_text()
    found = re.search(r"^  (curl .*\\\n.*)$", printed, re.MULTILINE)
    assert found
    command = found[1].replace("curl ", "curl -sS --fail ", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_uploads_a_file(server: Server, tmp_path: Any) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"{}\n" * 10_000)
    fields = ["-F", "purpose=batch", "-F", f"file=@{path}"]
    done = subprocess.run(["curl", "-sS", "--fail", f"{server.url}/v1/files", *fields], capture_output=True, check=True)
    assert json.loads(done.stdout)["bytes"] == 30_000
