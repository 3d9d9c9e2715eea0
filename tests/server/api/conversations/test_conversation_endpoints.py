"""`/v1/conversations`, and responses that continue one."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import KeyConfig, RequestLimits
from headrace.gateway.api_errors import ApiError
from tests.support.running_server import Running, asynchronous, fails, request, say, serving, until, words

PATH = "/v1/conversations"


async def create(running: Running, **given: Any) -> str:
    answer = await running.ask("POST", PATH, given)
    assert answer.status == 200, answer.body
    return answer.json["id"]


async def texts(running: Running, id: str) -> list[str]:
    listed = (await running.ask("GET", f"{PATH}/{id}/items?order=asc&limit=100")).json["data"]
    return [part["text"] for item in listed for part in item.get("content") or []]


async def respond(running: Running, **given: Any) -> Any:
    return await running.ask("POST", "/v1/responses", {"model": "mini", "max_output_tokens": 9, **given})


@asynchronous
async def test_a_conversation_is_made_read_changed_and_deleted() -> None:
    async with serving() as running:
        made = (await running.ask("POST", PATH)).json  # every parameter is optional
        assert (made["object"], made["metadata"]) == ("conversation", {})
        path = f"{PATH}/{made['id']}"
        assert (await running.ask("GET", path)).json == made
        changed = (await running.ask("POST", path, {"metadata": {"a": "b"}})).json
        assert changed == {**made, "metadata": {"a": "b"}}
        added = (await running.ask("POST", f"{path}/items", {"items": [{"role": "user", "content": "Hi"}]})).json
        (item,) = added["data"]
        assert (item["type"], item["role"], item["content"]) == (
            "message", "user", [{"type": "input_text", "text": "Hi"}],
        )  # fmt: skip
        assert (added["first_id"], added["last_id"], added["has_more"]) == (item["id"], item["id"], False)
        assert (await running.ask("GET", f"{path}/items/{item['id']}?include=x")).json == item
        assert (await running.ask("GET", f"{path}/items?include=x")).json["data"] == [item]
        assert (await running.ask("DELETE", f"{path}/items/{item['id']}")).json["id"] == made["id"]
        assert (await running.ask("GET", f"{path}/items")).json["data"] == []
        deleted = (await running.ask("DELETE", path)).json
        assert deleted == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        assert (await running.ask("GET", path)).error["code"] == "conversation_not_found"


@pytest.mark.parametrize(
    ("method", "path", "given", "parameter"),
    [
        ("POST", "", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("POST", "", {"items": [{"role": "nobody", "content": "x"}]}, "items[0].role"),
        ("POST", "", {"metadata": {"a": 1}}, "metadata"),
        ("POST", "", {"metadata": {"a": "x" * 513}}, "metadata"),
        ("POST", "", {"metadatas": {}}, "metadatas"),
        ("POST", "/ID", {}, "metadata"),
        ("POST", "/ID/items", {"items": []}, "items"),
        ("POST", "/ID/items", {"items": [{"type": "web_search_call", "id": "x"}]}, "items[0].type"),
        ("GET", "/ID/items?limit=101", None, "limit"),
        ("GET", "/ID/items?after=x", None, "after"),
        ("GET", "/ID/items?before=x", None, "before"),
    ],
)
@asynchronous
async def test_what_is_wrong_is_named(method: str, path: str, given: Any, parameter: str) -> None:
    async with serving() as running:
        id = await create(running)
        answer = await running.ask(method, PATH + path.replace("ID", id), given)
        assert (answer.status, answer.error["param"]) == (400, parameter)


@asynchronous
async def test_a_response_continues_a_conversation_and_is_added_to_it() -> None:
    async with serving() as running:
        running.engine.answer = words("It is ", "paging.")
        id = await create(running, items=[{"role": "system", "content": "Be brief."}])
        for given in ({"conversation": id}, {"conversation": {"id": id}, "store": False}, {"conversation": id}):
            answer = await respond(running, input="What?", **given)
            assert (answer.status, answer.json["conversation"]) == (200, {"id": id})
        streamed = await respond(running, input="Why?", conversation=id, stream=True)
        assert b'"conversation":{"id":"%b"}' % id.encode() in streamed.body
        one_turn = ["What?", "It is paging."]
        assert await texts(running, id) == ["Be brief.", *one_turn, *one_turn, *one_turn, "Why?", "It is paging."]
        prompts = [stream.request.prompt for stream in running.engine.streams]
        assert [len(prompt) for prompt in prompts] == sorted({len(prompt) for prompt in prompts})
        # The same as if the client had sent the items itself.
        items = (await running.ask("GET", f"{PATH}/{id}/items?order=asc&limit=100")).json["data"]
        await respond(running, input=items[:-1])
        assert running.engine.streams[-1].request.prompt == prompts[-1]


@asynchronous
async def test_a_conversation_that_is_too_long_is_refused() -> None:
    async with serving(limits=RequestLimits(messages=4)) as running:
        running.engine.answer = words("ok")
        id = await create(running, items=[{"role": "user", "content": "x"}] * 3)
        assert (await respond(running, input="What?", conversation=id)).status == 200
        too_long = await respond(running, input="What?", conversation=id)
        assert (too_long.status, too_long.error["param"]) == (400, "input")
        assert len(await texts(running, id)) == 5


@asynchronous
async def test_a_response_that_fails_adds_nothing() -> None:
    async with serving() as running:
        id = await create(running)
        running.engine.answer = fails(ApiError("broken", kind="server_error"), "half an ")
        assert (await respond(running, input="What?", conversation=id)).status == 500
        await respond(running, input="What?", conversation=id, stream=True)
        assert await texts(running, id) == []


@asynchronous
async def test_a_conversation_that_is_deleted_meanwhile_does_not_cost_the_answer() -> None:
    async with serving() as running:
        id = await create(running)
        client = await running.client()
        await client.send(request("POST", "/v1/responses", {"input": "What?", "conversation": id}))
        await until(lambda: bool(running.engine.open))
        assert (await running.ask("DELETE", f"{PATH}/{id}")).status == 200
        say(running.engine.streams[0], "So.", end=True)
        answer = await client.answer()
        assert (answer.status, answer.json["conversation"]) == (200, None)
        assert answer.json["output"][0]["content"][0]["text"] == "So."


@asynchronous
async def test_tenants_are_walls() -> None:
    keys = (KeyConfig(name="one", key="a" * 20), KeyConfig(name="two", key="b" * 20))
    async with serving(keys=keys) as running:
        mine, other = {"authorization": "Bearer " + "a" * 20}, {"authorization": "Bearer " + "b" * 20}
        id = (await running.ask("POST", PATH, {}, **mine)).json["id"]
        for method, path in (("GET", id), ("DELETE", id), ("GET", f"{id}/items"), ("GET", f"{id}/items/msg_1")):
            assert (await running.ask(method, f"{PATH}/{path}", **other)).error["code"] == "conversation_not_found"
        answer = await running.ask("POST", "/v1/responses", {"input": "Hi", "conversation": id}, **other)
        assert (answer.status, answer.error["code"]) == (404, "conversation_not_found")
        assert (await running.ask("GET", f"{PATH}/{id}", **mine)).status == 200
