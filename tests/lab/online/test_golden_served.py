"""The golden fallback on a running server: marked, counted, and kept as a hard case of recorded tenants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import KeyConfig, ModelConfig
from headrace.config.cache_section import ExactConfig
from headrace.config.routing_section import GoldenConfig, RoutingConfig
from headrace.config.tenant_section import TenantConfig
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.caching_server import BOSS, KEYS, RED, caching
from tests.support.running_server import FakeEngine, asynchronous, say, tokenizer, until, words

SOURCES = [{"id": "a", "text": "Paris is the capital of France."}]
RECORDED = {"red": TenantConfig(record=True)}


def setup(**golden: Any) -> tuple[FakeEngine, dict[str, Any]]:
    engine = FakeEngine()
    engine.answer = words("It is ", "Paris ", "[1].")
    better = ServedVariant(name="mini@golden", engine=engine, tokenizer=tokenizer(), context=2048, fingerprint="fp_g")
    sections = {
        "models": {"mini": ModelConfig(variants={"golden": {}})},
        "routing": RoutingConfig(golden=GoldenConfig(**{"checks": ("json", "citations"), **golden})),
        "others": {"mini@golden": better},
        "tenants": RECORDED,
        "exact": ExactConfig(),
    }
    return engine, sections


@asynchronous
async def test_a_citation_that_is_not_in_the_sources_is_answered_again(tmp_path: Path) -> None:
    _, sections = setup()
    async with caching(tmp_path, **sections) as running:
        running.engine.answer = words("It is ", "Lyon ", "[7].")
        answer = await running.chat("What is the capital of France?", key=RED, sources=SOURCES)
        assert answer.json["choices"][0]["message"]["content"] == "It is Paris [1]."
        assert answer.json["model"] == "mini@golden"
        assert answer.headers["x-headrace-golden"] == "citations"
        assert "golden mini@golden (mini: citations)" in answer.headers["x-headrace-route"]
        note = {"check": "citations", "instead_of": "mini", "variant": "mini@golden"}
        assert answer.json["headrace"]["golden"] == note
        assert running.counted("headrace_golden_total", "citations", "mini") == 1
        [row] = await running.usage(by="variant")
        assert (row["variant"], row["requests"]) == ("mini@golden", 1)
        exported = await running.ask("GET", "/admin/v1/hard-cases", **BOSS)
        [case] = [msgspec.json.decode(line) for line in exported.body.splitlines()]
        assert case["recorded"]["answers"][0]["text"] == "It is Paris [1]."
        assert case["recorded"]["tenant"] == "red"


@asynchronous
async def test_a_good_answer_is_left_alone_and_other_tenants_are_not_kept(tmp_path: Path) -> None:
    engine, sections = setup()
    async with caching(tmp_path, **sections) as running:
        running.engine.answer = words("It is ", "Paris ", "[1].")
        answer = await running.chat("What is the capital of France?", key=RED, sources=SOURCES)
        assert (answer.json["model"], answer.headers.get("x-headrace-golden")) == ("mini", None)
        assert not engine.streams
        running.engine.answer = words("It is ", "Lyon ", "[7].")
        blue = {"authorization": "Bearer blue-secret"}
        answer = await running.chat("What is the capital of France?", key=blue, sources=SOURCES)
        assert answer.headers["x-headrace-golden"] == "citations"
        assert (await running.ask("GET", "/admin/v1/hard-cases", **BOSS)).body == b""


@asynchronous
async def test_json_that_is_cut_is_answered_again(tmp_path: Path) -> None:
    engine, sections = setup()
    engine.answer = words('{"a": ', "1}")
    async with caching(tmp_path, **sections) as running:
        running.engine.answer = words('{"a": ', "1")
        answer = await running.chat("Hello", key=RED, response_format={"type": "json_object"})
        assert answer.json["choices"][0]["message"]["content"] == '{"a": 1}'
        named = await running.chat("Hello", key=RED, model="mini@golden")
        assert named.headers.get("x-headrace-golden") is None


@asynchronous
async def test_a_stream_that_begins_wrong_is_answered_again(tmp_path: Path) -> None:
    engine, sections = setup()
    engine.answer = words('{"a": ', "1}")
    async with caching(tmp_path, **sections) as running:
        running.engine.answer = words("Sure, ", "here ", "it is")
        answer = await running.chat("Hello", key=RED, stream=True, response_format={"type": "json_object"})
        assert answer.text == '{"a": 1}'
        assert answer.headers["x-headrace-golden"] == "json"


@asynchronous
async def test_a_request_that_ends_after_its_tenant_left_recordings_is_not_kept(tmp_path: Path) -> None:
    engine, sections = setup()
    sections["tenants"] = {}
    keys = (*KEYS, KeyConfig(name="root", key="root-secret", admin="write"))
    async with caching(tmp_path, keys=keys, **sections) as running:
        running.engine.answer = words("It is ", "Lyon ", "[7].")
        engine.answer = None
        root = {"authorization": "Bearer root-secret"}
        await running.ask("POST", "/admin/v1/tenants", {"name": "green", "record": True}, **root)
        key = (await running.ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "green"}, **root)).json["secret"]
        green = {"authorization": f"Bearer {key}"}
        asked = asyncio.create_task(running.chat("Where?", key=green, sources=SOURCES))
        await until(lambda: len(engine.streams) == 1)  # the golden variant answers
        assert (await running.ask("PATCH", "/admin/v1/tenants/green", {"record": False}, **root)).status == 200
        say(engine.streams[0], "It is Paris [1].", end=True)
        assert (await asked).headers["x-headrace-golden"] == "citations"
        assert (await running.ask("GET", "/admin/v1/hard-cases", **root)).body == b""
    assert list(tmp_path.rglob("*.jsonl")) == []  # nor is it recorded


@asynchronous
async def test_deleted_tenants_are_forgotten(tmp_path: Path) -> None:
    _, sections = setup()
    sections["tenants"] = {}
    keys = (*KEYS, KeyConfig(name="root", key="root-secret", admin="write"))
    async with caching(tmp_path, keys=keys, **sections) as running:
        running.engine.answer = words("It is ", "Lyon ", "[7].")
        root = {"authorization": "Bearer root-secret"}
        made = await running.ask("POST", "/admin/v1/tenants", {"name": "green", "record": True}, **root)
        assert made.status == 200, made.body
        key = (await running.ask("POST", "/admin/v1/keys", {"name": "app", "tenant": "green"}, **root)).json["secret"]
        answer = await running.chat("Where?", key={"authorization": f"Bearer {key}"}, sources=SOURCES)
        assert answer.headers["x-headrace-golden"] == "citations"
        assert (await running.ask("GET", "/admin/v1/hard-cases", **root)).body
        assert (await running.ask("DELETE", "/admin/v1/tenants/green", **root)).status == 200
        assert (await running.ask("GET", "/admin/v1/hard-cases", **root)).body == b""
