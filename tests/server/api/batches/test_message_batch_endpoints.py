"""`/v1/messages/batches`: Anthropic's life cycle, counts, results and errors, on the mechanism of all batches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse

from headrace.config import KeyConfig
from headrace.gateway.api_errors import ApiError
from tests.support.running_server import Running, asynchronous, fails, serving, until, words

PATH = "/v1/messages/batches"
PARAMS = {"model": "mini", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}


def one(custom_id: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {**PARAMS, **changes}}


async def create(running: Running, *requests: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await running.ask("POST", PATH, {"requests": list(requests)}, **headers)
    assert answer.status == 200, answer.body
    MessageBatch.model_validate(answer.json)
    return answer.json


async def ended(running: Running, id: str, **headers: str) -> dict[str, Any]:
    while True:
        batch = (await running.ask("GET", f"{PATH}/{id}", **headers)).json
        if batch["processing_status"] == "ended":
            return batch


async def results(running: Running, batch: dict[str, Any]) -> dict[str, Any]:
    """Results by custom id."""
    answer = await running.ask("GET", batch["results_url"])
    assert answer.status == 200, answer.body
    lines = [json.loads(line) for line in answer.body.splitlines()]
    for line in lines:
        MessageBatchIndividualResponse.model_validate(line)
    return {line["custom_id"]: line["result"] for line in lines}


@asynchronous
async def test_a_batch_runs_to_its_end_and_each_request_has_one_result() -> None:
    async with serving() as running:
        running.engine.answer = words("all ", "good")
        batch = await create(running, one("a"), one("b", model="nothing"), one("c", max_tokens=0), one("d"))
        assert batch["id"].startswith("msgbatch_")
        assert batch["request_counts"] == {"processing": 4, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
        assert (batch["processing_status"], batch["results_url"], batch["ended_at"]) == ("in_progress", None, None)
        done = await ended(running, batch["id"])
        MessageBatch.model_validate(done)
        assert done["request_counts"] == {"processing": 0, "succeeded": 2, "errored": 2, "canceled": 0, "expired": 0}
        found = await results(running, done)
        assert list(found) == ["a", "d", "b", "c"]
        assert [found[id]["type"] for id in "abcd"] == ["succeeded", "errored", "errored", "succeeded"]
        assert found["a"]["message"]["content"] == [{"type": "text", "text": "all good"}]
        assert found["a"]["message"]["id"].startswith("msg_")
        assert [found[id]["error"]["type"] for id in "bc"] == ["error", "error"]
        assert [found[id]["error"]["error"]["type"] for id in "bc"] == ["not_found_error", "invalid_request_error"]
        assert "'max_tokens'" in found["c"]["error"]["error"]["message"]


@asynchronous
async def test_a_cancelled_batch_keeps_what_it_has_and_cancels_the_rest() -> None:
    async with serving() as running:
        batch = await create(running, *(one(f"r{place}") for place in range(3)))
        await until(lambda: len(running.engine.open) == 3)
        words("done")(running.engine.streams[0])
        cancelled = (await running.ask("POST", f"{PATH}/{batch['id']}/cancel")).json
        assert cancelled["processing_status"] in ("canceling", "ended")
        assert cancelled["cancel_initiated_at"] is not None
        done = await ended(running, batch["id"])
        counts, found = done["request_counts"], await results(running, done)
        assert counts["succeeded"] + counts["canceled"] == 3
        assert counts["canceled"] >= 2
        assert sorted(each["type"] for each in found.values()).count("canceled") == counts["canceled"]
        again = await running.ask("POST", f"{PATH}/{batch['id']}/cancel")
        assert (again.status, again.json["type"]) == (409, "error")


@asynchronous
async def test_an_ended_batch_is_deleted_with_its_files() -> None:
    async with serving() as running:
        batch = await create(running, one("a"))
        await until(lambda: bool(running.engine.open))
        early = await running.ask("DELETE", f"{PATH}/{batch['id']}")
        assert (early.status, early.error["type"]) == (409, "invalid_request_error")
        waiting = await running.ask("GET", f"{PATH}/{batch['id']}/results")
        assert (waiting.status, waiting.error["type"]) == (404, "not_found_error")
        words("done")(running.engine.streams[0])
        done = await ended(running, batch["id"])
        assert len((await running.ask("GET", "/v1/files")).json["data"]) == 2
        deleted = (await running.ask("DELETE", f"{PATH}/{batch['id']}")).json
        assert deleted == {"id": batch["id"], "type": "message_batch_deleted"}
        assert (await running.ask("GET", "/v1/files")).json["data"] == []
        for path in (f"{PATH}/{batch['id']}", done["results_url"]):
            assert (await running.ask("GET", path)).status == 404


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "requests"),
        ([one("a"), one("a")], "requests[1].custom_id"),
        ([one("not/allowed")], "requests"),
        ([one("x" * 65)], "requests"),
        ([one("a"), one("b", stream=True)], "requests[1].params.stream"),
        ([{"custom_id": "a"}], "params"),
        ([one(f"r{place}") for place in range(4)], "at most 3"),
    ],
)
@asynchronous
async def test_requests_of_which_no_batch_can_be_made_are_rejected(requests: list[Any], message: str) -> None:
    async with serving(storage={"batch_requests": 3}) as running:
        answer = await running.ask("POST", PATH, {"requests": requests})
        assert (answer.status, answer.json["type"], answer.error["type"]) == (400, "error", "invalid_request_error")
        assert message in answer.error["message"]
        assert (await running.ask("GET", PATH)).json["data"] == []
        assert (await running.ask("GET", "/v1/files")).json["data"] == []


@asynchronous
async def test_lists_go_both_ways_and_the_two_dialects_have_their_own() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        ids = [(await create(running, one("a")))["id"] for _ in range(4)][::-1]  # the newest first

        async def page(query: str) -> tuple[list[int], bool]:
            listed = (await running.ask("GET", f"{PATH}?{query}")).json
            return [ids.index(each["id"]) for each in listed["data"]], listed["has_more"]

        assert await page("") == ([0, 1, 2, 3], False)
        assert await page("limit=2") == ([0, 1], True)
        assert await page(f"limit=2&after_id={ids[1]}") == ([2, 3], False)
        assert await page(f"limit=2&before_id={ids[3]}") == ([1, 2], True)
        assert await page(f"before_id={ids[1]}") == ([0], False)
        for query in ("limit=1001", "after_id=nothing", f"after_id={ids[0]}&before_id={ids[1]}"):
            assert (await running.ask("GET", f"{PATH}?{query}")).status == 400
        assert (await running.ask("GET", "/v1/batches")).json["data"] == []
        assert (await running.ask("GET", f"/v1/batches/{ids[0]}")).status == 404
        for id in ids:
            await ended(running, id)


@asynchronous
async def test_tenants_are_walls() -> None:
    keys = (KeyConfig(name="one", key="a" * 20), KeyConfig(name="two", key="b" * 20))
    async with serving(keys=keys) as running:
        running.engine.answer = words("ok")
        mine, other = {"x_api_key": "a" * 20}, {"x_api_key": "b" * 20}
        batch = await create(running, one("a"), **mine)
        await ended(running, batch["id"], **mine)
        path = f"{PATH}/{batch['id']}"
        for method, each in (("GET", path), ("GET", f"{path}/results"), ("POST", f"{path}/cancel"), ("DELETE", path)):
            answer = await running.ask(method, each, **other)
            assert (answer.status, answer.error["type"]) == (404, "not_found_error")
        assert (await running.ask("GET", PATH, **other)).json["data"] == []
        assert (await running.ask("GET", f"{path}/results", **mine)).status == 200


@asynchronous
async def test_a_request_that_fails_has_its_error_in_anthropics_shape() -> None:
    async with serving() as running:
        running.engine.answer = fails(ApiError("it broke", kind="server_error", code="generation_failed"))
        done = await ended(running, (await create(running, one("a")))["id"])
        found = await results(running, done)
        assert found["a"] == {
            "type": "errored",
            "error": {
                "type": "error",
                "error": {"type": "api_error", "message": "it broke", "details": {"error_code": "generation_failed"}},
            },
        }
