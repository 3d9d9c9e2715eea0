"""How answers reach clients, and what happens when they do not: leavers, errors, bugs, keys, and the log's lines."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from headrace.config import KeyConfig, LogConfig
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.client_errors import OverloadedError, WorkerLostError
from headrace.engine.process.output_stream import OutputStream
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import storage_unavailable
from headrace.observe import metrics
from headrace.observe.logs import configure_log
from headrace.server import durable_state
from headrace.server.api.chat_completions import ChatStream
from headrace.server.api.files import FileStore
from headrace.server.api.response_store import ResponseStore
from tests.support.running_server import CHAT, asynchronous, count, ended, fails, request, say, serving, until, words

STREAM = CHAT | {"stream": True}
HOSTILE = "a\n2026-01-01 [info] forged\r\x1b[31mred\x1b[0m\x00\x7f\x85\u2028\u202e"


@pytest.fixture(params=["text", "json"])
def logged(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    stream = io.StringIO()
    configure_log(LogConfig(format=request.param), stream)
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)


# Clients that leave


@asynchronous
async def test_a_client_that_leaves_within_its_body_starts_nothing() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT)[:-5])
        await until(lambda: bool(running.server.edge.tasks))
        client.leave()
        await running.settled()
        assert not running.engine.streams


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_client_that_leaves_before_the_first_token_frees_its_slot(stream: bool) -> None:
    async with serving() as running:
        gone = ended("gone")
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT | {"stream": stream}))
        await until(lambda: bool(running.engine.open))
        client.leave()
        await running.settled()
        assert running.engine.dropped == running.engine.streams
        assert ended("gone") == gone + 1


@asynchronous
async def test_a_client_that_leaves_between_two_tokens_frees_its_slot_and_no_other() -> None:
    async with serving() as running:
        gone, finished = ended("gone"), ended("finished")
        other, others = await running.streaming()
        client, stream = await running.streaming()
        say(stream, "two ")
        assert b"two" in await client.chunk()
        client.leave()
        await until(lambda: stream.closed)
        assert running.engine.dropped == [stream]
        assert ended("gone") == gone + 1
        say(others, "end", end=True)
        assert b"end" in await other.chunk()
        await running.settled()
        assert ended("gone") == gone + 1
        assert ended("finished") == finished + 1


@asynchronous
async def test_a_client_that_leaves_after_the_last_token_is_settled_once() -> None:
    async with serving() as running:
        gone, finished = ended("gone"), ended("finished")
        output = count(metrics.tokens, "mini", "-", "output")
        client, stream = await running.streaming()
        say(stream, "two", end=True)
        client.leave()
        await running.settled()
        assert (ended("gone"), ended("finished")) == (gone, finished + 1)
        assert count(metrics.tokens, "mini", "-", "output") == output + 2
        assert not running.engine.dropped


@asynchronous
async def test_a_client_that_leaves_while_its_prompt_is_cut_into_tokens_starts_nothing() -> None:
    async with serving() as running:
        (served,) = running.fleet.served.values()
        original = served.tokenizer.encode
        cutting, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*arguments: Any) -> list[int]:
            loop.call_soon_threadsafe(cutting.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return original(*arguments)

        served.context = 100_000
        client = await running.client()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(served.tokenizer), "encode", lambda _, *arguments: slow(*arguments))
            await client.send(request("POST", "/v1/completions", {"prompt": "one two " * 4000}))
            await cutting.wait()
            client.leave()
            (connection,) = running.server.edge.connections
            await until(lambda: connection._half or connection not in running.server.edge.connections)
            go_on.set()
            await running.settled()
        assert all(stream in running.engine.dropped for stream in running.engine.streams)


@asynchronous
async def test_a_client_that_leaves_with_many_choices_and_prompts_frees_all() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "stream": True}))
        await until(lambda: len(running.engine.open) == 3)
        say(running.engine.streams[1], "x")
        await client.head()
        client.leave()
        await running.settled()
        assert len(running.engine.dropped) == 3


@asynchronous
async def test_a_client_that_leaves_while_texts_are_scored_frees_all() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", "/v1/score", {"prompt": "a", "continuations": [" b", " c"]}))
        await until(lambda: len(running.engine.open) == 2)
        client.leave()
        await running.settled()
        assert len(running.engine.dropped) == 2


# Errors


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_an_engine_that_refuses_says_when_to_come_again(stream: bool) -> None:
    async with serving() as running:
        client = await running.client()
        running.engine.answer = fails(OverloadedError("full", retry_after=2.3))
        answer = await client.chat(stream=stream)
        assert (answer.status, answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (503, "3", "2300")
        assert (answer.error["type"], answer.error["code"]) == ("overloaded_error", "overloaded")
        running.engine.answer = fails(RequestError("too hot", parameter="temperature"))
        answer = await client.chat(stream=stream)
        assert (answer.status, answer.error["param"]) == (400, "temperature")
        running.engine.answer = fails(WorkerLostError("/secret/path is gone"))
        answer = await client.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "engine_lost")
        assert b"secret" not in answer.body
        running.engine.answer = words("ok")
        assert (await client.chat()).status == 200


@asynchronous
async def test_an_error_after_the_first_token_is_an_event() -> None:
    async with serving() as running:
        errors = ended("overloaded_error")
        client = await running.client()
        running.engine.answer = fails(WorkerLostError("gone"), "one ", "two ")
        answer = await client.chat(stream=True)
        assert answer.status == 200
        assert answer.text == "one two "
        assert answer.events[-1]["error"]["code"] == "engine_lost"
        assert ended("overloaded_error") == errors + 1

        def failed(stream: OutputStream) -> None:
            say(stream, "one ")
            say(stream, "", end=True, finish=FinishReason.FAILED)

        running.engine.answer = failed
        answer = await client.chat(stream=True)
        assert answer.events[-1]["error"]["code"] == "generation_failed"
        assert (await client.chat()).status == 500
        assert (await client.ask("GET", "/health/live")).status == 200


@asynchronous
async def test_a_bug_gets_500_without_internals_and_a_line_with_all(logged: io.StringIO) -> None:
    async with serving(keys=(KeyConfig(name="k", key="the-secret"),)) as running:
        client = await running.client()
        key = {"authorization": "Bearer the-secret"}
        for stream in (False, True):
            running.engine.answer = fails(ZeroDivisionError(f"secret internals {HOSTILE}"))
            answer = await client.ask(
                "POST", "/v1/chat/completions", CHAT | {"stream": stream}, x_request_id="mine", **key
            )
            assert (answer.status, answer.error["type"]) == (500, "server_error")
            assert b"secret" not in answer.body
            assert answer.headers["x-request-id"] == "mine"
        running.engine.answer = fails(ZeroDivisionError("secret internals"), "one ")
        answer = await client.ask("POST", "/v1/chat/completions", STREAM, **key)
        assert answer.events[-1]["error"]["type"] == "server_error"
        assert b"secret" not in answer.body
        running.engine.answer = words("ok")
        assert (await client.ask("POST", "/v1/chat/completions", CHAT, **key)).status == 200
    said = logged.getvalue()
    assert "ZeroDivisionError" in said
    assert "Traceback" in said
    assert "flow.py" in said
    assert "mine" in said
    assert "the-secret" not in said
    _assert_harmless(said)


@asynchronous
async def test_a_bug_in_what_writes_events_ends_the_stream_with_an_error() -> None:
    async with serving() as running:
        client = await running.client()
        with pytest.MonkeyPatch.context() as patch:

            def broken(*_: object) -> bytes:
                raise KeyError("internals")

            patch.setattr(ChatStream, "end", broken)
            running.engine.answer = words("one ", "two")
            answer = await client.chat(stream=True)
            assert answer.events[-1]["error"]["type"] == "server_error"
            assert b"internals" not in answer.body
            # And where nothing was sent, it is a reply of its own.
            patch.setattr(ChatStream, "begin", broken)
            assert (await client.chat(stream=True)).status == 500
        assert (await client.chat(stream=True)).text == "one two"


@asynchronous
async def test_a_reply_that_cannot_be_written_is_another_error() -> None:
    async with serving() as running:
        client = await running.client()
        running.engine.answer = fails(OverloadedError("\ud800"))
        answer = await client.chat()
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert (await client.ask("GET", "/health/live")).status == 200


@asynchronous
async def test_as_many_requests_as_are_allowed_run() -> None:
    from headrace.config import RequestLimits

    async with serving(limits=RequestLimits(requests=2)) as running:
        for _ in range(2):
            await running.streaming()
        answer = await running.ask("POST", "/v1/chat/completions", CHAT)
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "too_many_requests", "1")
        for stream in running.engine.open:
            say(stream, "", end=True)
        await running.settled()
        running.engine.answer = words("ok")
        assert (await running.ask("POST", "/v1/chat/completions", CHAT)).status == 200


# Keys


@asynchronous
async def test_keys(logged: io.StringIO) -> None:
    secrets = ("first-secret", "second-secret", "schlüssel-☃")
    keys = (
        KeyConfig(name="a", key=secrets[0], tenant="red"),
        KeyConfig(name="b", key_sha256=hashlib.sha256(secrets[1].encode()).hexdigest().upper()),
        KeyConfig(name="c", key=secrets[2]),
    )
    async with serving(keys=keys) as running:
        running.engine.answer = words("ok")
        client = await running.client()

        async def ask(**headers: str) -> tuple[int, str | None]:
            answer = await client.ask("POST", "/v1/chat/completions", CHAT, **headers)
            for secret in (*secrets, "wrong-secret"):
                assert secret.encode() not in answer.body
            if answer.status == 200:
                return 200, running.engine.streams[-1].request.tenant
            assert answer.headers["www-authenticate"] == "Bearer"
            return answer.status, answer.error["code"]

        assert await ask() == (401, "missing_api_key")
        assert await ask(authorization="Bearer ") == (401, "missing_api_key")
        assert await ask(authorization="Basic Zm9vOmJhcg==") == (401, "missing_api_key")
        assert await ask(authorization="Bearer wrong-secret") == (401, "invalid_api_key")
        assert await ask(authorization="Bearer first-secre") == (401, "invalid_api_key")
        assert await ask(authorization="Bearer first-secret") == (200, "red")
        assert await ask(authorization="bearer   first-secret") == (200, "red")
        assert await ask(x_api_key="second-secret") == (200, "b")
        assert await ask(authorization=f"Bearer {secrets[2]}") == (200, "c")
        # Both headers: the first of them counts, whatever the second says.
        assert await ask(authorization="Bearer first-secret", x_api_key="second-secret") == (200, "red")
        assert await ask(authorization="Bearer wrong-secret", x_api_key="second-secret") == (401, "invalid_api_key")
        assert await ask(authorization="Basic Zm9v", x_api_key="second-secret") == (200, "b")
        assert (await client.ask("GET", "/health/live")).status == 200
        assert (await client.ask("GET", "/v1/models")).status == 401
        shown = (await client.ask("GET", "/metrics")).body
        for secret in secrets:
            assert secret.encode() not in shown
    for secret in (*secrets, "wrong-secret", "Zm9v"):
        assert secret not in logged.getvalue()


@asynchronous
async def test_no_secret_is_compared_with_another() -> None:
    """What is looked up is a digest: how long that takes says nothing of a secret that a client does not have."""

    class Watched(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Watched.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    keys = tuple(KeyConfig(name=str(n), key=Watched(f"secret-{n}")) for n in range(5))
    async with serving(keys=keys) as running:
        directory = running.server.services.accounts.directory
        Watched.compared = 0
        for number in range(5):
            assert directory.identify({"x-api-key": Watched(f"secret-{number}")}).key == str(number)
        with pytest.raises(ApiError):
            directory.identify({"x-api-key": Watched("secret-5")})
        assert Watched.compared == 0
        assert all(isinstance(digest, bytes) and len(digest) == 32 for digest in directory._declared)


# The log


def _assert_harmless(said: str) -> None:
    for line in said.splitlines(keepends=True):
        text = line.removesuffix("\n")
        assert text.isprintable(), text
        assert not text.startswith("2026-01-01")


@asynchronous
async def test_a_request_is_one_line_whatever_the_client_says(logged: io.StringIO) -> None:
    async with serving() as running:
        running.engine.answer = words("one ", "two")
        client = await running.client()
        await client.ask("POST", "/v1/chat/completions", STREAM | {"user": HOSTILE}, x_request_id="id-1")
        await client.ask("POST", "/v1/chat/completions", CHAT | {"model": HOSTILE}, x_request_id="id-2")
        await client.ask("POST", "/v1/chat/completions", CHAT | {HOSTILE: 1}, x_request_id="id-3")
        await client.ask("POST", "/v1/chat/completions", CHAT | {"user": "u" * 100_000})
        await client.ask("GET", "/%0a%1b%5b31m%e2%80%a8", x_request_id="id-4")
        answer = await client.ask("GET", "/v1/models", x_request_id="a b\t\x85\xff")
        assert answer.headers["x-request-id"].startswith("req_")
        await client.ask("GET", "/v1/models", x_request_id="x" * 1000)
        await client.ask("GET", "/health/live")
    lines = logged.getvalue().splitlines()
    _assert_harmless(logged.getvalue())
    assert len(lines) == 2 + 7, lines  # ready, draining, and those that are no question for health
    assert all(len(line) < 4000 for line in lines)
    for number in range(1, 5):
        assert sum(f"id-{number}" in line for line in lines) == 1
    if lines[0].startswith("{"):
        first = json.loads(lines[1])
        assert first["event"] == "request"
        assert first["user"] == HOSTILE
        assert (first["route"], first["status"], first["model"]) == ("/v1/chat/completions", 200, "mini")
        assert {"queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "shape_ms", "ms"} <= set(first)
        assert all(json.loads(line)["event"] for line in lines)


def test_what_cannot_be_written_is_lost_and_disturbs_nobody() -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "no space left on device")

    configure_log(LogConfig(), Full())
    structlog.get_logger("headrace").info("ready", models=["mini"])


def test_a_line_for_people_has_quotes_where_a_value_has_spaces_and_marks_where_it_is_dangerous() -> None:
    stream = io.StringIO()
    configure_log(LogConfig(), stream)
    structlog.get_logger("headrace.requests").info("request", b="two words", a=1.5, c=None, d='"', e="x\ny")
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.split("] request ")[1] == '[headrace.requests] a=1.5 b="two words" c=None d="\\"" e="x\\ny"\n'


@asynchronous
async def test_what_has_expired_goes_though_nobody_writes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[str] = []

    async def files(_: FileStore) -> int:
        swept.append("files")
        raise storage_unavailable("the disk is gone")

    async def responses(_: ResponseStore) -> int:
        swept.append("responses")
        return 0

    monkeypatch.setattr(durable_state, "SWEEP_SECONDS", 0.001)
    monkeypatch.setattr(FileStore, "sweep", files)
    monkeypatch.setattr(ResponseStore, "sweep", responses)
    async with serving():
        await until(lambda: len(swept) > 6)
    assert swept[:4] == ["files", "responses"] * 2


@asynchronous
async def test_storage_that_is_not_there_disturbs_nothing_else(tmp_path: Path, logged: io.StringIO) -> None:
    from tests.support.running_server import config_of

    (tmp_path / "file").write_text("no folder")
    async with serving(config=config_of(tmp_path / "file" / "folder")) as running:
        running.engine.answer = words("ok")
        client = await running.client()
        assert (await client.ask("GET", "/health/ready")).status == 200
        assert (await client.chat()).status == 200
        answer = await client.ask("GET", "/v1/files")
        assert answer.status in (503, 507)
        assert str(tmp_path).encode() not in answer.body
        assert (await client.chat()).status == 200
