"""Collections are filled and searched: updates, duplicates, tenants, restarts and kills."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.pipelines.collections.document_intake import GivenDocument
from tests.support.stores.fake_encoders import WordEncoder
from tests.support.stores.tiny_collections import ANNA, BERT, Shelf, shelf

FERRY = "The ferry to the island leaves from the northern harbour every second hour in summer."
BREAD = "Sourdough bread needs a starter, flour, water, salt and a long cold rest."
GLACIER = "A glacier is a slow river of ice that carves valleys out of mountains."


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def test_documents_are_found_by_words_and_by_meaning(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY, BREAD, GLACIER, source="notes.txt")
            await notes.indexed()
            for mode in ("hybrid", "keyword", "vector"):
                found = await notes.find("ferry harbour island", mode=mode, k=2)
                assert found.hits[0].document == "0"
                assert found.hits[0].text == FERRY
                assert found.skipped == {}
            best = (await notes.find("ferry harbour island")).hits[0]
            assert set(best.scores) == {"keyword", "vector"}
            assert best.score == pytest.approx(1.0)  # first in both
            assert best.source == "notes.txt"

    run(it())


def test_a_document_is_found_once_all_of_it_is_embedded(tmp_path: Path) -> None:
    async def it() -> None:
        encoder = WordEncoder()
        encoder.held = asyncio.Event()
        async with shelf(tmp_path, encoder) as notes:
            (added,) = await notes.add(FERRY)
            assert (added.record.state, added.unchanged) == ("pending", False)
            assert await notes.documents("ferry", mode="keyword") == []
            encoder.held.set()
            await notes.indexed()
            assert await notes.documents("ferry", mode="keyword") == ["0"]
            assert (await notes.collections.document("anna", "notes", "0")).state == "ready"
            assert ("anna", "anna-key") in encoder.callers

    run(it())


def test_an_update_serves_the_old_text_until_the_new_one_is_ready(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY)
            await notes.indexed()
            version = (await notes.collections.find("anna", "notes")).version
            notes.encoder.held = asyncio.Event()
            await notes.add(BREAD)
            assert await notes.documents("ferry", mode="keyword") == ["0"]
            notes.encoder.held.set()
            await notes.indexed()
            assert await notes.documents("ferry", mode="keyword") == []
            assert [hit.text for hit in (await notes.find("sourdough")).hits] == [BREAD]
            assert (await notes.collections.find("anna", "notes")).version > version

    run(it())


def test_an_unchanged_document_costs_nothing_and_changed_ones_embed_only_what_is_new(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, chunk_tokens=32, overlap_tokens=0) as notes:
            text = f"# One\n{FERRY}\n\n# Two\n{BREAD}\n\n# Three\n{GLACIER}\n"
            await notes.add(text, type="markdown")
            await notes.indexed()
            assert len(notes.encoder.embedded) == 3
            (again,) = await notes.add(text, type="markdown")
            assert again.unchanged
            await notes.add(text.replace("salt", "rye"), type="markdown")
            await notes.indexed()
            assert len(notes.encoder.embedded) == 4
            assert "rye" in notes.encoder.embedded[3]
            stats = await notes.collections.stats(await notes.collections.find("anna", "notes"))
            assert (stats.ready, stats.chunks, stats.embedded) == (1, 3, 3)

    run(it())


def test_near_duplicates_are_indexed_once_and_take_over_when_the_first_goes(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            long = " ".join(f"word{number}" for number in range(120))
            added = await notes.add(long, long + " end", BREAD)
            assert [each.record.duplicates for each in added] == [0, 1, 0]
            await notes.indexed()
            assert len(notes.encoder.embedded) == 2
            assert await notes.documents("word7 word8", mode="keyword") == ["0"]
            await notes.collections.delete_document("anna", "notes", "0")
            await notes.indexed()
            assert await notes.documents("word7 word8", mode="keyword") == ["1"]
            assert await notes.documents("word7 word8", mode="vector", k=1) == ["1"]

    run(it())


def test_duplicates_with_other_metadata_stay_apart_for_filters(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY, id="a", metadata={"team": "a", "year": 2019})
            await notes.add(FERRY, id="b", metadata={"team": "b", "year": 2024})
            await notes.indexed()
            for mode in ("hybrid", "keyword", "vector"):
                find = lambda filters, mode=mode: notes.documents("ferry", filters=filters, mode=mode)  # noqa: E731
                assert await find({"team": "b"}) == ["b"]
                assert await find({"year": {"gte": 2019, "lt": 2024}}) == ["a"]
                assert sorted(await find({"team": {"in": ["a", "b"]}})) == ["a", "b"]
                assert await find({"team": "c"}) == []
                assert await find({"other": {"exists": True}}) == []

    run(it())


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY)
            await notes.indexed()
            collections = notes.collections
            calls = [
                collections.find("bert", "notes"),
                collections.document("bert", "notes", "0"),
                collections.delete("bert", "notes"),
                collections.delete_document("bert", "notes", "0"),
                collections.add(BERT, "notes", [GivenDocument(text="x")]),
                collections.open(BERT, "notes"),
            ]
            for call in calls:
                with pytest.raises(ApiError) as caught:
                    await call
                assert caught.value.code == "collection_not_found"
            assert (await collections.list("bert")).data == []
            with pytest.raises(ApiError):
                await (await collections.open(ANNA, "notes")).search("ferry", tenant="bert")
            await collections.create(BERT, "notes")  # a name of his own
            assert await notes.documents("ferry", caller=BERT) == []
            assert (await (await collections.open(ANNA, "notes")).search("ferry", tenant="anna")).hits

    run(it())


def test_a_deleted_collection_is_gone_at_once_and_its_name_is_free(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY)
            await notes.indexed()
            await notes.collections.delete("anna", "notes")
            with pytest.raises(ApiError):
                await notes.collections.find("anna", "notes")
            await notes.collections.create(ANNA, "notes")
            assert await notes.documents("ferry") == []

    run(it())


def test_a_restarted_server_finds_everything_without_embedding_again(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY, BREAD)
            await notes.indexed()
        async with shelf(tmp_path, create=False) as notes:
            await notes.indexed()
            assert await notes.documents("ferry harbour", mode="vector", k=1) == ["0"]
            assert notes.encoder.embedded == []

    run(it())


def test_a_graph_is_kept_over_a_restart_and_made_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("usearch")

    async def it() -> None:
        async with shelf(tmp_path, exact=2) as notes:
            await notes.add(FERRY, BREAD, GLACIER)
            await notes.indexed()
            assert await notes.documents("ferry harbour", mode="vector", k=1) == ["0"]
        assert len(list((tmp_path / "collections").glob("*.graph"))) == 1
        async with shelf(tmp_path, create=False, exact=2) as notes:
            # While nothing is loaded: neither is in the graph's file.
            await notes.add("Bees dance to tell where flowers are.", id="3")
            await notes.collections.delete_document("anna", "notes", "0")
            await notes.indexed()
            assert await notes.documents("bees flowers", mode="vector", k=1) == ["3"]
            assert "0" not in await notes.documents("ferry harbour", mode="vector")

    run(it())


def test_a_search_that_leaves_while_vectors_are_loaded_does_not_stop_the_loading(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY, BREAD)
            await notes.indexed()
        async with shelf(tmp_path, create=False) as notes:
            hurried = await notes.find("ferry harbour", mode="vector", deadline_s=0.0)
            assert hurried.skipped == {"vector": "deadline"}
            index = next(iter(notes.collections._indexes.values()))
            task = asyncio.create_task(index.load())
            await asyncio.sleep(0)
            task.cancel()
            await index.load()
            assert len(index) == 2
            assert await notes.documents("ferry harbour", mode="vector", k=1) == ["0"]

    run(it())


def test_another_encoder_makes_all_vectors_again(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            await notes.add(FERRY, BREAD)
            await notes.indexed()
            notes.encoder = WordEncoder("other")
            found = await notes.find("ferry")
            assert found.skipped == {"vector": "reindexing"}
            assert [hit.document for hit in found.hits] == ["0"]
            await notes.collections.check_encoders()
            await notes.indexed()
            assert len(notes.encoder.embedded) == 2
            assert (await notes.find("ferry")).skipped == {}

    run(it())


def test_a_busy_encoder_is_asked_again_and_an_error_in_a_text_fails_its_document(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path) as notes:
            notes.encoder.error = ApiError("This text cannot be read.")
            await notes.add(FERRY)
            await notes.indexed()
            record = await notes.collections.document("anna", "notes", "0")
            assert (record.state, record.error, record.chunks) == ("failed", "This text cannot be read.", 0)
            notes.encoder.error = ApiError("Busy.", kind="overloaded_error", retry_after=0.0)
            await notes.add(FERRY)
            await asyncio.sleep(0)
            assert (await notes.collections.document("anna", "notes", "0")).state == "pending"
            notes.encoder.error = None
            await notes.indexed()
            assert (await notes.collections.document("anna", "notes", "0")).state == "ready"

    run(it())


def test_a_collection_without_a_model_is_searched_by_keyword(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, create=False) as notes:
            await notes.collections.create(ANNA, "notes", mode="keyword")
            (added,) = await notes.add(FERRY)
            assert added.record.state == "ready"
            assert await notes.documents("harbour") == ["0"]
            assert notes.encoder.embedded == []
            with pytest.raises(ApiError, match="has no model"):
                await notes.find("harbour", mode="vector")

    run(it())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"text": ""}, "has no text"),
        ({"text": "a", "url": "http://example.com"}, "one of 'text'"),
        ({"url": "http://example.com"}, "fetches no URLs"),
        ({"text": "a", "type": "docx"}, "Unknown document type"),
        ({"text": "a", "id": "a b"}, "printable ASCII"),
        ({"text": "a", "metadata": {"a": [1]}}, "must be a text"),
        ({"text": "a", "metadata": {'"': 1}}, "Invalid key"),
        ({"text": "a" * 2000}, "longer than 1000 bytes"),
        ({"content": b"%PDF-1.7 damaged"}, "PDF"),
    ],
)
def test_an_invalid_document_is_rejected(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    async def it() -> None:
        async with shelf(tmp_path, document_bytes=1000) as notes:
            await notes.collections.add(ANNA, "notes", [GivenDocument(**given)])

    with pytest.raises(ApiError, match=reason):
        run(it())


def test_collections_and_chunks_are_bounded(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, collections=1, chunks=1, documents=2) as notes:
            with pytest.raises(ApiError, match="at most 1"):
                await notes.collections.create(ANNA, "more")
            await notes.add(FERRY)
            with pytest.raises(ApiError, match=r"collections\.chunks"):
                await notes.add(BREAD, id="2")
            with pytest.raises(ApiError, match="at most 2"):
                await notes.add("a", "b", "c")

    run(it())


_CHILD = """
import asyncio, sys
from pathlib import Path
from tests.support.stores.tiny_collections import Shelf, shelf
from tests.support.stores.fake_encoders import WordEncoder

