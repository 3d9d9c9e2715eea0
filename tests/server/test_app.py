"""App: errors in the shape of the client's dialect at every stage, and paths with a slash at the end."""

from __future__ import annotations

import gc
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import anthropic
import pytest

from headrace.config import KeyConfig, RequestLimits
from headrace.engine.interface.grammar_spec import NOT_FOLLOWED
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.api_errors import ApiError
from headrace.version import __version__
from tests.support.running_server import CHAT, asynchronous, fails, serving, words

MESSAGE: Any = {"model": "mini", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
LONG_MESSAGE = {**MESSAGE, "system": "x" * 2000}
LARGE, UNKNOWN = anthropic.RequestTooLargeError, anthropic.AuthenticationError
SPEAKS_ANTHROPIC = {"anthropic_version": "2023-06-01"}
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", {**MESSAGE, "model": "nothing"}, 404, "not_found_error"),
        ("POST", "/v1/messages", b"x" * 2000, 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", b"x" * 2000, 413, "request_too_large"),
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("GET", "/v1/messages/nowhere", None, 404, "not_found_error"),
        ("GET", "/v1/nowhere", None, 404, "not_found_error"),
        ("GET", "/v1/models/nothing", None, 404, "not_found_error"),
        ("GET", "/v1/files?limit=x", None, 400, "invalid_request_error"),
    ],
)
@asynchronous
async def test_errors_have_anthropics_shape_where_the_client_speaks_it(
    method: str, path: str, body: object, status: int, kind: str
) -> None:
    async with serving(body_bytes=1000) as running:
        answer = await running.ask(method, path, body, **SPEAKS_ANTHROPIC)
        assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)
        assert set(answer.error) <= {"type", "message", "details"}
        assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@asynchronous
async def test_openais_endpoints_keep_their_shape() -> None:
    async with serving() as running:
        answer = await running.ask("POST", "/v1/chat/completions", b"{", **SPEAKS_ANTHROPIC)
        assert set(answer.json) == {"error"}
        assert answer.error["code"] == "invalid_json"
        other = await running.ask("GET", "/nowhere")
        assert set(other.json) == {"error"}
        assert "request-id" not in other.headers


@asynchronous
async def test_a_missing_key_and_a_full_server_are_said_in_anthropics_shape() -> None:
    async with serving(keys=(KeyConfig(name="one", key="k" * 20),)) as running:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await running.ask("POST", path, MESSAGE)
            assert (answer.status, answer.json["type"], answer.error["type"]) == (401, "error", "authentication_error")
        listed = await running.ask("GET", "/v1/models", **SPEAKS_ANTHROPIC)
        assert (listed.status, listed.error["type"]) == (401, "authentication_error")
    async with serving(limits=RequestLimits(requests=1)) as running:
        client, stream = await running.streaming()
        answer = await running.ask("POST", "/v1/messages", MESSAGE)
        assert (answer.status, answer.json["type"], answer.error["type"]) == (503, "error", "overloaded_error")
        assert answer.headers["retry-after"] == "1"
        client.leave()
        del stream


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError("slow down", kind="rate_limit_error", retry_after=2.0), 429, "rate_limit_error"),
        (ApiError("no output in time", kind="server_error", status=504), 504, "timeout_error"),
        (RuntimeError("a bug"), 500, "api_error"),
    ],
)
@asynchronous
async def test_failures_of_the_engine_have_anthropics_shape(error: Exception, status: int, kind: str) -> None:
    async with serving() as running:
        running.engine.answer = fails(error)
        answer = await running.ask("POST", "/v1/messages", MESSAGE)
        assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)


@pytest.mark.parametrize(
    ("ask", "kind", "name", "code"),
    [
        (lambda api: api.messages.create(**MESSAGE), anthropic.RateLimitError, "rate_limit_error", "slow"),
        (lambda api: api.messages.create(**LONG_MESSAGE), LARGE, "request_too_large", "request_too_large"),
        (lambda api: api.models.retrieve("no"), anthropic.NotFoundError, "not_found_error", "model_not_found"),
        (lambda api: api.get("/v1/nowhere", cast_to=object), anthropic.NotFoundError, "not_found_error", "unknown_url"),
        (lambda api: api.messages.batches.delete("no"), anthropic.NotFoundError, "not_found_error", "batch_not_found"),
        (lambda api: api.with_options(api_key="x").models.list(), UNKNOWN, "authentication_error", "invalid_api_key"),
    ],
)
@asynchronous
async def test_anthropics_own_client_raises_its_own_errors(
    ask: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]],
    kind: type[anthropic.APIStatusError],
    name: str,
    code: str,
) -> None:
    async with serving(body_bytes=1000, keys=(KeyConfig(name="one", key="k" * 20),)) as running:
        running.engine.answer = fails(ApiError("slow down", kind="rate_limit_error", code="slow"))
        options: Any = {"base_url": running.server.url, "api_key": "k" * 20, "max_retries": 0}
        async with anthropic.AsyncAnthropic(**options) as client:
            with pytest.raises(kind) as caught:
                await ask(client)
            error = caught.value
            body: Any = error.body
            assert (body["type"], body["error"]["type"], error.error_code) == ("error", name, code)
            assert body["request_id"] == error.request_id


