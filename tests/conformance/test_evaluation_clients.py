"""Requests as promptfoo and guidellm send them, and what they read of the answers.

Both are too large to install here (guidellm needs torch, promptfoo 1 GB of npm packages), so the bodies are those of
their sources: promptfoo's providers `openai:chat` and `openai:completion`, and guidellm's OpenAI backend.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Order 4711: 3 lamps for Kim."}]
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}


def post(http: httpx2.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def streamed(http: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks, read line by line up to the end mark as guidellm reads them."""
    chunks: list[dict[str, Any]] = []
    with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                return chunks
            if line.startswith("data:"):
                chunks.append(json.loads(line.removeprefix("data:").strip()))
    raise AssertionError("the stream has no end mark")


def test_promptfoo_reads_the_text_the_usage_and_the_log_probabilities_of_a_chat(http: httpx2.Client) -> None:
    body = {"model": "mini", "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "logprobs": True}
    found = post(http, CHAT, body)
    (choice,) = found["choices"]
    assert choice["message"]["content"]
    assert choice["message"].get("refusal") is None
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert len(logprobs) in (found["usage"]["completion_tokens"], found["usage"]["completion_tokens"] - 1)
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_promptfoo_checks_formats_and_calls(http: httpx2.Client) -> None:
    base = {"model": "mini", "messages": MESSAGES, "max_tokens": 60, "temperature": 0, "seed": 7, "top_p": 1}
    format = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": SCHEMA}}
    content = post(http, CHAT, {**base, "response_format": format})["choices"][0]["message"]["content"]
    assert json.loads(content).keys() == {"count"}
    tool = {"type": "function", "function": {"name": "order", "description": "Takes an order.", "parameters": SCHEMA}}
    message = post(http, CHAT, {**base, "tools": [tool], "tool_choice": "required"})["choices"][0]["message"]
    assert message["content"] is None
    for call in message["tool_calls"]:
        assert (call["type"], call["function"]["name"]) == ("function", "order")
        assert json.loads(call["function"]["arguments"]).keys() == {"count"}


def test_promptfoo_completes_a_text(http: httpx2.Client) -> None:
    body = {
        "model": "mini",
        "prompt": "Time to first token is",
        "max_tokens": 12,
        "temperature": 0,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "best_of": 1,
        "stop": ["."],
    }
    assert isinstance(post(http, "/v1/completions", body)["choices"][0]["text"], str)


def test_guidellm_finds_the_server_and_its_model(http: httpx2.Client) -> None:
    assert http.get("/health").status_code == 200
    assert "mini" in [model["id"] for model in http.get("/v1/models").json()["data"]]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_guidellm_measures_streams_of_a_given_length(http: httpx2.Client, path: str) -> None:
    chat = path == CHAT
    length = "max_completion_tokens" if chat else "max_tokens"
    body: dict[str, Any] = {
        "model": "mini",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        length: 30,
        "stop": None,
        "ignore_eos": True,
        **({"messages": MESSAGES} if chat else {"prompt": "Time to first token is"}),
    }
    chunks = streamed(http, path, body)
    texts = [
        (choice["delta"].get("content") if chat else choice["text"]) or ""
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert sum(map(bool, texts)) > 1
    usage = chunks[-1]["usage"]
    assert (usage["completion_tokens"], chunks[-1]["choices"]) == (30, [])
    assert usage["prompt_tokens"] > 0
    del body["stream"], body["stream_options"]
    whole = post(http, path, body)
    assert whole["usage"]["completion_tokens"] == 30
