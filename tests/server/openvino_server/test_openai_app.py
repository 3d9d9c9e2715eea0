"""The OpenVINO server's endpoints, over a pipeline that repeats its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.server.http.request_cycle import GONE
from headrace.server.openvino_server.openai_app import OpenAiApp
from headrace.server.openvino_server.pipeline_thread import PipelineThread, TextPieces
from tests.support.programs import fake_genai
from tests.support.running_server import asynchronous, until


class Client:
    """Calls the application, and leaves when told."""

    def __init__(self, *, context: int | None = 64) -> None:
        self.pipeline = fake_genai.Pipeline()
        self.thread = PipelineThread(fake_genai, self.pipeline)
        self.app = OpenAiApp(
            fake_genai, fake_genai, self.pipeline, self.thread, name="letters", key="secret", context=context
        )
        self.leave = lambda: None

    async def call(self, method: str, path: str, body: Any = None, key: str = "secret") -> tuple[int, bytes]:
        sent: list[Any] = []

        def on_leaving(callback: Any) -> None:
            self.leave = callback

        async def receive() -> Any:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"method": method, "path": path, "headers": headers, "extensions": {GONE: on_leaving}}
        await self.app(scope, receive, send)
        return (sent[0]["status"] if sent else 0), b"".join(message.get("body", b"") for message in sent[1:])

    async def chat(self, text: str, **fields: Any) -> tuple[int, Any]:
        status, data = await self.call(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}
        )
        return status, json.loads(data)


@pytest.fixture
def client() -> Iterator[Client]:
    found = Client()
    found.thread.start()
    yield found
    found.pipeline.failure = "the test has ended"  # which ends the thread
    found.thread.submit(fake_genai.Tensor([[0]]), fake_genai.GenerationConfig(), lambda _tokens, _reason: None)
    found.thread.join()


@asynchronous
async def test_a_whole_answer_and_a_stream_have_the_same_text_and_usage(client: Client) -> None:
    status, whole = await client.chat("grüße", max_tokens=9, temperature=0.0)
    assert status == 200
    assert whole["choices"] == [
        {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "grüßegr"}}
    ]
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
    body = {
        "prompt": list("grüße".encode()),
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, data = await client.call("POST", "/v1/completions", body)
    assert status == 200
    *events, end = data.decode().strip().split("\n\n")
    assert end == "data: [DONE]"
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == "grüßegr"
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["usage"] == whole["usage"]


@asynchronous
async def test_parameters_reach_openvino(client: Client) -> None:
    schema = {"type": "object"}
    await client.chat(
        "a.",
        temperature=0.5,
        top_k=7,
        seed=3,
        stop="x",
        stop_token_ids=[9],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        chat_template_kwargs={"a": 1},
    )
    config: Any = client.pipeline.configs[-1]
    assert (config.temperature, config.top_k, config.rng_seed, config.stop_strings) == (0.5, 7, 3, {"x"})
    assert config.stop_token_ids == {9}
    assert json.loads(config.structured_output_config.json_schema) == schema
    assert config.max_new_tokens == 64 - len("a.1")  # what the context leaves
    _, answer = await client.chat("ab.", temperature=0.0)
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "Expected 'messages'"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "The chat template rejects the messages: unknown role"),
        ({"top_p": 3.0}, "top_p must be positive, got 3.0"),
        ({"response_format": {"type": "json_schema"}}, "Expected 'json_schema'"),
        ({"messages": [{"role": "user", "content": "a" * 64}]}, "The prompt has 64 tokens. Expected fewer than 64"),
    ],
)
@asynchronous
async def test_what_it_does_not_take_is_a_400(client: Client, fields: dict[str, Any], expected: str) -> None:
    status, answer = await client.chat("a", **fields)
    assert status == 400
    assert expected in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_request_that_the_pipeline_rejects_ends_no_other(client: Client, stream: bool) -> None:
    client.pipeline.rejection = "Check 'compiled' failed at sampler.cpp:7:\nunknown type in the schema\n"
    status, answer = await client.chat("a", stream=stream)
    assert status == 400
    assert answer["error"]["message"] == "OpenVINO GenAI rejects the request: unknown type in the schema"
    client.pipeline.rejection = None
    assert (await client.chat("ab.", temperature=0.0))[0] == 200
    assert (await client.call("GET", "/health"))[0] == 200


def test_a_request_that_comes_while_the_pipeline_breaks_gets_an_end() -> None:
    thread = PipelineThread(fake_genai, fake_genai.Pipeline())
    thread.broken = "no memory"  # it steps no more, after its caller has looked
    ends: list[str | None] = []
    thread.submit(fake_genai.Tensor([[97]]), fake_genai.GenerationConfig(), lambda _tokens, reason: ends.append(reason))
    assert ends == ["error"]


@asynchronous
async def test_others_are_refused(client: Client) -> None:
    assert (await client.call("POST", "/v1/completions", b"{", key="wrong"))[0] == 401
    assert (await client.call("POST", "/v1/completions", b"{"))[0] == 400
    for ids in ([256], [-1], [2**62]):
        status, data = await client.call("POST", "/v1/completions", {"prompt": ids})
        assert (status, b"Expected token ids from 0 to 255." in data) == (400, True)
    assert (await client.call("GET", "/v1/embeddings"))[0] == 404
    status, data = await client.call("GET", "/v1/models")
    assert (status, json.loads(data)["data"][0]["id"]) == (200, "letters")


@asynchronous
async def test_a_client_that_leaves_ends_its_answer() -> None:
    client = Client(context=None)  # an answer without a bound
    client.thread.start()
    answering = asyncio.create_task(client.call("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 10**9}))
    await until(lambda: client.thread.running == 1)
    _, metrics = await client.call("GET", "/metrics")
    assert b"openvino:requests_running 1\n" in metrics
    assert b"openvino:kv_cache_usage_ratio 0.25" in metrics
    client.leave()
    assert await answering == (0, b"")
    await until(lambda: client.thread.running == 0)
    assert client.pipeline.handles[0].status == fake_genai.GenerationStatus.CANCEL
    await until(lambda: not client.pipeline.holding)  # the KV of the last request is free before another one comes
    # A pipeline that fails ends what runs, and the health check says so.
    client.pipeline.failure = "no memory"
    status, data = await client.call("POST", "/v1/completions", {"prompt": "ab"})
    assert (status, "no memory" in data.decode()) == (500, True)
    assert (await client.call("GET", "/health"))[0] == 503
    assert (await client.call("POST", "/v1/completions", {"prompt": "ab"}))[0] == 503
    client.thread.join()


def test_pieces_of_text_end_where_characters_do() -> None:
    pieces = TextPieces(fake_genai.Tokenizer().decode)
    data = "aß\N{GRINNING FACE}".encode()
    found = [pieces.add([token], last=False) for token in data]
    assert [piece for piece in found if piece] == ["a", "ß", "\N{GRINNING FACE}"]
    assert pieces.add([data[1]], last=True) == "\ufffd"
    assert pieces.add([], last=True) == ""
