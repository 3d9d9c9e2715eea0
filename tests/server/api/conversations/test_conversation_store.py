"""Stored conversations: walls, time to live after the last change, bounds."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.gateway.database import Database
from headrace.server.api.conversations.conversation_store import ConversationStore
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous, refused


@asynccontextmanager
async def conversations_in(folder: Path, **options: Any) -> AsyncGenerator[ConversationStore, None]:
    db = Database(folder)
    try:
        yield ConversationStore(db, **options)
    finally:
        await db.close()


def item(id: str, text: str = "x") -> dict[str, Any]:
    return {"id": id, "type": "message", "text": text}


async def ids(store: ConversationStore, id: str, tenant: str = "a") -> list[str]:
    return [each["id"] for each in await store.first_items(id, tenant, 1000)]


def test_a_conversation_comes_back_as_it_was_made_and_grew(tmp_path: Path) -> None:
    async def test() -> None:
        async with conversations_in(tmp_path) as store:
            made = await store.create("a", [item("msg_1", "Grüße 🌊 \ud800")], {"topic": "x"})
            assert await store.append(made.id, "a", [item("msg_2"), item("msg_3")]) == [item("msg_2"), item("msg_3")]
        async with conversations_in(tmp_path) as store:
            assert await store.get(made.id, "a") == made
            assert await store.item(made.id, "a", "msg_1") == item("msg_1", "Grüße 🌊 \ud800")
            changed = await store.update(made.id, "a", {"topic": "y", "z": "1"})
            assert changed.metadata == {"topic": "y", "z": "1"}
            assert (await store.delete_item(made.id, "a", "msg_2")).id == made.id
            assert await ids(store, made.id) == ["msg_1", "msg_3"]
            assert (await refused(store.delete_item(made.id, "a", "msg_2"))).code == "item_not_found"
            await store.delete(made.id, "a")
            assert (await refused(store.get(made.id, "a"))).code == "conversation_not_found"

    asynchronous(test)


def test_an_id_that_is_taken_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with conversations_in(tmp_path) as store:
            made = await store.create("a", [item("msg_1"), item("msg_1")], {})
            first, second = await ids(store, made.id)
            assert first == "msg_1"
            assert second.startswith("msg_")
            assert second != first
            (third,) = await store.append(made.id, "a", [item("msg_1", "new")])
            assert await store.item(made.id, "a", third["id"]) == third
            other = await store.create("a", [item("msg_1")], {})
            assert await ids(store, other.id) == ["msg_1"]

    asynchronous(test)


def test_tenants_are_walls(tmp_path: Path) -> None:
    async def test() -> None:
        async with conversations_in(tmp_path) as store:
            made = await store.create("a", [item("msg_1")], {})

            async def tries(id: str) -> list[Any]:
                return [
                    (await refused(each)).openai()
                    for each in (
                        store.get(id, "b"),
                        store.update(id, "b", {}),
                        store.delete(id, "b"),
                        store.append(id, "b", [item("msg_2")]),
                        store.first_items(id, "b", 1),
                        store.items(id, "b"),
                        store.item(id, "b", "msg_1"),
                        store.delete_item(id, "b", "msg_1"),
                    )
                ]

            assert await tries(made.id) == await tries("conv_unknown")
            assert await ids(store, made.id) == ["msg_1"]

    asynchronous(test)


def test_pages_go_both_ways(tmp_path: Path) -> None:
    async def test() -> None:
        async with conversations_in(tmp_path) as store:
            made = await store.create("a", [item(f"msg_{n}") for n in range(5)], {})

            async def page(**query: Any) -> tuple[str, bool]:
                found = await store.items(made.id, "a", **query)
                return "".join(each["id"][-1] for each in found.data), found.has_more

            assert await page() == ("43210", False)
            assert await page(limit=2) == ("43", True)
            assert await page(limit=2, after="msg_3") == ("21", True)
            assert await page(order="asc", after="msg_2") == ("34", False)
            for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_9"}):
                assert (await refused(store.items(made.id, "a", **query))).status == 400

    asynchronous(test)


def test_a_conversation_expires_after_its_last_change(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with conversations_in(tmp_path, clock=clock, hours=1.0) as store:
            used, unused = await store.create("a", [], {}), await store.create("a", [item("msg_1")], {})
            clock.now += 3000
            await store.append(used.id, "a", [item("msg_1")])
            clock.now += 3000
            assert (await refused(store.get(unused.id, "a"))).status == 404
            assert await ids(store, used.id) == ["msg_1"]
            assert await store.sweep() == 1
            clock.now += 3000
            assert await store.sweep() == 1
            left = await store._db.run(
                lambda connection: connection.execute("SELECT COUNT(*) FROM conversation_items").fetchone()
            )
            assert left == (0,)

    asynchronous(test)


def test_the_number_is_bounded_and_no_tenant_evicts_another(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock()
        async with conversations_in(tmp_path, clock=clock, count=4) as store:
            own = await store.create("a", [], {})
            theirs = []
            for _ in range(3):
                clock.now += 1
                theirs.append(await store.create("b", [], {}))
            clock.now += 1
            await store.append(theirs[0].id, "b", [item("msg_1")])
            await store.create("b", [], {})
            assert (await refused(store.get(theirs[1].id, "b"))).status == 404  # the least recently changed of b
            assert (await store.get(theirs[0].id, "b")).id == theirs[0].id
            assert (await store.get(own.id, "a")).id == own.id

    asynchronous(test)


def test_the_bytes_are_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        async with conversations_in(tmp_path, total_bytes=10_000, own_bytes=10_500) as store:
            own = await store.create("a", [item("msg_1", "x" * 2000)], {})
            theirs = [await store.create("b", [item("msg_1", "x" * 3000)], {}) for _ in range(2)]
            await store.append(theirs[1].id, "b", [item("msg_2", "x" * 3000)])
            assert (await refused(store.get(theirs[0].id, "b"))).status == 404
            assert await ids(store, own.id) == ["msg_1"]
            for bytes in (9_000, 20_000):  # beyond the bound of one, and of all
                error = await refused(store.append(own.id, "a", [item("msg_2", "x" * bytes)]))
                assert (error.status, error.code) == (413, "conversation_too_large")
            assert await ids(store, own.id) == ["msg_1"]  # what does not fit changes nothing
            assert await ids(store, theirs[1].id, "b") == ["msg_1", "msg_2"]

    asynchronous(test)
