"""The price of a faster option: its latency, cost and quality beside what it replaces, as measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config import ModelConfig
from headrace.config.lab.safety_section import SafetyConfig
from headrace.config.ledger_section import PriceConfig
from headrace.config.routing_section import RoutingConfig, ShadowConfig
from headrace.engine.interface.request import AdapterRef
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.observe.latency.latency_book import LatencyBook, RequestSample, Slice
from tests.support.accounts import bearer, declared
from tests.support.admin_server import Administered, administered
from tests.support.running_server import FakeEngine, asynchronous, tokenizer, until, words

MODELS = {"mini": ModelConfig(variants={"int4": {}}), "draft": ModelConfig()}
PRICES = {"mini": PriceConfig(input=2.0, output=4.0), "mini@int4": PriceConfig(input=1.0, output=2.0)}
GATE = {
    "passed": True,
    "candidate": "http://lab:8000#mini@int4",
    "baseline": "mini",
    "started_at": "2026-11-20T10:00:00+00:00",
    "cases": 200,
    "metrics": [{"name": "exact_match", "verdict": "inconclusive", "candidate": 0.9, "baseline": 1.0, "count": 200}],
    "notes": [],
}


def record(book: LatencyBook, model: str, e2e: float, length: str = "<=128", times: int = 30, **changes: Any) -> None:
    for _ in range(times):
        slice = Slice(model, "chat", "-", "/v1/x", length, "direct", changes.get("profile", "standard"))
        seconds = {"ttft": e2e / 4, "e2e": e2e}
        book.record(RequestSample(slice, seconds, micros=changes.get("micros", 0), machine_s=e2e))


async def options(server: Administered, model: str = "mini", key: str = "caller-secret") -> dict[str, Any]:
    answer = await server.ask("GET", f"/v1/models/{model}/options", **bearer(key))
    assert answer.status == 200, answer.body
    return {each["option"]: each for each in answer.json["data"]} | {"": answer.json}


@asynchronous
async def test_latency_and_cost_are_compared_within_prompts_of_one_length(tmp_path: Path) -> None:
    async with administered(tmp_path, models=MODELS, prices=PRICES) as server:
        book = server.server.services.observer.latencies
        record(book, "mini", 1.0, micros=100)
        record(book, "mini", 8.0, "<=2048", micros=900)
        record(book, "mini@int4", 0.5, micros=60)  # only short prompts: its mix must not make it look faster still
        record(book, "mini", 0.8, profile="fast", times=19)
        found = await options(server)
        int4 = found["mini@int4"]
        assert (int4["kind"], int4["request"], int4["compared"]) == ("variant", {"model": "mini@int4"}, 30)
        for name in ("ttft", "e2e"):
            assert int4["latency"][name]["change"] == pytest.approx(-0.5, abs=0.02)
        assert int4["latency"]["e2e"]["base_p50_ms"] == pytest.approx(1000, rel=0.02)
        assert (int4["cost"]["micros_per_1000_requests"], int4["cost"]["change"]) == (60_000, -0.4)
        assert int4["price"] == {"input": "1.000000", "cached": "1.000000", "output": "2.000000", "second": "0.000000"}
        assert int4["summary"].startswith("first token \N{MINUS SIGN}50 %; whole answer \N{MINUS SIGN}50 %; price")
        fast = found["fast"]
        assert (fast["latency"], fast["cost"], fast["requests"]) == (None, None, 19)
        assert "19 of 20 comparable requests" in fast["summary"]
        record(book, "mini", 0.8, profile="fast", times=1)
        fast = (await options(server))["fast"]
        assert fast["latency"]["e2e"]["change"] == pytest.approx(math.log(0.8), abs=0.05)
        assert fast["request"] == {"profile": "fast"}


@asynchronous
async def test_the_quality_of_a_variant_is_what_its_gate_has_found(tmp_path: Path) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    (gates / "old.json").write_text(json.dumps(GATE | {"passed": False, "started_at": "2026-11-01T10:00:00+00:00"}))
    (gates / "new.json").write_text(json.dumps(GATE))
    (gates / "broken.json").write_text("{")
    async with administered(tmp_path / "storage", models=MODELS, safety=SafetyConfig(gates=str(gates))) as server:
        (quality,) = (await options(server))["mini@int4"]["quality"]
        assert (quality["by"], quality["passed"], quality["prompts"]) == ("gate", True, 200)
        assert quality["summary"] == "gate passed on 200 prompts (1 of 1 metrics inconclusive)"
        assert (await options(server, "mini@int4"))["mini"]["quality"] == []
        (gates / "new.json").write_text(json.dumps(GATE | {"passed": False, "cases": 9}))
        (gates / "new.json").touch()
        (quality,) = (await options(server))["mini@int4"]["quality"]
        assert (quality["passed"], quality["prompts"]) == (False, 9)


@asynchronous
async def test_a_shadow_in_the_fast_profile_measures_what_the_profile_changes(tmp_path: Path) -> None:
    routing = RoutingConfig(shadows={"fast": ShadowConfig(variant="mini", profile="fast", share=1.0)})
    async with administered(tmp_path, models=MODELS, routing=routing) as server:
        server.engine.answer = words("a ", "b ", "c")
        plain = await server.chat("caller-secret", temperature=0.9, max_tokens=500)
        assert "option" not in plain.json["headrace"]
        await until(lambda: len(server.engine.streams) == 2)
        copied = server.engine.streams[1].request
        assert (copied.max_tokens, copied.sampling.temperature, copied.surface) == (160, 0.3, "batch")
        shadows = (await server.did("GET", "shadows"))["data"]
        await until(lambda: server.server.services.answer_observers[1].total.compared == 1)
        (quality,) = (await options(server))["fast"]["quality"]
        assert (quality["by"], quality["differences"]["similarity"]) == ("shadow", 1.0)
        assert shadows[0]["profile"] == "fast"
        # A request that chooses the profile hears its price.
        answer = await server.chat("caller-secret", profile="fast")
        option = answer.json["headrace"]["option"]
        assert option["name"] == "fast"
        assert "answers agree to 1.00 in 1 shadow comparisons" in option["price"]
        assert len(server.engine.streams) == 3  # it is not copied


@asynchronous
async def test_only_what_a_key_may_use_is_an_option(tmp_path: Path) -> None:
    keys = (declared("caller", "caller-secret"), declared("narrow", "narrow-secret", models=("mini@int4",)))
    encoder = ServedVariant(
        name="draft", engine=FakeEngine(), tokenizer=tokenizer(), context=64, fingerprint="fp_e", kind="encoder"
    )
    async with administered(tmp_path, models=MODELS, keys=keys) as server:
        assert "mini@int4" in await options(server)
        assert "mini" not in await options(server, "mini@int4", "narrow-secret")
        for model, key, status in (("mini", "narrow-secret", 404), ("nothing", "caller-secret", 404)):
            assert (await server.ask("GET", f"/v1/models/{model}/options", **bearer(key))).status == status
        server.fleet.served["draft"] = replace(encoder)
        answer = await server.ask("GET", "/v1/models/draft/options", **bearer("caller-secret"))
        assert (answer.status, answer.error["param"]) == (400, "model")


@asynchronous
async def test_only_variants_with_the_same_adapter_are_options_of_each_other(tmp_path: Path) -> None:
    async with administered(tmp_path, models=MODELS) as server:
        for name in ("mini", "mini@int4"):
            adapter = server.fleet.served[name].with_adapter(AdapterRef("orders", "/a", "0" * 64))
            server.fleet.adapters[adapter.name] = adapter
        for model, option in (("mini", "mini@int4"), ("mini:orders", "mini@int4:orders")):
            assert [name for name in await options(server, model) if name.startswith("mini")] == [option]


@asynchronous
async def test_the_fast_profile_is_priced_by_the_variant_that_answers_it(tmp_path: Path) -> None:
    models = {"mini": ModelConfig(variants={"fast": {}})}
    async with administered(tmp_path, models=models) as server:
        book = server.server.services.observer.latencies
        record(book, "mini", 1.0)
        record(book, "mini@fast", 0.25, profile="fast")
        server.engine.answer = server.fleet.served["mini@fast"].engine.answer = words("a ")
        fast = (await options(server))["fast"]
        assert fast["latency"]["e2e"]["change"] == pytest.approx(-0.75, abs=0.02)
        assert fast["about"].endswith("answered by mini@fast")
        answer = await server.chat("caller-secret", profile="fast")
        assert answer.json["model"] == "mini@fast"
        assert "whole answer \N{MINUS SIGN}75 %" in answer.json["headrace"]["option"]["price"]
