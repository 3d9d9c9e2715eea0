"""Checks, and the health of all variants."""

from __future__ import annotations

import asyncio

from headrace.config.breaker_section import BreakerConfig
from headrace.config.routing_section import VariantHealthConfig
from headrace.gateway.circuit_breaker import BreakerState
from headrace.gateway.routing.health import HealthCheck, VariantHealth
from tests.support.running_server import asynchronous


def test_a_check_falls_and_rises_after_so_many_answers_in_a_row() -> None:
    check = HealthCheck(VariantHealthConfig(fall=3, rise=2))
    for heard, well in (
        ("no no yes no no", True),
        ("no", False),
        ("yes no yes", False),
        ("yes", True),
    ):
        for each in heard.split():
            if each == "yes":
                check.passed()
            else:
                check.failed("gone")
        assert check.healthy == well


@asynchronous
async def test_a_variant_that_does_not_answer_is_left_alone_and_comes_back() -> None:
    health = VariantHealth(check=VariantHealthConfig(within_s=0.01, fall=2, rise=1))
    there = False

    async def probe() -> None:
        if not there:
            await asyncio.Event().wait()

    async def fails() -> None:
        raise OSError("connection refused")

    for _ in range(2):
        assert health.why_not("mini") is None
        await health.probe("mini", probe)
        await health.probe("upstream", fails)
    assert health.why_not("mini") == "it does not answer: no answer within 0.01 s"
    assert health.why_not("upstream") == "it does not answer: connection refused"
    assert health.why_not("draft") is None
    there = True
    await health.probe("mini", probe)
    assert health.why_not("mini") is None


@asynchronous
async def test_watching_asks_all_again_and_again_until_it_is_cancelled() -> None:
    health = VariantHealth(check=VariantHealthConfig(every_s=0.005))
    asked: list[str] = []
    enough = asyncio.Event()

    async def probe(name: str) -> None:
        asked.append(name)
        if len(asked) >= 6:
            enough.set()

    watching = asyncio.ensure_future(health.watch({"a": lambda: probe("a"), "b": lambda: probe("b")}))
    await enough.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert asked.count("a") >= 3
    assert asked.count("b") >= 3


def test_the_breaker_of_one_variant_is_nobody_elses() -> None:
    heard: list[tuple[str, BreakerState]] = []
    config = BreakerConfig(least_calls=4)
    health = VariantHealth(config, changed=lambda variant, state: heard.append((variant, state)))
    for _ in range(4):
        permit = health.breaker("a").enter()
        assert permit is not None
        permit.failed()
    assert health.why_not("a") is not None
    assert health.why_not("b") is None
    assert health.breaker("a") is health.breaker("a")
    assert heard == [("a", "open")]
