"""The metrics that are computed from latencies, as Prometheus reads them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from headrace.config import CacheConfig, ExactConfig, PriceConfig, SloConfig
from tests.support.admin_server import administered
from tests.support.running_server import asynchronous, words


@asynchronous
async def test_latencies_costs_and_objectives_are_exposed_with_bounded_labels(tmp_path: Path) -> None:
    slo = {"chat": SloConfig(ttft_p95_ms=60_000.0, availability=0.999)}
    async with administered(tmp_path, slo=slo) as server:
        server.engine.answer = words("a ", "b ", "c")
        for number in range(30):
            await server.chat("caller-secret", user=f"user {number}", model="mini")
            await server.chat("caller-secret", model=f"nothing-{number}")
        text = (await server.ask("GET", "/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = families["headrace_latency_seconds"].samples
        counts = {
            each.labels["latency"]: each.value for each in samples if each.name == "headrace_latency_seconds_count"
        }
        assert counts["ttft"] == 30
        assert counts["itl"] == 60
        buckets = [
            (float(each.labels["le"]), each.value)
            for each in samples
            if each.name.endswith("_bucket") and each.labels["latency"] == "ttft"
        ]
        assert buckets == sorted(buckets)
        assert buckets[-1] == (float("inf"), 30)
        assert {each.labels["model"] for each in samples} == {"mini"}
        assert {each.labels["tenant"] for each in samples} == {"red"}
        vllm = families["vllm:time_to_first_token_seconds"].samples
        assert [each.value for each in vllm if each.name.endswith("_count")] == [30]
        events = {
            (each.labels["objective"], each.labels["outcome"]): each.value
            for each in families["headrace_slo_events"].samples
        }
        assert events["availability", "good"] == events["ttft_p95_ms", "good"] == 30
        live = await server.did("GET", "live")
        assert [each["attainment"] for each in live["objectives"]] == [1.0, 1.0]
        assert live["latency"]["all"]["good"] == 30
        assert "nothing-1" not in text
        assert "user 1" not in text


@asynchronous
async def test_what_a_cache_saves_is_told_by_tenant(tmp_path: Path) -> None:
    prices = {"mini": PriceConfig(input=1.0, output=2.0)}
    async with administered(tmp_path, cache=CacheConfig(exact=ExactConfig(mode="on")), prices=prices) as server:
        server.engine.answer = words("a ", "b ", "c")
        answers = [await server.chat("caller-secret", temperature=0) for _ in range(3)]
        text = (await server.ask("GET", "/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}

        def of(name: str) -> float:
            (sample,) = [each for each in families[name].samples if each.labels["cache"] == "exact"]
            assert sample.labels["tenant"] == "red"
            return sample.value

        assert of("headrace_cache_answers") == 2
        assert of("headrace_cache_saved_micros") == 2 * answers[0].json["headrace"]["cost_micros"] > 0
        assert of("headrace_cache_saved_seconds") > 0
        (tenant,) = (await server.did("GET", "live"))["tenants"]
        assert (tenant["cache_hits"], tenant["saved_micros"]) == (2, of("headrace_cache_saved_micros"))
