"""Fast mode through a server that runs: switched by an administrator, felt by requests, ended by its time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.config.tenant_section import FastConfig
from tests.support.accounts import bearer, declared
from tests.support.admin_server import ADMIN, MODELS, ROOT, Administered, administered
from tests.support.clock import Clock
from tests.support.running_server import CHAT, Answer, asynchronous, request, tokenizer, words

FAST = FastConfig(variant="@int4", prompt_tokens=120, max_tokens=16, slow_tools=("browse",), most_s=3600.0)
KEYS = (ADMIN, declared("red", "red-secret"), declared("blue", "blue-secret"))
LONG = {
    "messages": [
        *({"role": role, "content": f"turn {n} " + "word " * 20} for n in range(6) for role in ("user", "assistant")),
        {"role": "user", "content": "the last question"},
    ]
}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@asynccontextmanager
async def standing(folder: Path) -> AsyncGenerator[Administered]:
    async with administered(folder, keys=KEYS, models=MODELS, fast=FAST) as running:
        running.engine.answer = words("ok")
        yield running


def is_fast(answer: Answer) -> bool:
    assert answer.status == 200, answer.body
    fast = answer.headers.get("x-headrace-fast") == "on"
    assert fast == (answer.json["model"] == "mini@int4")
    return fast


def sent(running: Administered) -> str:
    """The prompt that the engine was given last."""
    return tokenizer().decode(list(running.engine.streams[-1].request.prompt))


@asynchronous
async def test_the_switch_of_a_tenant_makes_its_requests_cheap_and_nobody_elses(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        assert not is_fast(await running.chat("red-secret"))
        await running.did("PUT", "fast/red", {"ttl_s": 600, "reason": "a storm"}, x_request_id="storm-1")
        answer = await running.chat("red-secret", max_tokens=100)
        assert is_fast(answer)
        assert running.engine.streams[-1].request.max_tokens == 16
        assert answer.headers["x-headrace-shaped"] == "max_tokens=100>16"
        assert not is_fast(await running.chat("blue-secret", max_tokens=100))
        assert running.engine.streams[-1].request.max_tokens == 100
        # What is shorter already stays, and so does a model without such a variant.
        await running.chat("red-secret", max_tokens=5)
        assert running.engine.streams[-1].request.max_tokens == 5
        other = await running.chat("red-secret", model="draft")
        assert (other.json["model"], other.headers["x-headrace-fast"]) == ("draft", "on")
        await running.did("DELETE", "fast/red")
        assert not is_fast(await running.chat("red-secret"))
        on, off = (await running.did("GET", "audit?order=asc"))["data"]
        assert (on["what"], on["who"], on["tenant"], on["reason"], on["request"]) == (
            "fast.on",
            "root",
            "red",
            "a storm",
            "storm-1",
        )
        assert on["after"]["until"] - on["after"]["since"] == 600
        assert off["what"] == "fast.clear"


@asynchronous
async def test_the_switch_of_all_is_for_all_but_those_that_are_exempt(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        await running.did("PUT", "fast", {"ttl_s": 600, "reason": "a storm"})
        await running.did("PUT", "fast/blue", {"on": False, "ttl_s": 600, "reason": "they pay for it"})
        assert is_fast(await running.chat("red-secret"))
        assert is_fast(await running.chat(ROOT))
        assert not is_fast(await running.chat("blue-secret"))
        await running.did("DELETE", "fast/blue")
        assert is_fast(await running.chat("blue-secret"))
        await running.did("DELETE", "fast")
        assert not is_fast(await running.chat("blue-secret"))


@asynchronous
async def test_fast_mode_ends_by_itself(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        monotonic = Clock(1000.0)
        running.set_clocks(Clock(), monotonic)
        await running.did("PUT", "fast", {"ttl_s": 600, "reason": "a storm"})
        # It ends on a whole second of the storage's clock, which runs: up to one sooner than asked, and a little more.
        monotonic.now += 570.0
        assert is_fast(await running.chat("red-secret"))
        monotonic.now += 31.0
        assert not is_fast(await running.chat("red-secret"))
        assert (await running.did("GET", "fast"))["data"] == []


@asynchronous
async def test_the_oldest_turns_go(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        await running.ask("POST", "/v1/chat/completions", LONG, **bearer("red-secret"))
        assert "turn 0 " in sent(running)
        await running.did("PUT", "fast", {"ttl_s": 600, "reason": "a storm"})
        answer = await running.ask("POST", "/v1/chat/completions", LONG, **bearer("red-secret"))
        assert answer.status == 200
        assert len(running.engine.streams[-1].request.prompt) <= 120
        assert "turn 0 " not in sent(running)
        assert "the last question" in sent(running)
        assert "turns=" in answer.headers["x-headrace-shaped"]


@asynchronous
async def test_slow_tools_are_not_offered(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        both = {"tools": [tool("browse"), tool("add")], "max_tokens": 100}
        await running.chat("red-secret", **both)
        assert "browse" in sent(running)
        await running.did("PUT", "fast", {"ttl_s": 600, "reason": "a storm"})
        answer = await running.chat("red-secret", **both)
        assert answer.headers["x-headrace-shaped"] == "tools=2>1"
        assert "browse" not in sent(running)
        assert "add" in sent(running)
        # An answer that may still be a call is not cut; one that may not is.
        assert running.engine.streams[-1].request.max_tokens == 100
        await running.chat("red-secret", tools=[tool("browse")], max_tokens=100)
        assert "browse" not in sent(running)
        assert running.engine.streams[-1].request.max_tokens == 16
        # Who asks for one by its name gets it.
        await running.chat("red-secret", tools=[tool("browse")], tool_choice="required")
        assert "browse" in sent(running)


@asynchronous
async def test_a_stream_and_every_dialect_say_that_it_is_on(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        await running.did("PUT", "fast", {"ttl_s": 600, "reason": "a storm"})
        client = await running.client()
        await client.send(request("POST", "/v1/chat/completions", CHAT | {"stream": True}, **bearer("red-secret")))
        stream = await client.answer()
        assert (stream.headers["x-headrace-fast"], stream.events[0]["model"]) == ("on", "mini@int4")
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", CHAT | {"max_tokens": 50}),
            ("/v1/responses", {"input": "a"}),
        ):
            answer = await running.ask("POST", path, body, **bearer("red-secret"))
            assert is_fast(answer), path
            assert running.engine.streams[-1].request.max_tokens == 16


@asynchronous
async def test_after_a_restart_it_lasts_what_is_left(tmp_path: Path) -> None:
    async with standing(tmp_path) as running:
        await running.did("PUT", "fast/red", {"ttl_s": 600, "reason": "a storm"})
    async with standing(tmp_path) as running:
        assert is_fast(await running.chat("red-secret"))
        assert not is_fast(await running.chat("blue-secret"))
        (shown,) = (await running.did("GET", "fast"))["data"]
        assert 0 < shown["seconds_left"] <= 600
