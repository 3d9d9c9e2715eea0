"""Rewrites through the server: the cache, the mark, the header, the ledger and pressure."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from headrace.config import KeyConfig, PriceConfig, TenantConfig
from headrace.config.cache_section import ExactConfig
from headrace.config.routing_section import ChainConfig, GoldenConfig, RewriteConfig, RoutingConfig, StepConfig
from tests.gateway.degradation.shaping.test_shaping_served import Pressed, ladder
from tests.gateway.routing.test_routing_served import LOST, cascading, content, routed, sure
from tests.support.caching_server import BLUE, KEYS, RED
from tests.support.running_server import asynchronous, fails, words

PRICES = {"mini": PriceConfig(input=10.0, output=100.0), "calm": PriceConfig(input=1.0, output=10.0)}


CACHE = ExactConfig(mode="on")


def rewriting(**changes: object) -> RoutingConfig:
    return RoutingConfig(rewrites={"steady": RewriteConfig(**changes)})  # pyright: ignore[reportArgumentType]


@asynchronous
async def test_a_sampled_answer_is_rewritten_once_and_then_served_from_the_cache(tmp_path: Path) -> None:
    async with routed(tmp_path, rewriting(surfaces=("chat",), variant="calm"), "calm", prices=PRICES, exact=CACHE) as (
        running,
        engines,
    ):
        first = await running.chat("Hello", key=RED, temperature=0.9)
        assert content(first) == "calm says so"
        assert first.json["model"] == "calm"
        assert first.json["headrace"]["rewrite"]["draft_variant"] == "mini"
        assert first.headers["x-headrace-route"].startswith("rewrite calm (by steady)")
        drafted, rewritten = engines["mini"].streams[0].request, engines["calm"].streams[0].request
        assert (drafted.sampling.temperature, rewritten.sampling.temperature) == (0.9, 0.0)
        assert len(rewritten.prompt) > len(drafted.prompt)
        rows = {row["variant"]: row for row in await running.usage(by="variant")}
        assert {name: row["output_tokens"] for name, row in rows.items()} == {
            "mini": first.json["usage"]["completion_tokens"] - 3,
            "calm": 3,
        }
        again = await running.chat("Hello", key=RED, temperature=0.9)
        assert content(again) == "calm says so"
        assert again.headers["x-headrace-cache"].startswith("exact")
        assert "rewrite" not in again.json["headrace"]
        streamed = await running.chat("Hello", key=RED, temperature=0.9, stream=True)
        assert streamed.text == "calm says so"
        assert (len(engines["mini"].streams), len(engines["calm"].streams)) == (1, 1)
        # The same request without a rewrite is another one, which the cache does not keep.
        plain = await running.chat("Hello", key=RED, temperature=0.9, rewrite="none")
        assert content(plain) != "calm says so"
        assert "x-headrace-cache" not in plain.headers


@asynchronous
async def test_a_draft_that_is_served_is_not_cached(tmp_path: Path) -> None:
    async with routed(tmp_path, rewriting(variant="calm"), "calm", exact=CACHE) as (running, engines):
        engines["calm"].answer = words("It was 1999")
        for _ in range(2):
            answer = await running.chat("Hello", key=RED, temperature=0.9, rewrite="steady")
            assert answer.json["headrace"]["rewrite"] == {"kept_draft": "the rewrite changes numbers"}
            assert answer.json["model"] == "mini"
        first, again = engines["mini"].streams
        assert first.request.sampling == again.request.sampling  # the draft is the same all the same


@asynchronous
async def test_a_request_names_a_rewrite_or_is_served_as_it_is(tmp_path: Path) -> None:
    async with routed(tmp_path, rewriting(), "calm") as (running, engines):
        engines["mini"].answer = words("mini ", "says")
        plain = await running.chat("Hello", key=RED, temperature=0.9)
        assert "x-headrace-route" not in plain.headers
        named = await running.chat("Hello", key=RED, temperature=0.9, rewrite="steady")
        assert named.json["headrace"]["rewrite"]["variant"] == "mini"
        assert len(engines["mini"].streams) == 3
        for changes, why in (
            ({"ignore_eos": True}, "the answer has a fixed length"),
            ({"logprobs": True}, "log-probabilities are"),
        ):
            answer = await running.chat("Hello", key=RED, temperature=0.9, rewrite="steady", **changes)
            assert answer.status == 200, answer.text
            assert f"rewrite mini (not by steady: {why}" in answer.headers["x-headrace-route"]
        wrong = await running.chat("Hello", key=RED, rewrite="stead")
        assert (wrong.status, wrong.error["param"]) == (400, "rewrite")


@asynchronous
async def test_a_key_without_the_rewriters_model_gets_the_draft_and_is_told(tmp_path: Path) -> None:
    keys = (*KEYS, KeyConfig(name="small", key="small-secret", models=("mini",)))
    small = {"authorization": "Bearer small-secret"}
    routing = rewriting(surfaces=("chat",), variant="calm")
    async with routed(tmp_path, routing, "calm", keys=keys) as (running, engines):
        for changes in ({}, {"rewrite": "steady"}):
            answer = await running.chat("Hello", key=small, temperature=0.9, **changes)
            assert (answer.status, answer.json["model"]) == (200, "mini")
            why = "rewrite mini (not by steady: calm is not among the key's models)"
            assert answer.headers["x-headrace-route"] == why
        assert (len(engines["mini"].streams), len(engines["calm"].streams)) == (2, 0)
        allowed = await running.chat("Hello", key=RED, temperature=0.9)
        assert allowed.json["model"] == "calm"


@asynchronous
async def test_a_sampled_answer_of_a_fallback_is_no_rewrite_even_by_the_rewriter(tmp_path: Path) -> None:
    routing = replace(
        rewriting(surfaces=("chat",), variant="calm"),
        chains={"safe": ChainConfig(steps=(StepConfig(variant="mini"), StepConfig(variant="calm")))},
    )
    async with routed(tmp_path, routing, "calm", exact=CACHE) as (running, engines):
        engines["mini"].answer = fails(LOST)
        for count in (1, 2):
            answer = await running.chat("Hello", key=RED, temperature=0.9, stream=True)
            assert (answer.status, answer.text) == (200, "calm says so")
            assert "x-headrace-cache" not in answer.headers
            assert len(engines["calm"].streams) == count
        assert engines["calm"].streams[0].request.sampling.temperature == 0.9


@asynchronous
async def test_a_golden_answer_instead_of_a_rewrite_is_neither_marked_nor_cached(tmp_path: Path) -> None:
    routing = replace(
        rewriting(surfaces=("chat",), variant="calm"), golden=GoldenConfig(checks=("citations",), variant="calm")
    )
    async with routed(tmp_path, routing, "calm", exact=CACHE) as (running, engines):
        engines["mini"].answer = engines["calm"].answer = words("It is so [9].")
        for count in (1, 2):
            answer = await running.chat("Hello", key=RED, temperature=0.9, sources=[{"id": "a", "text": "It is so."}])
            assert answer.headers["x-headrace-golden"] == "citations"
            assert "x-headrace-cache" not in answer.headers
            assert "rewrite" not in answer.json.get("headrace", {})
            assert len(engines["calm"].streams) == 2 * count  # a rewrite and the golden answer


@asynchronous
async def test_a_rewriter_with_other_files_finds_no_answers_of_the_old_one(tmp_path: Path) -> None:
    async with routed(tmp_path, rewriting(surfaces=("chat",), variant="calm"), "calm", exact=CACHE) as (
        running,
        engines,
    ):
        fleet = running.server.services.fleet
        calm = fleet.served["calm"]
        for fingerprint, count in (("fp_calm", 1), ("fp_calm", 1), ("fp_calmer", 2), ("fp_calmer", 2), ("fp_calm", 2)):
            fleet.served["calm"] = replace(calm, fingerprint=fingerprint)
            assert content(await running.chat("Hello", key=RED, temperature=0.9)) == "calm says so"
            assert len(engines["calm"].streams) == count


@asynchronous
async def test_a_cascade_whose_small_model_has_other_files_finds_no_answers_of_the_old_one(tmp_path: Path) -> None:
    async with routed(tmp_path, cascading(), "small", exact=CACHE) as (running, engines):
        engines["small"].answer = sure(-0.05, "surely ", "small")
        fleet = running.server.services.fleet
        for fingerprint, count in (("fp_small", 1), ("fp_small", 1), ("fp_other", 2)):
            fleet.served["small"] = replace(fleet.served["small"], fingerprint=fingerprint)
            assert content(await running.chat("Hello", key=RED)) == "surely small"
            assert len(engines["small"].streams) == count


@asynchronous
async def test_under_pressure_the_draft_is_served_unless_the_request_or_its_tenant_declines(tmp_path: Path) -> None:
    tenants = {"red": TenantConfig(), "blue": TenantConfig(ladder=False), "boss": TenantConfig()}
    routing = rewriting(surfaces=("chat",), variant="calm")
    surfaces = ladder("max_tokens", "stale", "refuse")
    async with routed(tmp_path, routing, "calm", surfaces=surfaces, tenants=tenants) as (running, engines):
        pressure = Pressed(running)
        assert (await running.chat("Hello", key=RED, temperature=0.9)).json["model"] == "calm"
        pressure.queue = {"red": 1.0, "blue": 1.0}
        draft = await running.chat("Hello", key=RED, temperature=0.9)
        assert draft.json["model"] == "mini"
        assert draft.json["headrace"]["rewrite"] == {"kept_draft": "the surface is under pressure"}
        for key, changes in ((RED, {"degrade": "off"}), (BLUE, {})):
            answer = await running.chat("Hello", key=key, temperature=0.9, **changes)
            assert (answer.status, answer.json["model"]) == (200, "calm")
            assert "x-headrace-degraded" not in answer.headers
        assert len(engines["calm"].streams) == 3
