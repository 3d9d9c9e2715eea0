"""Chains in the order of capacity: the soonest server first, conversations at home, and what was placed meanwhile."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from headrace.config import ModelConfig
from headrace.config.routing_section import ChainConfig, RoutingConfig, StepConfig
from headrace.config.upstream_section import UpstreamConfig, UpstreamHealthConfig
from headrace.gateway.routing.capacity_order import CapacityOrder, PromptLength, _home
from headrace.gateway.routing.router import HEADER, Router
from headrace.gateway.serving.capacity import VariantCapacity
from headrace.server.server import Server
from tests.gateway.serving.test_capacity import Measured, replica
from tests.support.running_server import (
    CHAT,
    FakeEngine,
    Running,
    asynchronous,
    config_of,
    living,
    serving,
    words,
)
from tests.support.scripted_answers import asked_for, exchange_of

STEPS = tuple(StepConfig(variant=name) for name in ("a", "b", "c"))
EVERYWHERE = 1e6  # seconds that no server is sooner than another


def capacity(seconds: float, *, speed: float | None = 1000.0, at: float = 1.0) -> VariantCapacity:
    return VariantCapacity(ttft_s={"chat": seconds, "voice": seconds / 2}, prompt_tokens_per_s=speed, at=at)


def order_of(**known: VariantCapacity) -> CapacityOrder:
    return CapacityOrder(lambda variant: known.get(variant, VariantCapacity()))


def names(found: tuple[list[StepConfig], str]) -> str:
    return "".join(step.variant for step in found[0])


def test_the_soonest_is_first_and_what_is_unknown_last() -> None:
    order = order_of(a=capacity(0.9), c=capacity(0.1))
    found = order.sort(STEPS, "chat", b"one", 0.0)
    assert (names(found), found[1].removeprefix("home, ")) == ("cab", "100 ms to the first token")
    assert order.predict("a", "voice") == 0.45
    assert order.predict("a", "batch") == 0.9  # a surface without a prediction waits as long as the slowest
    assert order_of().sort(STEPS, "chat", b"one", 0.0) == (list(STEPS), "")


def test_a_conversation_stays_at_home_until_another_is_much_sooner() -> None:
    level = order_of(a=capacity(0.3), b=capacity(0.2), c=capacity(0.25))
    homes = {number: names(level.sort(STEPS, "chat", b"%d" % number, EVERYWHERE))[0] for number in range(300)}
    assert all(60 < found < 140 for found in Counter(homes.values()).values())
    again = order_of(a=capacity(0.2), b=capacity(0.3), c=capacity(0.2))
    assert homes == {number: names(again.sort(STEPS, "chat", b"%d" % number, 0.15))[0] for number in range(300)}
    two = STEPS[:2]  # a server that is gone moves its own conversations alone
    for number, home in homes.items():
        if home != "c":
            assert names(level.sort(two, "chat", b"%d" % number, EVERYWHERE))[0] == home
    busy = order_of(a=capacity(3.0), b=capacity(0.2), c=capacity(0.25))
    moved = [names(busy.sort(STEPS, "chat", b"%d" % number, 0.1))[0] for number, home in homes.items() if home == "a"]
    assert set(moved) == {"b"}


def test_what_was_placed_since_the_prediction_counts() -> None:
    known = {"a": capacity(0.1), "b": capacity(0.5)}
    order = CapacityOrder(lambda variant: known[variant])
    placed: list[str] = []
    for number in range(12):
        variant = names(order.sort(STEPS[:2], "chat", b"%d" % number, 0.0))[0]
        order.place(variant, STEPS[:2], b"%d" % number)
        placed.append(variant)
    # Each adds 256 tokens at 1000 tokens/s: a is at 0.612 s after two.
    assert placed[:4] == ["a", "a", "b", "a"]
    assert Counter(placed) == {"a": 7, "b": 5}
    known["a"] = capacity(0.1, at=2.0)  # a new prediction knows them
    assert order.predict("a", "chat") == 0.1
    assert order.predict("b", "chat") == 0.5 + 5 * 0.256


def test_the_router_skips_what_is_unavailable_and_says_what_it_went_by() -> None:
    config = RoutingConfig(chains={"hosts": ChainConfig(steps=STEPS, order="capacity", home_ms=1.0)})
    order = order_of(a=capacity(0.9), b=capacity(0.1), c=capacity(0.5))
    ill: dict[str, str] = {}
    router = Router(config, ill.get, order=order, wall=lambda: 0.0)
    plan = router.route(exchange_of(asked_for(), variant="a"))
    assert (plan.variant, [step.variant for step in plan.steps]) == ("b", ["c", "a"])
    assert "capacity b (" in plan.headers()[HEADER]
    assert "chain b (hosts, then c, a)" in plan.headers()[HEADER]
    ill["b"] = "it is overloaded"
    plan = router.route(exchange_of(asked_for(), variant="a"))
    assert (plan.variant, [step.variant for step in plan.steps]) == ("c", ["a"])
    assert "health c (b: it is overloaded)" in plan.headers()[HEADER]
    listed = Router(msgspec.structs.replace(config, chains={"hosts": ChainConfig(steps=STEPS)}), order=order)
    assert listed.route(exchange_of(asked_for(), variant="a")).variant == "a"


@contextlib.asynccontextmanager
async def gateway(*servers: Running) -> AsyncGenerator[Running]:
    """A server without engines, whose chain leads to others."""
    models = {
        f"host{number}": ModelConfig(
            upstream=UpstreamConfig(
                url=f"{each.server.url}/v1", kind="headrace", model="mini", health=UpstreamHealthConfig(path="")
            )
        )
        for number, each in enumerate(servers)
    }
    steps = tuple(StepConfig(variant=name) for name in models)
    routing = RoutingConfig(chains={"hosts": ChainConfig(steps=steps, order="capacity", home_ms=1.0)})
    with tempfile.TemporaryDirectory() as folder:
        made = Server(config_of(Path(folder), models=models, routing=routing))
        async with living(made, lambda task: Running(made, FakeEngine(), made.fleet, task)) as running:  # type: ignore[arg-type]
            yield running


@asynchronous
async def test_requests_go_to_the_server_that_predicts_the_shortest_wait() -> None:
    async with serving(shed_ttft_s=4.0) as one, serving(shed_ttft_s=4.0) as two:
        engines = (Measured(0.5), Measured(0.5))
        for running, engine in zip((one, two), engines, strict=True):
            engine.answer = words("Hello")
            running.fleet.served["mini"].engine = engine
        async with gateway(one, two) as front:

            async def answered_by(*waits: float) -> tuple[int, str]:
                """Ask when the servers predict these waits."""
                for running, engine, wait in zip((one, two), engines, waits, strict=True):
                    engine.replicas = [replica(wait)]
                    await running.server.services.capacity.measure()
                for served in front.server.fleet.served.values():
                    assert served.upstream is not None
                    await served.upstream.read_capacity()
                await front.server.services.capacity.measure()
                before = len(engines[1].streams)
                answer = await front.ask("POST", "/v1/chat/completions", CHAT | {"model": "host0"})
                assert answer.status == 200, answer.body
                return len(engines[1].streams) - before, answer.headers[HEADER.lower()]

            number, route = await answered_by(0.5, 3.0)
            assert number == 0
            assert "capacity host0" in route
            assert (await answered_by(3.0, 0.5))[0] == 1
            number, route = await answered_by(9.0, 2.0)  # the first sheds
            assert number == 1
            number, route = await answered_by(0.1, 9.0)
            assert number == 0
            said = (await front.ask("GET", "/v1/capacity")).json  # a gateway in front of this one can go by it too
            assert {each["model"]: each["ttft_ms"]["chat"] for each in said["data"]} == {
                "host0": 100.0,
                "host1": 9000.0,
            }


def test_a_long_prompt_goes_where_it_is_read_sooner_and_is_read_in_part_at_home() -> None:
    known = {"a": capacity(0.1, speed=500.0), "b": capacity(0.3, speed=4000.0)}
    order = order_of(**known)
    two = STEPS[:2]
    homes = {_home(two, b"%d" % number).variant: b"%d" % number for number in range(20)}
    assert names(order.sort(two, "chat", homes["a"], 0.0, PromptLength(20, 20))) == "ab"
    assert names(order.sort(two, "chat", homes["a"], 0.0, PromptLength(4256, 4256))) == "ba"
    assert order.predict("a", "chat", 4256) == 0.1 + 4000 / 500
    assert names(order.sort(two, "chat", homes["a"], 0.0, PromptLength(4256, 20))) == "ab"  # it has read the rest
    assert names(order.sort(two, "chat", homes["b"], 0.0, PromptLength(4256, 20))) == "ba"
    order.place("a", two, homes["a"], PromptLength(4256, 20))
    assert order.predict("a", "chat") == 0.1 + 20 / 500
    order.place("a", two, homes["b"], PromptLength(4256, 20))
    assert order.predict("a", "chat") == 0.1 + 4276 / 500


def test_the_router_estimates_how_long_a_prompt_is() -> None:
    config = RoutingConfig(chains={"hosts": ChainConfig(steps=STEPS[:2], order="capacity", home_ms=1.0)})
    router = Router(config, order=order_of(a=capacity(0.1, speed=500.0), b=capacity(0.3, speed=4000.0)))
    assert router.route(exchange_of(asked_for("Why?"), variant="a")).variant == "a"
    assert router.route(exchange_of(asked_for("Why? " * 3000), variant="a")).variant == "b"
