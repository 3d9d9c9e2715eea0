"""Documents that come together are stored together, and adding one takes the same work however many are there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.pipelines.collections.chunk_queries import count_keyword_chunks
from headrace.pipelines.collections.chunk_store import NewChunk, NewDocument, add_document
from headrace.pipelines.collections.collection_schema import STEPS
from headrace.pipelines.collections.collection_store import create_collection
from headrace.pipelines.collections.document_intake import GivenDocument
from headrace.pipelines.collections.records import CollectionRecord
from tests.support.running_server import asynchronous
from tests.support.stores.tiny_collections import ANNA, shelf

STEP: Final = 100  # virtual machine instructions between two calls of the progress handler
NOTES: Final = CollectionRecord(
    seq=0, tenant="anna", name="notes", uid="u", model="", chunk_tokens=100, overlap_tokens=0, recall="fast"
)


@asynchronous
async def test_documents_of_one_request_share_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = Database.run

    async def counted(self: Database, function: Any) -> Any:
        ran.append(getattr(function, "func", function).__name__)
        return await run(self, function)

    async with shelf(tmp_path) as notes:
        monkeypatch.setattr(Database, "run", counted)
        added = await notes.add(*(f"Text number {number}." for number in range(70)))
        monkeypatch.undo()
        assert [each.record.id for each in added] == [str(number) for number in range(70)]
        assert ran.count("add_documents") == 3
        await notes.indexed()
        record = await notes.collections.find("anna", "notes")
        assert (await notes.collections.stats(record)).ready == 70


@asynchronous
async def test_documents_before_an_invalid_one_are_stored(tmp_path: Path) -> None:
    async with shelf(tmp_path, chunks=3) as notes:
        given = [
            GivenDocument(id="a", text="One."),
            GivenDocument(id="b", text=" "),
            GivenDocument(id="c", text="Two."),
        ]
        with pytest.raises(ApiError, match=r"documents\[1\]"):
            await notes.collections.add(ANNA, "notes", given)
        assert (await notes.collections.document("anna", "notes", "a")).chunks == 1
        with pytest.raises(ApiError) as caught:
            await notes.add("Three.", "Four.", "Five.", "Six.")
        assert caught.value.code == "too_many_values"
        listed = await notes.collections.list_documents("anna", "notes")
        assert sorted(each.id for each in listed.data) == ["0", "1", "a"]


@asynchronous
async def test_a_document_given_twice_in_one_request_is_stored_once(tmp_path: Path) -> None:
    async with shelf(tmp_path) as notes:
        given = [GivenDocument(id="a", text="One."), GivenDocument(id="a", text="One.")]
        first, second = await notes.collections.add(ANNA, "notes", given)
        assert (first.unchanged, second.unchanged) == (False, True)


@asynchronous
async def test_removed_documents_make_room_for_others(tmp_path: Path) -> None:
    async with shelf(tmp_path, chunks=2) as notes:
        await notes.add("One.", "Two.")
        await notes.indexed()
        await notes.collections.delete_document("anna", "notes", "0")
        await notes.add("Three.", id="2")
        with pytest.raises(ApiError, match="Expected at most 2"):
            await notes.add("Four.", id="3")


def test_a_file_of_an_earlier_version_learns_its_number_of_chunks(tmp_path: Path) -> None:
    connection = made(STEPS[:1])
    insert(connection)
    for step in STEPS[1:]:
        connection.executescript(step)
    assert connection.execute("SELECT chunks FROM collections").fetchone() == (7,)


def test_adding_a_document_takes_the_same_work_among_many() -> None:
    connection = made(STEPS)
    record = create_collection(connection, NOTES, most=9)
    add = partial(add_document, connection, record, most_chunks=10_000)
    work = [steps_of(connection, partial(add, document(number))) for number in range(400)]
    assert sum(work[-50:]) < 1.5 * sum(work[:50])


def test_counting_the_chunks_of_a_search_takes_the_same_work_among_many() -> None:
    connection = made(STEPS)
    record = create_collection(connection, NOTES, most=9)
    work: list[int] = []
    for number in range(300):
        add_document(connection, record, document(number), most_chunks=10_000)
        work.append(steps_of(connection, partial(count_keyword_chunks, connection, record.seq)))
    assert count_keyword_chunks(connection, record.seq) == 300
    assert sum(work[-50:]) < 2 * sum(work[:50])


def steps_of(connection: sqlite3.Connection, call: Callable[[], Any]) -> int:
    """Return the virtual machine's instructions of a call, in units of STEP."""
    steps = [0]

    def count() -> None:
        steps[0] += 1

    connection.set_progress_handler(count, STEP)
    call()
    connection.set_progress_handler(None, STEP)
    return steps[0]


def made(steps: tuple[str, ...]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for step in steps:
        connection.executescript(step)
    return connection


def insert(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO collections (id, tenant, uid, model, chunk_tokens, overlap_tokens, recall, metadata, created_at) "
        "VALUES ('c', 't', 'u', '', 1, 1, 'fast', '{}', 1)"
    )
    for id, chunks in (("a", 3), ("b", 4)):
        connection.execute(
            "INSERT INTO documents (collection, id, source, title, metadata, digest, state, key, chunks, tokens, "
            "bytes, created_at) VALUES (1, ?, '', '', '{}', x'', 'ready', '', ?, 1, 1, 1)",
            (id, chunks),
        )


def document(number: int) -> NewDocument:
    text = f"Document {number} has words of its own."
    return NewDocument(
        id=str(number),
        source="",
        title="",
        metadata={},
        digest=bytes([number % 256, number // 256]),
        key="",
        bytes=len(text),
        tokens=8,
        created_at=1,
        chunks=[NewChunk("", text, str(number).encode(), [8 * number + band for band in range(8)])],
    )