@asynchronous
async def test_one_connection_too_many_can_be_read_in_both_dialects() -> None:
    async with serving(connections=1) as running:
        first = await running.client()
        assert (await first.ask("GET", "/health/live")).status == 200
        answer = await (await running.client()).answer()
        assert (answer.status, answer.json["type"], answer.error["type"]) == (503, "error", "overloaded_error")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/messages HTTP/1.1\r\nanthropic-version: 2023-06-01\r\nA: " + b"b" * 8000, 431),
        (b"POST /v1/messages HTTP/1.1\r\nanthropic-version: 2023-06-01\r\ncontent-length: x\r\n\r\n", 400),
    ],
)
@asynchronous
async def test_errors_of_the_edge_can_be_read_in_both_dialects(sent: bytes, status: int) -> None:
    async with serving(header_bytes=4096) as running:
        client = await running.client()
        await client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.json["type"]) == (status, "error")
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"]
        assert {"param", "code"} <= set(answer.error)


@asynchronous
async def test_a_slash_at_the_end_of_a_path_is_accepted() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        for path in (route.path for route in running.server.app.routes if route.method == "GET" and route.open):
            if path.endswith("/events"):  # it never ends
                continue
            assert (await running.ask("GET", f"{path}/")).status == (await running.ask("GET", path)).status, path
        assert (await running.ask("POST", "/v1/chat/completions/", CHAT)).status == 200
        assert (await running.ask("POST", "/v1/messages/", MESSAGE)).status == 200
        assert (await running.ask("GET", "/v1/models/mini/")).json["id"] == "mini"
        assert (await running.ask("GET", "/v1/models/")).json["object"] == "list"
        assert (await running.ask("GET", "/v1/chat/completions/")).status == 405
        assert (await running.ask("GET", "/")).status == 200  # the dashboard; clients of Ollama send HEAD
        assert (await running.ask("DELETE", "/")).status == 405


@asynchronous
async def test_version_and_ping() -> None:
    async with serving() as running:
        assert (await running.ask("GET", "/version")).json == {"version": __version__}
        for method in ("GET", "POST"):
            assert (await running.ask(method, "/ping")).status == 200
    async with serving(loaded=False) as running:
        assert (await running.ask("GET", "/ping")).status == 503
        running.fleet.loaded.set()


@asynchronous
async def test_pages_of_another_origin_may_read_every_documented_header() -> None:
    async with serving(cors_origins=("https://example.org",)) as running:
        running.engine.answer = words("ok")
        answer = await running.ask("POST", "/v1/chat/completions", CHAT, origin="https://example.org")
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        page = (ROOT / "docs" / "reference" / "api.md").read_text()
        table = page.partition("<!-- generated: headers -->")[2].partition("<!-- end -->")[0]
        documented = {
            name.replace("...", unit)
            for name in re.findall(r"^\| `([a-z.-]+)` \| (?!in a request:)", table, re.MULTILINE)
            for unit in ("requests", "tokens")
        }
        assert len(documented) > 10
        assert documented <= set(exposed)
        asked = await running.ask("OPTIONS", "/v1/chat/completions", origin="https://example.org")
        assert "access-control-expose-headers" not in asked.headers
        plain = await running.ask("POST", "/v1/chat/completions", CHAT)
        assert "access-control-expose-headers" not in plain.headers


@asynchronous
async def test_a_grammar_that_cannot_be_followed_is_the_requests_mistake() -> None:
    def answer(stream: OutputStream) -> None:
        usage = SequenceUsage(3, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        ending = SequenceEnd(FinishReason.FAILED, usage, NOT_FOLLOWED + "too many states")
        stream.push(SequenceOutput("", 0, [], "", ending=ending))

    async with serving() as running:
        running.engine.answer = answer
        for stream in (False, True):
            found = await running.ask("POST", "/v1/chat/completions", {**CHAT, "guided_regex": "a+", "stream": stream})
            assert (found.status, found.error["type"], found.error["param"]) == (
                400,
                "invalid_request_error",
                "guided_regex",
            )
            assert "too many states" in found.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [1] * 5000}),
        ("/v1/chat/completions", {**CHAT, "temperature": 9}),
        ("/v1/chat/completions", {**CHAT, "stop_token_ids": [1] * 5000}),
        ("/v1/completions", {"prompt": [1] * 5000, "max_tokens": 1}),
        ("/detokenize", {"tokens": [-1] * 5000}),
    ],
)
@asynchronous
async def test_a_refused_body_is_freed_at_once(path: str, body: object) -> None:
    """Left to the collector, the bodies of many refused calls are freed together, while every other call waits."""
    async with serving() as running:
        assert (await running.ask("POST", path, body)).status == 400  # imports what it needs
        gc.collect()
        gc.disable()
        try:
            assert (await running.ask("POST", path, body)).status == 400
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            frames = [each.f_code.co_qualname for each in gc.garbage if isinstance(each, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert frames == []
