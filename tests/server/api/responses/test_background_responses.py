"""Background responses: they survive their client, are polled, followed and cancelled, and are bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.config import KeyConfig
from headrace.gateway.api_errors import ApiError
from headrace.observe import metrics
from headrace.server.api.responses import background_responses
from headrace.server.api.responses.background_responses import EventLog
from tests.support.running_server import (
    Answer,
    Running,
    asynchronous,
    ended,
    fails,
    request,
    say,
    serving,
    until,
    words,
)

PATH = "/v1/responses"


async def create(running: Running, **given: Any) -> Answer:
    return await running.ask("POST", PATH, {"input": "Hello", "background": True, **given})


async def retrieve(running: Running, id: str, **headers: str) -> dict[str, Any]:
    return (await running.ask("GET", f"{PATH}/{id}", **headers)).json


async def finished(running: Running, id: str) -> dict[str, Any]:
    while (body := await retrieve(running, id))["status"] in ("queued", "in_progress"):
        pass
    return body


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition("data: ")[2]) for block in body.decode().split("\n\n")[:-1]]


@asynchronous
async def test_a_response_runs_after_its_client_has_left() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", PATH, {"input": "Hello", "background": True, "metadata": {"a": "b"}}))
        created = (await client.answer()).json
        assert (created["status"], created["background"], created["output"]) == ("queued", True, [])
        client.leave()
        await until(lambda: bool(running.engine.open))
        assert (await retrieve(running, created["id"]))["status"] == "in_progress"
        early = await running.ask("POST", PATH, {"input": "Go on", "previous_response_id": created["id"]})
        assert (early.status, early.error["code"]) == (409, "response_not_ended")
        say(running.engine.streams[0], "All ")
        say(running.engine.streams[0], "good.", end=True)
        body = await finished(running, created["id"])
        assert (body["status"], body["metadata"], body["background"]) == ("completed", {"a": "b"}, True)
        assert body["output"][0]["content"][0]["text"] == "All good."
        assert body["usage"]["output_tokens"] == 2
        assert body["created_at"] == created["created_at"]
        running.engine.answer = words("More.")
        later = await running.ask("POST", PATH, {"input": "Go on", "previous_response_id": created["id"]})
        assert later.status == 200
        items = (await running.ask("GET", f"{PATH}/{later.json['id']}/input_items")).json["data"]
        assert len(items) == 3


@asynchronous
async def test_what_can_be_refused_at_once_is() -> None:
    async with serving() as running:
        assert (await create(running, model="nothing")).status == 404
        assert (await create(running, store=False)).error["param"] == "background"
        assert (await create(running, input=[])).status == 400
        assert (await running.ask("GET", f"{PATH}/resp_unknown")).status == 404


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ApiError("slow down", kind="rate_limit_error"), "rate_limit_exceeded", "slow down"),
        (RuntimeError("a secret of the inside"), "server_error", "Internal server error"),
    ],
)
@asynchronous
async def test_a_failure_is_the_status_of_the_response(error: Exception, code: str, message: str) -> None:
    async with serving() as running:
        running.engine.answer = fails(error)
        body = await finished(running, (await create(running)).json["id"])
        assert (body["status"], body["error"]["code"]) == ("failed", code)
        assert message in body["error"]["message"]
        assert "secret" not in json.dumps(body)


@asynchronous
async def test_a_running_response_is_cancelled_and_its_tokens_are_settled_once() -> None:
    async with serving() as running:
        before = ended("gone")
        id = (await create(running)).json["id"]
        await until(lambda: bool(running.engine.open))
        say(running.engine.streams[0], "one ")
        cancelled = (await running.ask("POST", f"{PATH}/{id}/cancel")).json
        assert cancelled["status"] == "cancelled"
        (item,) = cancelled["output"]
        assert (item["content"][0]["text"], item["status"]) == ("one ", "incomplete")
        assert running.engine.dropped == running.engine.streams
        assert ended("gone") == before + 1
        assert (await running.ask("POST", f"{PATH}/{id}/cancel")).json == cancelled  # once more changes nothing
        assert await retrieve(running, id) == cancelled


@asynchronous
async def test_a_cancelled_stream_keeps_the_text_that_was_sent() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", PATH, {"input": "Hello", "background": True, "stream": True}))
        await client.head()
        id = events_of(await client.chunk())[0]["response"]["id"]
        say(running.engine.streams[0], "one two ")
        sent = b""
        while b"output_text.delta" not in sent:
            sent += await client.chunk()
        cancelled = (await running.ask("POST", f"{PATH}/{id}/cancel")).json
        (item,) = cancelled["output"]
        assert (cancelled["status"], item["content"][0]["text"], item["status"]) == (
            "cancelled", "one two ", "incomplete",
        )  # fmt: skip
        assert item["id"] == next(e["item"]["id"] for e in events_of(sent) if e["type"] == "response.output_item.added")
        running.engine.answer = words("three")
        assert (await running.ask("POST", PATH, {"input": "Go on", "previous_response_id": id})).status == 200
        client.leave()


@asynchronous
async def test_only_background_responses_can_be_cancelled() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        plain = (await create(running, background=False)).json["id"]
        assert (await running.ask("POST", f"{PATH}/{plain}/cancel")).status == 400
        assert (await running.ask("POST", f"{PATH}/resp_unknown/cancel")).status == 404
        done = (await create(running)).json["id"]
        body = await finished(running, done)
        assert (await running.ask("POST", f"{PATH}/{done}/cancel")).json == body


@asynchronous
async def test_those_that_wait_are_queued_and_can_be_cancelled() -> None:
    async with serving(storage={"background_running": 1}) as running:
        first, second, third = [(await create(running)).json["id"] for _ in range(3)]
        await until(lambda: bool(running.engine.open))
        assert [(await retrieve(running, id))["status"] for id in (first, second, third)] == [
            "in_progress", "queued", "queued",
        ]  # fmt: skip
        assert metrics.background_responses._value.get() == 3
        assert (await running.ask("POST", f"{PATH}/{second}/cancel")).json["status"] == "cancelled"
        say(running.engine.streams[0], "ok", end=True)
        await until(lambda: len(running.engine.streams) == 2)
        say(running.engine.streams[1], "ok", end=True)
        assert (await finished(running, third))["status"] == "completed"
        assert (await retrieve(running, second))["status"] == "cancelled"
        await until(lambda: metrics.background_responses._value.get() == 0)


@asynchronous
async def test_a_running_response_can_be_deleted() -> None:
    async with serving() as running:
        id = (await create(running)).json["id"]
        await until(lambda: bool(running.engine.open))
        assert (await running.ask("DELETE", f"{PATH}/{id}")).json["deleted"] is True
        assert running.engine.dropped == running.engine.streams
        assert (await running.ask("GET", f"{PATH}/{id}")).status == 404


@asynchronous
async def test_unfinished_responses_are_bounded() -> None:
    async with serving() as running:
        running.server.durable.background._unfinished_of_tenant = 2
        made = [(await create(running)).json["id"] for _ in range(2)]
        refused = await create(running)
        assert (refused.status, refused.error["code"]) == (429, "too_many_background_responses")
        assert refused.headers["retry-after"] == "5"
        await running.ask("POST", f"{PATH}/{made[0]}/cancel")
        made.append((await create(running)).json["id"])
        for id in made[1:]:
            await running.ask("POST", f"{PATH}/{id}/cancel")


@asynchronous
async def test_the_bytes_of_unfinished_responses_are_bounded() -> None:
    async with serving() as running:
        running.server.durable.background._unfinished_bytes_of_tenant = 10_000
        first = (await create(running, metadata={"a": "b"})).json["id"]
        refused = await create(running, input="x " * 6000)
        assert (refused.status, refused.error["code"]) == (429, "too_many_background_responses")
        await running.ask("POST", f"{PATH}/{first}/cancel")
        left = await running.server.database.run(
            lambda connection: connection.execute("SELECT id FROM responses").fetchall()
        )
        assert left == [(first,)]
        assert metrics.background_responses._value.get() == 0


@asynchronous
async def test_tenants_are_walls() -> None:
    keys = (KeyConfig(name="one", key="a" * 20), KeyConfig(name="two", key="b" * 20))
    async with serving(keys=keys) as running:
        mine, other = {"authorization": "Bearer " + "a" * 20}, {"authorization": "Bearer " + "b" * 20}
        given = {"input": "Hello", "background": True, "stream": True}
        client = await running.client()
        await client.send(request("POST", PATH, given, **mine))
        await client.head()
        await until(lambda: bool(running.engine.open))
        id = next(iter(running.server.durable.background._live))[1]
        for method, path in (("GET", id), ("GET", f"{id}?stream=true"), ("POST", f"{id}/cancel"), ("DELETE", id)):
            answer = await running.ask(method, f"{PATH}/{path}", **other)
            assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert (await retrieve(running, id, **mine))["status"] == "in_progress"
        say(running.engine.streams[0], "ok", end=True)
        client.leave()


@asynchronous
async def test_a_stream_can_be_left_and_followed_from_where_it_was() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", PATH, {"input": "Hello", "background": True, "stream": True}))
        assert (await client.head())[1]["content-type"].startswith("text/event-stream")
        begun = events_of(await client.chunk())
        assert [event["type"] for event in begun[:2]] == ["response.created", "response.in_progress"]
        id = begun[0]["response"]["id"]
        client.leave()
        say(running.engine.streams[0], "one ")
        follower = await running.client()
        await follower.send(request("GET", f"{PATH}/{id}?stream=true&starting_after=1"))
        await follower.head()
        first = events_of(await follower.chunk())
        assert first[0]["sequence_number"] == 2
        say(running.engine.streams[0], "two", end=True)
        rest = b""
        while chunk := await follower.chunk():
            rest += chunk
        heard = [*first, *events_of(rest)]
        assert [event["sequence_number"] for event in heard] == list(range(2, len(heard) + 2))
        assert "".join(event["delta"] for event in heard if event["type"].endswith("text.delta")) == "one two"
        assert heard[-1]["type"] == "response.completed"
        assert heard[-1]["response"] == await retrieve(running, id)
        again = await running.ask("GET", f"{PATH}/{id}?stream=true")  # it has ended, and its events are still held
        assert events_of(again.body) == [*begun[:2], *heard]


@asynchronous
async def test_a_stream_that_fails_ends_with_its_failure() -> None:
    async with serving() as running:
        running.engine.answer = fails(ApiError("it broke", kind="server_error"), "half ")
        events = events_of((await create(running, stream=True)).body)
        assert events[-1]["type"] == "response.failed"
        body = await finished(running, events[0]["response"]["id"])
        assert (body["status"], body["error"]["message"]) == ("failed", "it broke")


@asynchronous
async def test_events_that_are_not_held_are_refused() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        id = (await create(running)).json["id"]
        await finished(running, id)
        for query in ("stream=true", "stream=maybe", "stream=true&starting_after=x", "colour=red"):
            assert (await running.ask("GET", f"{PATH}/{id}?{query}")).status == 400
        running.server.durable.background._held = 1
        streamed = [events_of((await create(running, stream=True)).body)[0]["response"]["id"] for _ in range(3)]
        known = [(await running.ask("GET", f"{PATH}/{each}?stream=true")).status for each in streamed]
        assert known == [400, 200, 200]  # the last one was running when the others were counted


def test_events_beyond_the_bound_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "_EVENT_BYTES", 50)
    log = EventLog()
    log.add(b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\n")
    assert log.events == [b"event: a\ndata: {}\n\n", b"event: b\ndata: {}\n\n"]
    log.add(b"event: c\ndata: {}\n\n")
    assert (log.events, log.has_overflowed) == ([], True)


@asynchronous
async def test_what_a_server_left_unfinished_has_failed_for_the_next() -> None:
    async with serving() as running:
        durable = running.server.durable
        body = {"id": "resp_1", "status": "in_progress", "background": True, "error": None, "output": []}
        await durable.history.responses.put("resp_1", "", [], body, unfinished=True)
        id = (await create(running)).json["id"]
        await until(lambda: bool(running.engine.open))
        await durable.history.responses.put("resp_2", "", [], {**body, "id": "resp_2", "status": "completed"})
        durable.background.resume()
        failed = await finished(running, "resp_1")
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert (await retrieve(running, "resp_2"))["status"] == "completed"
        say(running.engine.streams[0], "ok", end=True)  # what runs in this server goes on
        assert (await finished(running, id))["status"] == "completed"


@asynchronous
async def test_a_server_that_ends_lets_running_responses_finish() -> None:
    async with serving(drain_s=60.0, storage={"background_running": 2}) as running:
        ids = [(await create(running)).json["id"] for _ in range(3)]
        await until(lambda: len(running.engine.open) == 2)
        store = running.server.durable.history.responses
        finish, stored = store.finish, dict[str, str]()

        async def record(id: str, tenant: str, body: dict[str, Any]) -> None:
            await finish(id, tenant, body)
            stored[id] = body["status"]

        store.finish = record
        running.server.end()
        for stream in running.engine.streams:
            say(stream, "ok", end=True)
        await running.task
        assert stored == {ids[0]: "completed", ids[1]: "completed"}
        assert len(running.engine.streams) == 2  # the third has not begun, and the next server marks it as failed


@asynchronous
async def test_no_tenant_takes_all_slots() -> None:
    keys = (KeyConfig(name="one", key="a" * 20), KeyConfig(name="two", key="b" * 20))
    async with serving(keys=keys, storage={"background_running": 4}) as running:
        mine, other = {"authorization": "Bearer " + "a" * 20}, {"authorization": "Bearer " + "b" * 20}
        given = {"input": "Hello", "background": True}
        ids = [(await running.ask("POST", PATH, given, **mine)).json["id"] for _ in range(5)]
        await until(lambda: len(running.engine.open) == 3)
        theirs = (await running.ask("POST", PATH, given, **other)).json["id"]
        await until(lambda: len(running.engine.open) == 4)
        assert (await retrieve(running, theirs, **other))["status"] == "in_progress"
        assert [(await retrieve(running, id, **mine))["status"] for id in ids[3:]] == ["queued", "queued"]
        for id in ids[::-1]:
            await running.ask("POST", f"{PATH}/{id}/cancel", **mine)
        await running.ask("POST", f"{PATH}/{theirs}/cancel", **other)


@asynchronous
async def test_a_response_in_the_background_is_added_to_its_conversation() -> None:
    async with serving() as running:
        running.engine.answer = words("Hi.")
        conversation = (await running.ask("POST", "/v1/conversations", {})).json["id"]
        await finished(running, (await create(running, conversation=conversation)).json["id"])
        items = (await running.ask("GET", f"/v1/conversations/{conversation}/items?order=asc")).json["data"]
        assert [item["role"] for item in items] == ["user", "assistant"]
