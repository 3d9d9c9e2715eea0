"""Request bodies at a served endpoint: too many values, half-sent bodies, and large ones that are right."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import RequestLimits
from headrace.observe import metrics
from tests.support.running_server import CHAT, asynchronous, count, request, serving, until, words

MIB = 1024 * 1024
MANY = ",".join(["1"] * 200_000)
FIELDS = ",".join(f'"k{number}":1' for number in range(100_000))
EMPTY = ",".join(["{}"] * 50_000)
LIMITS = RequestLimits(values=150_000)

# Parameter or limit that refuses: path, body.
HOSTILE: list[tuple[str, str, str]] = [
    ("values", "/detokenize", f'{{"tokens":[{MANY}]}}'),
    ("values", "/v1/embeddings", f'{{"input":[{MANY}]}}'),
    ("values", "/v1/completions", f'{{"prompt":[{MANY}]}}'),
    ("values", "/v1/chat/completions", f'{{"messages":[],"metadata":[[[{MANY}]]]}}'),
    ("fields", "/v1/chat/completions", f"{{{FIELDS}}}"),
    ("fields", "/v1/responses", f"{{{FIELDS}}}"),
    ("fields", "/v1/messages", f"{{{FIELDS}}}"),
    ("fields", "/v1/batches", f"{{{FIELDS}}}"),
    ("fields", "/v1/score", f"{{{FIELDS}}}"),
    ("messages", "/v1/chat/completions", f'{{"messages":[{EMPTY}]}}'),
    ("messages", "/v1/messages", f'{{"messages":[{EMPTY}]}}'),
    ("messages", "/tokenize", f'{{"messages":[{EMPTY}]}}'),
    ("input", "/v1/responses", f'{{"input":[{EMPTY}]}}'),
    ("tools", "/v1/chat/completions", f'{{"messages":[],"tools":[{EMPTY}]}}'),
    ("tools", "/v1/messages", f'{{"messages":[],"tools":[{EMPTY}]}}'),
    ("stop", "/v1/completions", f'{{"stop":[{EMPTY}]}}'),
    ("stop_sequences", "/v1/messages", f'{{"stop_sequences":[{EMPTY}]}}'),
    ("stop_token_ids", "/v1/chat/completions", f'{{"stop_token_ids":[{EMPTY}]}}'),
    ("logit_bias", "/v1/chat/completions", f'{{"logit_bias":{{{FIELDS}}}}}'),
    ("metadata", "/v1/chat/completions", f'{{"metadata":{{{FIELDS}}}}}'),
    ("guided_choice", "/v1/chat/completions", f'{{"guided_choice":[{EMPTY}]}}'),
    ("sources", "/v1/chat/completions", f'{{"sources":[{EMPTY}]}}'),
    ("documents", "/v1/rerank", f'{{"query":"a","documents":[{EMPTY}]}}'),
    ("continuations", "/v1/score", f'{{"prompt":"a","continuations":[{EMPTY}]}}'),
]


@asynchronous
async def test_a_hostile_body_is_refused_before_it_is_decoded() -> None:
    async with serving(limits=LIMITS) as running:
        for what, path, body in HOSTILE:
            refused = count(metrics.bodies_refused, what)
            answer = await running.ask("POST", path, body.encode())
            assert answer.status == 400, (what, path)
            assert "xpected at most" in answer.error["message"] or "more than" in answer.error["message"]
            assert count(metrics.bodies_refused, what) == refused + 1, (what, path)
            assert len(answer.body) < 500
        assert running.server.context.bodies.held == 0


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@asynchronous
async def test_deep_nesting_is_refused_in_small_and_in_large_bodies(opening: bytes) -> None:
    async with serving() as running:
        for levels in (2000, 100_000):
            answer = await running.ask("POST", "/v1/chat/completions", b'{"messages":' + opening * levels)
            assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@asynchronous
async def test_a_long_body_that_is_right_is_answered() -> None:
    async with serving() as running:
        running.engine.answer = words("ok")
        # Larger and with more values than what the event loop decodes at once.
        messages = [{"role": "user", "content": f"a, {number}" + "," * 40} for number in range(4000)]
        answer = await running.ask("POST", "/v1/chat/completions", {"messages": messages})
        assert answer.error["code"] == "context_length_exceeded"
        answer = await running.ask("POST", "/v1/completions", {"prompt": list(range(100, 2000)), "max_tokens": 5})
        assert answer.status == 200
        assert running.engine.streams[-1].request.prompt == tuple(range(100, 2000))


@asynchronous
async def test_the_mistake_in_a_long_list_is_named_by_its_place() -> None:
    async with serving() as running:
        messages = [*CHAT["messages"] * 3000, {"role": "nobody", "content": "a"}]
        answer = await running.ask("POST", "/v1/chat/completions", {"messages": messages})
        assert answer.error["param"] == "messages[3000].role"


@asynchronous
async def test_more_ids_than_the_context_are_not_detokenized() -> None:
    async with serving() as running:
        answer = await running.ask("POST", "/detokenize", {"tokens": [65] * 2049})
        assert (answer.status, answer.error["param"]) == (400, "tokens")
        assert "2048" in answer.error["message"]
        tokens: list[Any] = [65] * 2048
        answer = await running.ask("POST", "/detokenize", {"tokens": tokens})
        assert len(answer.json["prompt"]) >= 2048


@asynchronous
async def test_half_sent_bodies_of_one_client_are_bounded() -> None:
    async with serving(body_bytes=2 * MIB, key_bodies_bytes=4 * MIB) as running:
        half = request("POST", "/v1/chat/completions", b"x" * (2 * MIB))[: -MIB // 2]
        clients = [await running.client() for _ in range(4)]
        bodies = running.server.context.bodies
        for number, client in enumerate(clients[:2], 1):
            await client.send(half)
            await until(lambda number=number: bodies.held >= number * MIB)
        clients[2].writer.write(half)
        clients[3].writer.write(half)
        answers = [await client.answer() for client in clients[2:]]
        assert {answer.status for answer in answers} == {429}
        assert answers[0].error["code"] == "key_bodies_too_large"
        assert bodies.held <= 4 * MIB
        for client in clients:
            client.leave()
        await until(lambda: bodies.held == 0)
        assert (await running.ask("POST", "/tokenize", {"prompt": "Hello"})).status == 200


@asynchronous
async def test_an_upload_is_read_at_the_pace_of_its_payer() -> None:
    async with serving(key_body_bytes_per_s=MIB) as running:
        pauses: list[float] = []

        async def note(seconds: float) -> None:
            pauses.append(seconds)

        running.server.context.bodies._sleep = note
        fields = '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        file = '--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        body = (fields + file + "a" * 2 * MIB + "\r\n--x--\r\n").encode()
        kind = "multipart/form-data; boundary=x"
        answer = await running.ask("POST", "/v1/files", body, content_type=kind)
        assert (answer.status, answer.json["bytes"]) == (200, 2 * MIB)
        assert 1.0 < max(pauses) < 2.0  # two seconds' worth, but for the burst and the time it took