class Slow(WordEncoder):
    async def embed(self, texts, caller, purpose):
        rows = await super().embed(texts, caller, purpose)
        print(len(self.embedded), flush=True)  # the batches before this one are committed
        if len(self.embedded) > 128:
            await asyncio.Event().wait()
        return rows

async def main():
    async with shelf(Path(sys.argv[1]), Slow(), chunk_tokens=32, overlap_tokens=0) as notes:
        for number in range(40):
            text = "\\n\\n".join(f"# Part {part}\\n" + " ".join(f"w{number}x{part}x{i}" for i in range(20))
                               for part in range(8))
            await notes.add(text, id=str(number), type="markdown")
            print("added", number, flush=True)
        await notes.indexed()

asyncio.run(main())
"""


def test_sigkill_while_embedding_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    added, embedded, committed = set[str](), 0, 0
    for line in child.stdout:
        if line.startswith("added"):
            added.add(line.split()[1])
        else:
            committed, embedded = embedded, int(line)
        if embedded > 128 and len(added) == 40:
            break
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

    async def it() -> None:
        async with shelf(tmp_path, create=False, chunk_tokens=32, overlap_tokens=0) as notes:
            await notes.indexed()
            stats = await notes.collections.stats(await notes.collections.find("anna", "notes"))
            assert (stats.ready, stats.pending, stats.chunks, stats.embedded) == (40, 0, 320, 320)
            assert len(notes.encoder.embedded) == 320 - committed
            for number in (0, 21, 39):
                assert await notes.documents(f"w{number}x3x7", mode="keyword") == [str(number)]

    run(it())


async def both_ways(notes: Shelf, query: str, **options: Any) -> list[list[tuple[str, float]]]:
    """Documents with keyword scores: by FTS5 itself, and by the scores of words."""
    ways: list[list[tuple[str, float]]] = []
    for least in (10**9, 1):
        notes.collections.keywords.least_chunks = least
        found = await notes.find(query, mode="keyword", k=50, **options)
        ways.append([(hit.document, round(hit.scores["keyword"], 4)) for hit in found.hits])
    return ways


def test_scores_of_words_find_what_full_text_search_finds(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, create=False) as notes:
            await notes.collections.create(ANNA, "notes", mode="keyword")
            for number in range(40):
                extra = "harbour " * (number % 4) + ("max_tokens" if number % 7 == 0 else "limit")
                language = {"lang": "en" if number % 2 else "de"}
                await notes.add(
                    f"# Page {number}\n\nFerries leave {extra} n{number}", id=str(number), metadata=language
                )
            queries = ("ferries", "harbour max_tokens", "page harbour limit n3", "ferry leaving", "absent", "n7")
            for query in queries:
                whole, added = await both_ways(notes, query)
                assert added == whole
                assert whole or query == "absent"
            whole, added = await both_ways(notes, "harbour limit", filters={"lang": "en"})
            assert added == whole
            assert {int(id) % 2 for id, _ in added} == {1}

    run(it())


def test_scores_of_words_follow_a_collection_that_changes(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, create=False) as notes:
            await notes.collections.create(ANNA, "notes", mode="keyword")
            await notes.add(*(f"ferry number n{number}" for number in range(60)))
            await both_ways(notes, "ferry number")
            keywords = notes.collections.keywords
            held = keywords.bytes
            assert held > 0
            await notes.add("ferry number ferry", id="new")
            await notes.add("bread with salt", id="5")
            await notes.collections.delete_document("anna", "notes", "6")
            whole, added = await both_ways(notes, "ferry")
            assert added[0][0] == "new"
            assert {id for id, _ in added} == {id for id, _ in whole}
            assert not {"5", "6"} & {id for id, _ in added}
            await notes.add(*(f"ferry again n{number}" for number in range(100, 120)), name="notes")
            whole, added = await both_ways(notes, "ferry again")
            assert added == whole  # it has grown by so much that all scores were read again
            await notes.collections.delete("anna", "notes")
            assert keywords.bytes == 0

    run(it())


def test_scores_of_words_stay_within_their_bound(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, create=False, keyword_bytes=3000) as notes:
            await notes.collections.create(ANNA, "notes", mode="keyword")
            await notes.add(*(f"ferry harbour bread salt n{number}" for number in range(60)))
            for word in ("ferry", "harbour", "bread", "salt", "n7"):
                whole, added = await both_ways(notes, word)
                assert added == whole
                assert 0 < notes.collections.keywords.bytes <= 3000

    run(it())


def test_the_listing_pages_through_documents(tmp_path: Path) -> None:
    async def it() -> None:
        async with shelf(tmp_path, now=lambda: 1_700_000_000.0) as notes:
            await notes.add(FERRY, BREAD, GLACIER)
            await notes.indexed()
            first = await notes.collections.list_documents("anna", "notes", limit=2, order="asc")
            rest = await notes.collections.list_documents("anna", "notes", limit=2, order="asc", after="1")
            assert [each.id for each in first.data] == ["0", "1"]
            assert first.has_more
            assert [each.id for each in rest.data] == ["2"]
            assert not rest.has_more
            assert json.loads(json.dumps(rest.data[0].as_json()))["created_at"] == 1_700_000_000
            failed = await notes.collections.list_documents("anna", "notes", status="failed")
            assert failed.data == []

    run(it())
