"""Pipelines over HTTP: their own endpoint, the chat endpoint, the list of models, and interruption."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.config import Config, KeyConfig, LogConfig, ServerConfig, StorageConfig, TenantConfig
from headrace.config.pipeline_section import PipelineConfig, SearchStage
from headrace.pipelines.pipelines import Pipelines
from tests.support.clock import Clock
from tests.support.pipeline_runs import FakeCollection
from tests.support.running_server import Answer, Running, asynchronous, request, say, serving, until, words

STAGES: Any = ("search", "assemble", "generate", "check")
DOCS = PipelineConfig(stages=STAGES, description="Answers about the server.", search=SearchStage(budget_ms=2000.0))
CHAT: dict[str, Any] = {"model": "pipeline/docs", "messages": [{"role": "user", "content": "Which port?"}]}


@asynccontextmanager
async def piped(folder: Path, config: PipelineConfig = DOCS, **more: Any) -> AsyncIterator[Running]:
    whole = Config(
        server=ServerConfig(port=0),
        storage=StorageConfig(folder=str(folder)),
        log=LogConfig(requests=False),
        pipelines={"docs": config},
        **more,
    )
    async with serving(config=whole) as running:
        pipelines = running.server.services.pipelines
        assert isinstance(pipelines, Pipelines)
        pipelines.services.retriever = FakeCollection(Clock())
        running.engine.answer = words("Port ", "8000 ", "[1].")
        yield running


def named_events(answer: Answer) -> list[tuple[str, Any]]:
    blocks = [block.split("\n", 1) for block in answer.body.decode().split("\n\n")[:-1]]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


@asynchronous
async def test_a_pipeline_samples_only_if_the_request_says_so(tmp_path: Path) -> None:
    question = {"input": "Which port?"}
    async with piped(tmp_path) as running:
        for path, body, expected in (
            ("/v1/pipelines/docs", question, 0.0),
            ("/v1/pipelines/docs", {**question, "temperature": 0.7}, 0.7),
            ("/v1/chat/completions", CHAT, 0.0),
            ("/v1/chat/completions", {**CHAT, "temperature": 0.7}, 0.7),
            ("/v1/chat/completions", {**CHAT, "model": "mini"}, 1.0),
        ):
            answer = await running.ask("POST", path, body)
            assert answer.status == 200, answer.json
            assert running.engine.streams[-1].request.sampling.temperature == expected


def test_a_pipeline_answers_with_sources_citations_and_its_stages(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            answer = await running.ask("POST", "/v1/pipelines/docs", {"input": "Which port?"})
            body = answer.json
            assert answer.status == 200, body
            assert body["object"] == "pipeline.answer"
            assert (body["pipeline"], body["answer"], body["finish_reason"]) == ("docs", "Port 8000 [1].", "stop")
            assert [each["id"] for each in body["sources"]] == ["c1", "c2", "c3"]
            assert body["citations"][0]["id"] == "c1"
            assert body["usage"]["completion_tokens"] > 0
            assert [each["stage"] for each in body["headrace"]["pipeline"]["stages"]] == list(STAGES)
            assert {"search", "assemble", "check", "decode"} <= set(body["headrace"]["stages_ms"])
            timing = answer.headers["server-timing"]
            assert all(f"{stage};dur=" in timing for stage in ("search", "assemble", "check"))
            assert answer.headers["x-headrace-run"] in body["id"]

    it()


def test_the_stages_are_spans_of_the_requests_trace(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            run = (await running.ask("POST", "/v1/pipelines/docs", {"input": "Which port?"})).headers["x-headrace-run"]
            trace = (await running.ask("GET", f"/v1/requests/{run}")).json
            spans = [span["name"] for span in trace["spans"]]
            assert {"search", "assemble", "prefill", "decode", "check"} <= set(spans)
            assert trace["fields"]["pipeline"] == "docs"

    it()


def test_events_tell_the_sources_before_the_text(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            answer = await running.ask("POST", "/v1/pipelines/docs", {"input": "Which port?", "stream": True})
            events = named_events(answer)
            names = [name for name, _ in events if name != "progress"]
            assert names == ["started", "sources", "text", "text", "text", "citation", "done"]
            assert "".join(data["text"] for name, data in events if name == "text") == "Port 8000 [1]."
            assert events[-1][1]["headrace"]["pipeline"]["skipped"] == []

    it()


def test_an_openai_client_uses_a_pipeline_as_a_model(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            body = (await running.ask("POST", "/v1/chat/completions", CHAT)).json
            assert body["model"] == "pipeline/docs"
            assert body["choices"][0]["message"]["content"] == "Port 8000 [1]."
            assert body["headrace"]["sources"][0]["id"] == "c1"
            streamed = await running.ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
            assert streamed.text == "Port 8000 [1]."
            told = [next(iter(event["headrace"])) for event in streamed.events if "headrace" in event]
            assert [name for name in told if name != "progress"] == ["sources", "citation"]
            texts = [bool(event["choices"][0]["delta"].get("content")) for event in streamed.events]
            sources = ["sources" in event.get("headrace", {}) for event in streamed.events]
            assert sources.index(True) < texts.index(True)

    it()


def test_anthropics_clients_get_the_text(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            asked = CHAT | {"max_tokens": 50}
            body = (await running.ask("POST", "/v1/messages", asked)).json
            assert body["content"][0]["text"] == "Port 8000 [1]."
            streamed = await running.ask("POST", "/v1/messages", asked | {"stream": True})
            assert b"8000" in streamed.body

    it()


def test_pipelines_are_listed_with_their_budgets_and_as_models(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            listed = (await running.ask("GET", "/v1/pipelines")).json["data"]
            assert [(each["id"], each["model"]) for each in listed] == [("docs", "pipeline/docs")]
            assert listed[0]["stages"][0] == {"stage": "search", "budget_ms": 2000.0, "late": "skip"}
            models = (await running.ask("GET", "/v1/models")).json["data"]
            assert [each["id"] for each in models] == ["mini", "pipeline/docs"]

    it()


def test_mistakes_name_the_parameter(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            unknown = await running.ask("POST", "/v1/pipelines/other", {"input": "x"})
            assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
            neither = await running.ask("POST", "/v1/pipelines/docs", {})
            assert (neither.status, neither.error["param"]) == (400, "input")
            stray = await running.ask(
                "POST", "/v1/chat/completions", CHAT | {"model": "mini", "pipeline": {"detail": True}}
            )
            assert (stray.status, stray.error["param"]) == (400, "pipeline")

    it()


def test_a_run_is_interrupted_from_another_connection(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        config = PipelineConfig(stages=("generate",), sentences=True)
        async with piped(tmp_path, config) as running:
            running.engine.answer = None
            client = await running.client()
            await client.send(request("POST", "/v1/pipelines/docs", {"input": "Which port?", "stream": True}))
            await until(lambda: bool(running.engine.streams))
            stream = running.engine.streams[0]
            say(stream, "It is port 8000. ")
            say(stream, "You can ")
            status, headers = await client.head()
            assert status == 200
            seen = b""
            while b"event: sentence" not in seen:
                seen += await client.chunk()
            path = f"/v1/pipelines/runs/{headers['x-headrace-run']}/interrupt"
            told = (await running.ask("POST", path, {"spoken": 1})).json
            assert told["heard"] == "It is port 8000."
            while chunk := await client.chunk():
                seen += chunk
            assert b"event: interrupted" in seen
            assert b"event: done" in seen
            assert running.engine.dropped == [stream]  # its slot is free
            gone = await running.ask("POST", path)
            assert (gone.status, gone.error["code"]) == (404, "run_not_found")

    it()


def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        async with piped(tmp_path) as running:
            running.engine.answer = None
            client = await running.client()
            await client.send(request("POST", "/v1/pipelines/docs", {"input": "Which port?", "stream": True}))
            await until(lambda: bool(running.engine.streams))
            client.leave()
            await until(lambda: bool(running.engine.dropped))

    it()


def test_every_model_call_belongs_to_the_tenant(tmp_path: Path) -> None:
    @asynchronous
    async def it() -> None:
        keys = (KeyConfig(name="k", key="sk-1", tenant="acme"),)
        config = PipelineConfig(stages=("generate",), followups=1)
        async with piped(tmp_path, config, keys=keys, tenants={"acme": TenantConfig()}) as running:
            running.engine.answer = words('["Why?"]')
            answer = await running.ask(
                "POST", "/v1/pipelines/docs", {"input": "Which port?"}, authorization="Bearer sk-1"
            )
            assert answer.json["followups"] == ["Why?"]
            assert [stream.request.tenant for stream in running.engine.streams] == ["acme", "acme"]

    it()
