"""The stages of a request add up to its duration, and only its own tenant can ask for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.accounts import bearer, declared
from tests.support.admin_server import READER, administered
from tests.support.running_server import Answer, asynchronous, serving, words

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
USUAL = ["identify", "read", "route", "shape", "admit", "recall", "hop", "queue", "prefill", "decode", "post"]


def check_sum(found: dict[str, Any]) -> None:
    """The spans have no gaps, and their sum is the duration."""
    at = 0.0
    for span in found["spans"]:
        assert abs(span["start_ms"] - at) < 0.003  # rounded to microseconds
        at = span["start_ms"] + span["duration_ms"]
    assert abs(at - found["duration_ms"]) < 0.003
    assert abs(sum(span["duration_ms"] for span in found["spans"]) - found["duration_ms"]) < 0.05


@asynchronous
async def test_the_stages_of_a_whole_and_of_a_streamed_answer_add_up() -> None:
    async with serving() as server:
        server.engine.answer = words("a ", "b ", "c")
        for options in ({}, STREAM):
            client = await server.client()
            answer = await client.chat(**options)
            said = answer.events[-1] if options else answer.json
            found = (await server.ask("GET", f"/v1/requests/{said['id']}")).json
            check_sum(found)
            assert [span["name"] for span in found["spans"]] == [*USUAL, "settle", "post", "deliver"]
            assert (found["status"], found["endpoint"]) == (200, "/v1/chat/completions")
            assert found["request_id"] == answer.headers["x-request-id"]
            shape = next(span for span in found["spans"] if span["name"] == "shape")
            assert [part["name"] for part in shape["parts"]] == ["template", "tokenise"]
            stages: dict[str, float] = found["fields"]["stages_ms"]
            for name, milliseconds in said["headrace"]["stages_ms"].items():
                if name != "post":  # which went on while the report was written
                    assert stages[name] == milliseconds


@asynchronous
async def test_the_header_has_the_same_stages_and_their_sum() -> None:
    async with serving() as server:
        server.engine.answer = words("a ", "b")
        answer = await (await server.client()).chat()
        timing = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}
        total = timing.pop("total")
        assert abs(sum(timing.values()) - total) < 0.02
        found = (await server.ask("GET", f"/v1/requests/{answer.headers['x-request-id']}")).json
        assert timing.keys() == found["fields"]["stages_ms"].keys()
        assert {**timing, "deliver": 0.0} == {**found["fields"]["stages_ms"], "deliver": 0.0}


@asynchronous
async def test_a_refused_request_shows_where_it_ended() -> None:
    async with serving() as server:
        answer = await server.ask("POST", "/v1/chat/completions", {"messages": []})
        found = (await server.ask("GET", f"/v1/requests/{answer.headers['x-request-id']}")).json
        check_sum(found)
        assert (found["status"], found["error"], found["id"]) == (400, answer.error["code"], None)
        assert [span["name"] for span in found["spans"]] == ["identify", "read", "deliver"]


@asynchronous
async def test_an_unknown_request_is_not_found() -> None:
    async with serving() as server:
        answer = await server.ask("GET", "/v1/requests/nothing")
        assert (answer.status, answer.error["code"]) == (404, "request_not_found")


@asynchronous
async def test_only_the_own_tenant_and_administrators_see_a_request(tmp_path: Path) -> None:
    red, blue = declared("red", "red-secret", tenant="red"), declared("blue", "blue-secret", tenant="blue")
    root = declared(key="root-secret", admin="write")
    async with administered(tmp_path, keys=(red, blue, READER, root)) as server:
        server.engine.answer = words("a ", "b")
        answer = await server.chat("red-secret")
        path = f"/v1/requests/{answer.json['id']}"

        async def ask(secret: str, path: str) -> Answer:
            return await server.ask("GET", path, **bearer(secret))

        assert (await ask("red-secret", path)).json["tenant"] == "red"
        assert (await ask("blue-secret", path)).status == 404
        assert (await ask("blue-secret", f"/v1/requests/{answer.headers['x-request-id']}")).status == 404
        assert (await ask("blue-secret", f"/admin{path}")).status == 403
        assert (await ask("reader-secret", f"/admin{path}")).json["tenant"] == "red"
