"""A program uses collections and pipelines without a socket; the docs assistant answers over HTTP too."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LocalGateway
from headrace.config import ConfigError
from headrace.gateway.api_errors import ApiError
from headrace.server.config_checks import load_config
from headrace.server.server import Server
from tests.support.models.minilm import minilm_folder
from tests.support.running_server import Client, until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "docs-assistant"
PAGES = {"cache-answers.md": 2500, "pin-prompts.md": 1500, "set-limits.md": 2500}  # with characters to index
QUESTION = "What does repeatable_only = false do with sampled answers?"
KEYWORDS = {
    "models": {"mini": {"options": {"threads": 1}}},
    "pipelines": {
        "notes": {
            "stages": ["search", "generate"],
            "search": {"collection": "notes"},
            "generate": {"order": ["extract", "large"], "extract_confidence": 0.2, "max_tokens": 8},
        }
    },
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the documentation."""
    folder = tmp_path_factory.mktemp("pages")
    for name, length in PAGES.items():
        text = (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")
        (folder / name).write_text(text[:length], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory, pages: Path) -> Iterator[LocalGateway]:
    """The example's configuration, with the pages indexed."""
    folder = tmp_path_factory.mktemp("assistant")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCODER", str(minilm_folder()))
        with LocalGateway(EXAMPLE / "headrace.toml", storage={"folder": str(folder)}) as gateway:
            stats = gateway.collection("docs").add([pages])
            assert (stats.ready, stats.embedded) == (3, stats.chunks)
            yield gateway


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    folder = tmp_path_factory.mktemp("notes")
    with LocalGateway(KEYWORDS, storage={"folder": str(folder)}) as gateway:
        gateway.collection("notes", mode="keyword").add(
            texts={"harbour.md": "# Ferries\n\nThe ferry to the island leaves from the northern harbour."}
        )
        yield gateway


def test_the_assistant_finds_the_page_and_cites_it(assistant: LocalGateway) -> None:
    answer = assistant.pipeline("docs").run(QUESTION, temperature=0)
    assert "sampled answers are kept" in answer.text
    cited = {each["number"] for each in answer.citations}
    assert cited
    assert {Path(each["source"]).name for each in answer.sources if each["number"] in cited} == {"cache-answers.md"}
    assert [each["stage"] for each in answer.report["stages"]] == ["search", "assemble", "generate", "check"]
    assert answer.report["answered_by"] == "extract"
    assert answer.finish == "stop"


def test_events_of_a_stream_bring_the_sources_first(assistant: LocalGateway) -> None:
    question = "How do I declare a pin for a system message?"
    events = list(assistant.pipeline("docs").stream(question, temperature=0))
    names = [each.name for each in events]
    assert names[0] == "started"
    assert names[-1] == "done"
    assert names.index("sources") < names.index("text")
    text = "".join(each.data["text"] for each in events if each.name == "text")
    assert text == assistant.pipeline("docs").run(question, temperature=0).text  # from the cache of answers
    assert "pin-prompts.md" in {Path(each["source"]).name for each in events[-1].data["sources"]}


def test_a_collection_is_searched_by_meaning_and_by_words(assistant: LocalGateway) -> None:
    docs = assistant.collection("docs")
    assert Path(docs.search("keep a prefix in memory for good", k=1)[0].source).name == "pin-prompts.md"
    assert Path(docs.search("x-ratelimit-limit-requests", k=1, mode="keyword")[0].source).name == "set-limits.md"


def test_the_program_of_the_example_prints_the_answer_and_its_pages(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENCODER", str(minilm_folder()))
    monkeypatch.chdir(tmp_path)  # the example keeps its data in the working folder
    spec = importlib.util.spec_from_file_location("assistant", EXAMPLE / "assistant.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.main(str(pages / "cache-answers.md"), QUESTION)
    printed = capsys.readouterr().out
    assert "sampled answers are kept" in printed
    assert "cache-answers.md" in printed


def test_the_configuration_alone_answers_over_http(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENCODER", str(minilm_folder()))
    flags = {"storage": {"folder": str(tmp_path)}, "server.port": 0}
    config = load_config(EXAMPLE / "headrace.toml", environ=os.environ, flags=flags)

    async def ask() -> None:
        made = Server(config)
        task = asyncio.create_task(made.run(signals=False))
        try:
            await until(lambda: made.context.is_ready or task.done())
            port = made.listening.getsockname()[1]
            client = Client(*await asyncio.open_connection("127.0.0.1", port, limit=1024 * 1024))
            documents = [{"text": (pages / name).read_text(encoding="utf-8"), "source": name} for name in PAGES]
            assert (await client.ask("POST", "/v1/collections", {"name": "docs"})).status == 200
            await client.ask("POST", "/v1/collections/docs/documents", {"documents": documents})
            await made.durable.collections.indexer.idle.wait()
            models = (await client.ask("GET", "/v1/models")).json["data"]
            assert "pipeline/docs" in [each["id"] for each in models]  # the playground offers these
            messages = [{"role": "user", "content": QUESTION}]
            body = {"model": "pipeline/docs", "messages": messages, "temperature": 0}
            answer = (await client.ask("POST", "/v1/chat/completions", body)).json
            assert "sampled answers are kept" in answer["choices"][0]["message"]["content"]
            own = answer["headrace"]  # what the playground shows
            assert own["citations"][0]["number"] in {each["number"] for each in own["sources"]}
            assert own["sources"][0]["source"] in PAGES
            client.leave()
        finally:
            made.end()
            await task

    asyncio.run(asyncio.wait_for(ask(), 120))


def test_a_mapping_is_a_configuration(notes: LocalGateway) -> None:
    assert notes.config.models["mini"].options["threads"] == 1
    answer = notes.pipeline("notes").run("From which harbour does the ferry to the island leave?")
    assert answer.text == "The ferry to the island leaves from the northern harbour. [1]"
    assert json.dumps(answer.usage)


def test_mistakes_are_named(notes: LocalGateway) -> None:
    with pytest.raises(ConfigError, match="servers"):
        LocalGateway({"servers": {}})
    with pytest.raises(ApiError, match="Unknown pipeline 'note'"):
        notes.pipeline("note")
    with pytest.raises(ApiError, match="max_token"):
        notes.pipeline("notes").run("Which harbour?", max_token=3)
    with pytest.raises(ApiError, match=r"'filters'|filters"):
        list(notes.pipeline("notes").stream("Which harbour?", filters={"lang": "en"}))


def test_leaving_a_stream_ends_the_run(notes: LocalGateway) -> None:
    stream = notes.pipeline("notes").stream("From which harbour does the ferry leave?")
    assert next(stream).name == "started"
    stream.close()  # type: ignore[attr-defined]

    async def settled() -> None:
        await until(lambda: notes.context.running == 0)

    notes.call(settled())


def test_collections_can_be_deleted_and_a_closed_gateway_says_so(tmp_path: Path) -> None:
    gateway = LocalGateway(KEYWORDS, storage={"folder": str(tmp_path)})
    gateway.collection("more", mode="keyword").delete()
    gateway.close()
    gateway.close()
    with pytest.raises(RuntimeError, match="closed"):
        gateway.collection("more")
