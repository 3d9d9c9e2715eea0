"""The endpoints of Ollama's API on a running server: the same flow, keys, limits and errors as every other dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest

from headrace.config import KeyConfig, LimitSet, ModelConfig, RequestLimits, TenantConfig
from headrace.config.upstream_section import UpstreamConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.output_stream import OutputStream
from headrace.errors import HeadraceError
from headrace.gateway.output.tool_formats import detect_tool_format
from headrace.gateway.serving.served_variant import ModelDescription
from headrace.gateway.serving.variant_engines import served_by_upstream
from headrace.gateway.upstreams.upstream import Upstream
from tests.support.limited_server import Serving, bearer, key, served
from tests.support.running_server import Answer, asynchronous, fails, request, say, serving, until, words

ASK: dict[str, Any] = {"model": "mini:latest", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"model": "mini", "prompt": "Hello"}


def lines(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.body.splitlines()]


@asynchronous
async def test_a_chat_streams_lines_by_default() -> None:
    async with serving() as running:
        running.engine.answer = words("one ", "two")
        answer = await running.ask("POST", "/api/chat", ASK)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
        assert [line["message"]["content"] for line in lines(answer)] == ["one ", "two", ""]
        assert [line["done"] for line in lines(answer)] == [False, False, True]


@asynchronous
async def test_without_a_stream_the_answer_is_one_object() -> None:
    async with serving() as running:
        running.engine.answer = words("one ", "two")
        answer = await running.ask("POST", "/api/chat", ASK | {"stream": False})
        assert answer.headers["content-type"] == "application/json"
        assert "server-timing" in answer.headers
        assert answer.json["message"]["content"] == "one two"
        assert answer.json["eval_count"] == 2


@asynchronous
async def test_ollamas_package_calls_tools_and_sends_their_results() -> None:
    async with serving() as running:
        mini = running.fleet.served["mini"]
        template = mini.tokenizer.tool_template
        mini.tools = detect_tool_format(None if template is None else template.source, mini.tokenizer)
        call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
        running.engine.answer = words(call[:20], call[20:40], call[40:], "")
        question = {"role": "user", "content": "How is Oslo?"}

        def get_weather(city: str) -> str:
            """Get the weather.

            Args:
              city: The city.
            """
            return f"7 degrees in {city}"

        client = ollama.AsyncClient(running.server.url)
        whole = await client.chat("mini", [question], tools=[get_weather])
        parts = [part async for part in await client.chat("mini", [question], tools=[get_weather], stream=True)]
        assert whole.message.tool_calls is not None
        (asked,) = whole.message.tool_calls
        assert (asked.function.name, asked.function.arguments) == ("get_weather", {"city": "Oslo"})
        assert [call for part in parts for call in part.message.tool_calls or ()] == [asked]
        assert (whole.done_reason, parts[-1].done_reason) == ("stop", "stop")
        running.engine.answer = words("Fine.")
        result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**asked.function.arguments)}
        after = await client.chat("mini", [question, whole.message, result], tools=[get_weather])
        assert after.message.content == "Fine."
        prompt = mini.tokenizer.decode(running.engine.streams[-1].request.prompt, skip_special_tokens=False)
        assert call in prompt
        assert "7 degrees in Oslo" in prompt
        await client.close()


@asynchronous
async def test_a_conversation_goes_on_with_its_context() -> None:
    async with serving() as running:
        running.engine.answer = words("Hi")
        first = await running.ask("POST", "/api/generate", PROMPT | {"stream": False, "system": "Be brief."})
        assert first.json["response"] == "Hi"
        again = PROMPT | {"prompt": "And?", "context": first.json["context"]}
        streamed = await running.ask("POST", "/api/generate", again)
        chat = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "And?"},
        ]
        await running.ask("POST", "/api/chat", ASK | {"messages": chat})
        _, continued, same = (stream.request.prompt for stream in running.engine.streams)
        assert continued == same
        assert "context" in lines(streamed)[-1]


@asynchronous
async def test_a_raw_prompt_reaches_the_engine_as_it_is() -> None:
    async with serving() as running:
        running.engine.answer = words("Hi")
        await running.ask("POST", "/api/generate", PROMPT | {"raw": True})
        await running.ask("POST", "/v1/completions", {"prompt": "Hello"})
        raw, completed = (stream.request.prompt for stream in running.engine.streams)
        assert raw == completed


@asynchronous
async def test_a_request_without_a_prompt_runs_nothing() -> None:
    async with serving() as running:
        for path, field, empty in (
            ("/api/chat", "message", {"role": "assistant", "content": ""}),
            ("/api/generate", "response", ""),
        ):
            answer = await running.ask("POST", path, {"model": "mini", "keep_alive": 0})
            assert (answer.status, answer.json["done"], answer.json["done_reason"]) == (200, True, "load")
            assert answer.json[field] == empty
        unknown = await running.ask("POST", "/api/generate", {"model": "nobody"})
        assert unknown.status == 404
        assert not running.engine.streams


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/api/chat", b"{", 400, "not valid JSON"),
        ("POST", "/api/chat", ASK | {"model": "nobody:1b"}, 404, "Unknown model 'nobody:1b'"),
        ("POST", "/api/chat", ASK | {"think": True}, 400, "does not support thinking"),
        ("POST", "/api/chat", ASK | {"options": {"mirostat": 2}}, 400, "'options.mirostat' is not supported"),
        ("POST", "/api/generate", PROMPT | {"context": [1, 2, 3]}, 400, "/api/chat"),
        ("GET", "/api/chat", None, 405, "POST"),
        ("GET", "/api/nothing", None, 404, "Unknown path"),
        ("POST", "/api/show", {"model": "nobody"}, 404, "Unknown model"),
        ("POST", "/api/pull", {"model": "llama3"}, 501, "use one of: mini:latest"),
        ("POST", "/api/push", {"model": "mini"}, 501, "pushes no models"),
        ("POST", "/api/create", {"model": "mine", "from": "mini"}, 501, "configuration"),
        ("POST", "/api/copy", {"source": "mini", "destination": "x"}, 501, "Add an alias"),
        ("DELETE", "/api/delete", {"model": "mini"}, 501, "removes no models"),
        ("POST", "/api/blobs/sha256:00", b"bytes", 501, "takes no model files"),
    ],
)
@asynchronous
async def test_errors_are_one_string_that_says_what_to_do(
    method: str, path: str, body: Any, status: int, words: str
) -> None:
    async with serving() as running:
        answer = await running.ask(method, path, body)
        assert answer.status == status
        assert set(answer.json) == {"error"}
        assert words in answer.json["error"]


@asynchronous
async def test_an_error_after_the_first_line_is_a_line() -> None:
    async with serving() as running:
        running.engine.answer = fails(HeadraceError("broken"), "one ")
        answer = await running.ask("POST", "/api/chat", ASK)
        assert answer.status == 200
        first, last = lines(answer)
        assert first["message"]["content"] == "one "
        assert set(last) == {"error"}
        assert isinstance(last["error"], str)


@asynchronous
async def test_a_client_that_leaves_frees_its_slot() -> None:
    async with serving() as running:
        client = await running.client()
        await client.send(request("POST", "/api/chat", ASK))
        await until(lambda: bool(running.engine.streams))
        say(running.engine.streams[0], "one ")
        assert (await client.head())[0] == 200
        assert b"one " in await client.chunk()
        client.leave()
        await until(lambda: running.engine.dropped == running.engine.streams)


@asynchronous
async def test_what_the_answer_ended_for_is_said() -> None:
    async with serving() as running:
        running.engine.answer = lambda stream: say(stream, "one", end=True, finish=FinishReason.LENGTH)
        answer = await running.ask("POST", "/api/chat", ASK | {"stream": False, "options": {"num_predict": 1}})
        assert answer.json["done_reason"] == "length"
        assert running.engine.streams[0].request.max_tokens == 1


@asynchronous
async def test_headers_set_the_surface_and_the_deadline() -> None:
    async with serving() as running:
        running.engine.answer = words("one")
        await running.ask("POST", "/api/chat", ASK, x_headrace_surface="voice", x_headrace_deadline_ms="60000")
        (stream,) = running.engine.streams
        assert stream.request.surface == "voice"
        assert stream.request.deadline is not None


@asynchronous
async def test_a_head_request_for_the_root_finds_the_server() -> None:
    async with serving(keys=(KeyConfig(name="one", key="k" * 20),)) as running:
        client = await running.client()
        await client.send(request("HEAD", "/"))
        found = await client.answer(to_head=True)
        assert (found.status, found.headers["content-length"]) == (200, str(len("Ollama is running")))
        page = await running.ask("GET", "/")  # the dashboard, for this machine
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


@asynchronous
async def test_a_key_is_needed_and_sees_its_own_models_alone() -> None:
    keys = (KeyConfig(name="narrow", key="k" * 20, models=("other",)),)
    authorised = {"authorization": f"Bearer {'k' * 20}"}
    async with serving(keys=keys) as running:
        for path in ("/api/tags", "/api/ps", "/api/version"):
            answer = await running.ask("GET", path)
            assert (answer.status, set(answer.json)) == (401, {"error"})
        assert (await running.ask("POST", "/api/chat", ASK)).status == 401
        for path in ("/api/tags", "/api/ps"):
            assert (await running.ask("GET", path, **authorised)).json == {"models": []}
        # What is hidden and what does not exist are the same to this key.
        hidden = await running.ask("POST", "/api/chat", ASK, **authorised)
        unknown = await running.ask("POST", "/api/chat", ASK | {"model": "nobody:latest"}, **authorised)
        assert (hidden.status, unknown.status) == (404, 404)
        assert hidden.json["error"].replace("mini:latest", "X") == unknown.json["error"].replace("nobody:latest", "X")
        pulled = await running.ask("POST", "/api/pull", {"model": "mini"}, **authorised)
        assert (pulled.status, pulled.json["error"].count("mini")) == (501, 1)


@asynchronous
async def test_ollamas_package_sends_a_key_as_a_bearer_token() -> None:
    async with serving(keys=(KeyConfig(name="one", key="k" * 20),)) as running:
        async with ollama.AsyncClient(running.server.url) as stranger:
            with pytest.raises(ollama.ResponseError) as caught:
                await stranger.list()
        assert caught.value.status_code == 401
        async with ollama.AsyncClient(running.server.url, headers={"authorization": f"Bearer {'k' * 20}"}) as known:
            assert [model.model for model in (await known.list()).models] == ["mini:latest"]


@asynchronous
async def test_models_are_described_as_ollama_does() -> None:
    async with serving() as running:
        mini = running.fleet.served["mini"]
        mini.description = ModelDescription("llama", 11_015_040, "int8", "safetensors", 22_030_080)
        (tag,) = (await running.ask("GET", "/api/tags")).json["models"]
        (loaded,) = (await running.ask("GET", "/api/ps")).json["models"]
        shown = (await running.ask("POST", "/api/show", {"model": "mini:latest"})).json
        assert (tag["name"], tag["model"], tag["size"], len(tag["digest"])) == (
            "mini:latest",
            "mini:latest",
            22_030_080,
            64,
        )
        assert tag["details"] == loaded["details"] == shown["details"]
        assert tag["details"]["parameter_size"] == "11.0M"
        assert tag["details"]["quantization_level"] == "INT8"
        assert (loaded["digest"], loaded["context_length"], loaded["size_vram"]) == (tag["digest"], 2048, 0)
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == 2048
        assert shown["capabilities"] == ["completion"]
        assert "<|user|>" not in shown["modelfile"]
        assert (await running.ask("POST", "/api/pull", {"name": "mini"})).json == {"status": "success"}


@asynchronous
async def test_a_model_of_an_upstream_is_described_by_what_is_known() -> None:
    async with serving() as running:
        upstream = Upstream.of("far", UpstreamConfig(url="http://127.0.0.1:1/v1", kind="vllm", model="m"), {})
        fleet = running.fleet
        fleet.served["far"] = served_by_upstream(upstream, ModelConfig(), running.server.config)
        fleet.aliases["llama3:8b"] = "far"
        tags = (await running.ask("GET", "/api/tags")).json["models"]
        assert [(tag["name"], tag["size"], tag["details"]["family"]) for tag in tags[1:]] == [
            ("far:latest", 0, ""),
            ("llama3:8b", 0, ""),
        ]
        loaded = (await running.ask("GET", "/api/ps")).json["models"]
        assert [each["name"] for each in loaded] == ["mini:latest"]
        shown = (await running.ask("POST", "/api/show", {"model": "llama3:8b"})).json
        assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
        assert shown["model_info"] == {"general.architecture": "upstream", "general.basename": "llama3:8b"}


def limited(most: int) -> dict[str, Any]:
    return {
        "keys": (key("a"),),
        "tenants": {"acme": TenantConfig(limits=LimitSet(requests_per_min=most))},
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", ASK | {"stream": False}),
        ("/api/generate", PROMPT | {"stream": False}),
        ("/api/generate", {"model": "mini"}),
        ("/api/embed", {"model": "mini", "input": []}),
        ("/api/pull", {"model": "mini"}),
        ("/api/show", {"model": "mini"}),
    ],
)
@asynchronous
async def test_every_request_counts_towards_the_limits(path: str, body: Any, tmp_path: Path) -> None:
    async with served(tmp_path, **limited(2)) as running:
        running.says(3)
        answers = [await running.ask("POST", path, body, **bearer("a")) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert set(answers[2].json) == {"error"}
        assert "retry-after" in answers[2].headers


@asynchronous
async def test_an_answer_is_charged_once(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"keys": (key("a"),)}
    async with served(tmp_path, **sections) as running:
        running.says(5)
        answer = await running.ask("POST", "/api/chat", ASK, **bearer("a"))
        last = lines(answer)[-1]
        await _charged(running, last["prompt_eval_count"], last["eval_count"])


async def _charged(running: Serving, prompt_tokens: int, output_tokens: int) -> None:
    (row,) = [row for row in await running.usage() if row["tenant"] == "acme"]
    assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (1, prompt_tokens, output_tokens)


@asynchronous
async def test_too_large_requests_are_rejected_before_they_run() -> None:
    async with serving(body_bytes=500, limits=RequestLimits(texts=2)) as running:
        large = await running.ask("POST", "/api/chat", ASK | {"keep_alive": "x" * 600})
        assert (large.status, set(large.json)) == (413, {"error"})
        many = await running.ask("POST", "/api/embed", {"model": "mini", "input": ["a", "b", "c"]})
        assert (many.status, set(many.json)) == (400, {"error"})
        assert not running.engine.streams


@asynchronous
async def test_long_texts_are_cut_unless_the_request_rejects_them() -> None:
    def answer(stream: OutputStream) -> None:
        usage = SequenceUsage(len(stream.request.prompt), 0, 0, 0, 0, 0.0, 0.0, 0.0)
        vector = np.ones(4, dtype="<f4").tobytes()
        stream.push(SequenceOutput("", 0, [], "", vector=vector, ending=SequenceEnd(FinishReason.STOP, usage)))

    long = "the water runs " * 2000
    async with serving() as running:
        running.engine.answer = answer
        for path, asked in (("/api/embed", {"input": long}), ("/api/embeddings", {"prompt": long})):
            found = await running.ask("POST", path, {"model": "mini"} | asked)
            assert found.status == 200, found.body
            assert len(running.engine.streams[-1].request.prompt) == 2048
        refused = await running.ask("POST", "/api/embed", {"model": "mini", "input": long, "truncate": False})
        assert refused.status == 400
        assert "context" in refused.json["error"]
