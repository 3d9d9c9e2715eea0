"""Stored responses: walls, time to live, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.gateway.database import Database
from headrace.server.api.response_store import ResponseStore
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous, refused


@asynccontextmanager
async def responses_in(folder: Path, **options: Any) -> AsyncGenerator[ResponseStore, None]:
    db = Database(folder)
    try:
        yield ResponseStore(db, **options)
    finally:
        await db.close()


async def kept(store: ResponseStore, tenant: str, *ids: str) -> list[str]:
    results = await asyncio.gather(*(store.get(id, tenant) for id in ids), return_exceptions=True)
    return [id for id, result in zip(ids, results, strict=True) if not isinstance(result, BaseException)]


def test_a_response_comes_back_as_it_was_put(tmp_path: Path) -> None:
    items = [{"id": "msg_1", "content": "Grüße 🌊 \ud800"}, {"id": "msg_2", "deep": [1, 2.5, None, True]}]
    body = {"id": "resp_1", "output": [{"text": "x" * 100_000}]}

    async def test() -> None:
        clock = Clock()
        async with responses_in(tmp_path, clock=clock, hours=2.0) as store:
            await store.put("resp_1", "a", items, body)
        async with responses_in(tmp_path, clock=clock) as store:
            found = await store.get("resp_1", "a")
            assert (found.items, found.body) == (items, body)
            assert (found.created_at, found.expires_at) == (int(clock.now), int(clock.now) + 7200)
            await store.put("resp_1", "a", [], {"id": "again"})
            assert (await store.get("resp_1", "a")).body == {"id": "again"}
            await store.delete("resp_1", "a")
            assert (await refused(store.get("resp_1", "a"))).status == 404
            assert (await refused(store.delete("resp_1", "a"))).status == 404

    asynchronous(test)


def test_tenants_are_walls(tmp_path: Path) -> None:
    async def test() -> None:
        async with responses_in(tmp_path) as store:
            await store.put("resp_1", "a", [], {"of": "a"})
            for act in (store.get, store.items, store.delete):
                theirs, nobodys = await refused(act("resp_1", "b")), await refused(act("resp_2", "b"))
                assert (theirs.status, theirs.openai()) == (nobodys.status, nobodys.openai())
                assert theirs.status == 404
            await store.put("resp_1", "b", [], {"of": "b"})
            assert (await store.get("resp_1", "a")).body == {"of": "a"}

    asynchronous(test)


def test_items_go_page_by_page(tmp_path: Path) -> None:
    async def test() -> None:
        async with responses_in(tmp_path) as store:
            items = [{"id": f"msg_{i}"} for i in range(5)]
            await store.put("resp_1", "a", [*items, "an item without an id"], {})
            page = await store.items("resp_1", "a", order="asc", limit=2)
            assert (page.data, page.has_more) == (items[:2], True)
            page = await store.items("resp_1", "a", order="asc", after="msg_1", limit=4)
            assert (page.data, page.has_more) == ([*items[2:], "an item without an id"], False)
            page = await store.items("resp_1", "a", after="msg_2")
            assert page.data == [items[1], items[0]]
            mistakes: list[dict[str, Any]] = [{"after": "msg_9"}, {"limit": 0}, {"limit": 101}, {"order": "up"}]
            for wrong in mistakes:
                assert (await refused(store.items("resp_1", "a", **wrong))).status == 400

    asynchronous(test)


def test_responses_expire(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with responses_in(tmp_path, clock=clock, hours=1.0) as store:
            await store.put("resp_1", "a", [], {})
            clock.now += 1800
            await store.put("resp_2", "a", [], {})
            clock.now += 1800
            assert await kept(store, "a", "resp_1", "resp_2") == ["resp_2"]
            assert (await refused(store.delete("resp_1", "a"))).status == 404
            assert await store.sweep() == 1
            assert await store.sweep() == 0

    asynchronous(test)


def test_the_oldest_go_first_and_another_tenants_never(tmp_path: Path) -> None:
    async def test() -> None:
        async with responses_in(tmp_path, count=4) as store:
            await store.put("old", "b", [], {})
            ids = [f"resp_{i}" for i in range(6)]
            for id in ids:
                await store.put(id, "a", [], {})
            assert await kept(store, "a", *ids) == ids[3:]
            assert await kept(store, "b", "old") == ["old"]
            await store.put(ids[5], "a", [], {"again": True})  # takes no second place
            assert await kept(store, "a", *ids) == ids[3:]

    asynchronous(test)


def test_bytes_are_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        async with responses_in(tmp_path, total_bytes=1000) as store:
            for i in range(3):
                await store.put(f"resp_{i}", "a", [], {"text": "x" * 400})
            assert await kept(store, "a", "resp_0", "resp_1", "resp_2") == ["resp_1", "resp_2"]
            error = await refused(store.put("long", "a", [], {"text": "x" * 1000}))
            assert (error.status, error.code) == (413, "response_too_large")
            assert await kept(store, "a", "resp_1", "resp_2") == ["resp_1", "resp_2"]

    asynchronous(test)


def test_a_broken_database_is_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "headrace.sqlite").write_bytes(b"this is no database" * 1000)
        async with responses_in(tmp_path) as store:
            assert (await refused(store.put("resp_1", "a", [], {}))).code == "storage_unavailable"
            assert (await refused(store.get("resp_1", "a"))).code == "storage_unavailable"

    asynchronous(test)
