"""Entries on disk come back as they were, to their own tenant alone; a disk that fails costs a bounded wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.gateway.caches.semantic.semantic_entry import SemanticEntry, StoredAnswer
from headrace.gateway.caches.semantic.semantic_store import SemanticStore, StoredEntry
from headrace.gateway.caches.semantic.thresholds import Evidence, Thresholds
from headrace.gateway.database import Database
from tests.support.file_storage import asynchronous


def row(
    id: int, *, question: str = "How do I log in?", expires: float = 100.0, evidence: Evidence | None = None
) -> StoredEntry:
    vector = np.arange(8, dtype=np.float32) + id
    entry = SemanticEntry(
        id, b"digest", question, StoredAnswer("So.", "Because."), frozenset({"docs", "v2"}), float(id), expires, hits=id
    )
    if evidence is not None:
        entry.evidence = evidence
    return StoredEntry(entry, vector)


def test_what_is_saved_comes_back_in_order_and_as_it_was(tmp_path: Path) -> None:
    evidence = Evidence()
    Thresholds().learn(evidence, 0.9, True)

    async def test() -> None:
        db = Database(tmp_path)
        store = SemanticStore(db, wait_s=10.0)
        assert await store.save("a", "encoder", [row(2), row(1, evidence=evidence), row(3, expires=5.0)])
        rows, last = await store.load("a", "encoder", now=10.0, most=10)
        assert last == 3
        assert [each.entry.id for each in rows] == [1, 2]
        first, second = rows
        assert second.entry == row(2).entry
        assert first.entry.evidence.right == 1
        assert first.vector.tolist() == row(1).vector.tolist()
        assert [each.entry.id for each in (await store.load("a", "encoder", now=10.0, most=1))[0]] == [2]
        await db.close()

    asynchronous(test)


def test_another_tenant_and_another_encoder_see_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        store = SemanticStore(db, wait_s=10.0)
        await store.save("a", "encoder", [row(1)])
        await store.save("b", "encoder", [row(1, question="Another tenant's")])
        assert await store.load("c", "encoder", now=0.0, most=10) == ([], 0)
        assert await store.load("a", "other", now=0.0, most=10) == ([], 1)
        await store.remove("a", [1])
        assert (await store.load("b", "encoder", now=0.0, most=10))[0][0].entry.question == "Another tenant's"
        await store.invalidate("b", "docs")
        assert await store.load("b", "encoder", now=0.0, most=10) == ([], 0)
        await db.close()

    asynchronous(test)


def test_hits_and_evidence_are_noted_and_what_expired_is_swept(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        store = SemanticStore(db, wait_s=10.0)
        await store.save("a", "encoder", [row(1), row(2, expires=5.0)])
        changed = row(1).entry
        changed.hits = 9
        changed.evidence.asked = 4
        await store.note("a", [changed])
        await store.sweep(50.0)
        rows, last = await store.load("a", "encoder", now=0.0, most=10)
        assert [(each.entry.hits, each.entry.evidence.asked) for each in rows] == [(9, 4)]
        assert last == 1
        await db.close()

    asynchronous(test)


def test_a_broken_row_is_left_out(tmp_path: Path) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        store = SemanticStore(db, wait_s=10.0)
        await store.save("a", "encoder", [row(1), row(2)])
        await db.run(lambda connection: connection.execute("UPDATE semantic_entries SET answer = 'no' WHERE id = 1"))
        assert [each.entry.id for each in (await store.load("a", "encoder", now=0.0, most=10))[0]] == [2]
        await db.close()

    asynchronous(test)


def test_a_disk_that_fails_or_hangs_costs_a_bounded_wait_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        db = Database(tmp_path)
        store = SemanticStore(db, wait_s=10.0)
        await store.open()
        slow = SemanticStore(db, wait_s=0.02)
        await slow.open()
        hanging = asyncio.ensure_future(db.run(lambda _: time.sleep(0.3)))
        await asyncio.sleep(0)
        assert not await slow.save("a", "encoder", [row(1)])
        assert slow.lost == 1
        await hanging
        await db.close()
        assert not await store.save("a", "encoder", [row(2)])
        assert store.lost == 1

    asynchronous(test)
    assert "cannot write" in caplog.text
