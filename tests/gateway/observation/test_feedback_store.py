"""Outcomes belong to a request of their own tenant, are replaced by name, and are bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.gateway.observation.feedback_store import MOST_NAMES, FeedbackStore
from headrace.observe.latency.latency_book import RequestSample, Slice
from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.timeline import Timeline
from tests.support.clock import Clock
from tests.support.running_server import asynchronous


def note(store: FeedbackStore, id: str, tenant: str = "red", model: str = "mini", micros: int = 10) -> None:
    record = RequestRecord(
        id=id,
        request_id=f"req-{id}",
        tenant=tenant,
        method="POST",
        endpoint="/v1/chat/completions",
        status=200,
        timeline=Timeline(0.0),
    )
    slice = Slice(model, "chat", tenant, "/v1/chat/completions", "<=128", "direct")
    store.note(record, RequestSample(slice, {"ttft": 0.1, "e2e": 0.5}, micros=micros))


@asynchronous
async def test_an_outcome_is_found_by_either_id_after_a_restart_and_replaced_by_name(tmp_path: Path) -> None:
    database = Database(tmp_path)
    first = FeedbackStore(database, clock=Clock(86_400.0))
    note(first, "one")
    assert await first.put("red", "chatcmpl-one", {"thumbs": 1.0}) == ("one", {"thumbs": 1.0})
    second = FeedbackStore(database, clock=Clock(86_400.0))
    found = await second.put("red", "req-one", {"thumbs": 0.0, "order": 19.9})
    assert found == ("one", {"thumbs": 0.0, "order": 19.9})
    assert await second.of_request("red", "one") == {"thumbs": 0.0, "order": 19.9}
    groups = {each.key: each for each in await second.summary(["outcome", "model", "day"])}
    await database.close()
    thumbs = groups["thumbs", "mini", "1970-01-02"]
    assert (thumbs.count, thumbs.sum, thumbs.binary, thumbs.e2e_ms, thumbs.micros) == (1, 0.0, True, 500.0, 10)
    assert groups["order", "mini", "1970-01-02"].binary is False


@asynchronous
async def test_the_requests_of_other_tenants_do_not_exist(tmp_path: Path) -> None:
    database = Database(tmp_path)
    store = FeedbackStore(database)
    note(store, "one", "red")
    await store.put("red", "one", {"thumbs": 1.0})
    for id in ("one", "req-one"):
        with pytest.raises(ApiError) as caught:
            await store.put("blue", id, {"thumbs": 0.0})
        assert (caught.value.status, caught.value.code) == (404, "request_not_found")
    assert await store.of_request("blue", "one") == {}
    assert await store.summary(["outcome"], tenant="blue") == []
    await database.close()


@asynchronous
async def test_requests_outcomes_and_names_are_bounded(tmp_path: Path) -> None:
    database = Database(tmp_path)
    store = FeedbackStore(database, requests=5, outcomes=40)

    async def put(tenant: str, id: str, **values: float) -> Any:
        return await store.put(tenant, id, values)

    for number in range(8):
        note(store, str(number))
    with pytest.raises(ApiError, match="last 5 requests"):
        await put("red", "2", thumbs=1.0)
    for number in range(MOST_NAMES):
        await put("red", "7", **{f"name_{number}": 1.0})
    with pytest.raises(ApiError) as caught:
        await put("red", "7", thumbs=1.0)
    assert (caught.value.code, caught.value.parameter) == ("too_many_outcomes", "outcomes")
    note(store, "blue", "blue")
    await put("blue", "blue", thumbs=1.0)
    for number in range(MOST_NAMES):
        await put("red", "6", **{f"name_{number}": 1.0})
    groups = await store.summary(["outcome", "tenant"])
    await database.close()
    assert sum(each.count for each in groups) == 40
    assert sum(each.count for each in groups if each.key[1] == "blue") == 1  # the largest tenant makes room


@asynchronous
async def test_requests_that_wait_for_storage_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    database = Database(tmp_path / "file")
    store = FeedbackStore(database)
    for number in range(9000):
        note(store, str(number))
    assert store.filling.is_set()
    with pytest.raises(ApiError):
        await store.put("red", "8999", {"thumbs": 1.0})
    (tmp_path / "file").unlink()
    assert (await store.put("red", "8999", {"thumbs": 1.0}))[1] == {"thumbs": 1.0}
    with pytest.raises(ApiError):
        await store.put("red", "100", {"thumbs": 1.0})  # it was dropped
    await database.close()


@asynchronous
async def test_without_remembered_requests_no_feedback_is_taken(tmp_path: Path) -> None:
    database = Database(tmp_path)
    store = FeedbackStore(database, requests=0)
    note(store, "one")
    with pytest.raises(ApiError, match="feedback_requests"):
        await store.put("red", "one", {"thumbs": 1.0})
    await database.close()
