"""The router: what a request's plan is, why, past what is not well; and the answering that carries a plan out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config.breaker_section import BreakerConfig
from headrace.config.routing_section import CascadeConfig, HedgeConfig, RoutingConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.images.message_images import images_of
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.calibration import ALWAYS_LARGE, LabelledAnswer, write_labelled
from headrace.gateway.routing.composite_answerer import Answerer, RoutingDecision, derive_exchange
from headrace.gateway.routing.health import VariantHealth
from headrace.gateway.routing.hedge import MIN_SAMPLES
from headrace.gateway.routing.plan_composer import PlanComposer, hedge_policies, routing_decisions
from headrace.gateway.routing.router import HEADER, RoutePlan, Router, route_headers
from headrace.gateway.routing.routing_checks import findings
from headrace.gateway.serving.exchange import Exchange
from tests.support.running_server import asynchronous
from tests.support.scripted_answers import (
    Client,
    Line,
    Scripted,
    answer,
    asked_for,
    broken,
    deliver,
    exchange_of,
    said,
    served,
)

VARIANTS = ("mini", "mini@int4", "draft", "cloud")


def config_of(**sections: Any) -> RoutingConfig:
    return msgspec.convert(sections, RoutingConfig)


def router_of(*, ill: Mapping[str, str] | None = None, **sections: Any) -> Router:
    config = config_of(**sections)
    assert list(findings(config, VARIANTS)) == []
    return Router(config, (ill or {}).get, wall=lambda: 0.0)


LONG = {"name": "long prompts", "when": {"least_tokens": 1000}, "variant": "mini@int4"}
CANARY = {"percent": {"mini": 90.0, "mini@int4": 10.0}}
CASCADE = {"small": "draft", "large": "mini", "threshold": 0.5}
CHAIN = {"steps": [{"variant": "mini"}, {"variant": "cloud", "then": "continue"}, {"variant": "draft"}]}


def test_without_rules_a_request_goes_where_it_is_for() -> None:
    router = router_of()
    assert router.idle
    assert router.route(exchange_of(variant="mini@int4")) == RoutePlan("mini@int4")
    assert router.route(exchange_of()).headers() == {}


def test_a_rule_sends_a_request_to_a_variant_and_says_so() -> None:
    router = router_of(rules=[LONG])
    exchange = exchange_of()
    exchange.prompt_tokens = 1000
    plan = router.route(exchange)
    assert plan.variant == "mini@int4"
    assert plan.headers() == {HEADER: "rule long prompts (to mini@int4)"}
    assert router.route(exchange_of()).variant == "mini"


def test_a_split_is_sticky_and_says_which_part_it_was() -> None:
    router = router_of(rules=[{"name": "canary", "split": "int4"}], splits={"int4": CANARY})
    plans = [router.route(exchange_of(asked_for(user=f"user {number}"))) for number in range(200)]
    again = [router.route(exchange_of(asked_for("Later", user=f"user {number}"))) for number in range(200)]
    assert [plan.variant for plan in plans] == [plan.variant for plan in again]
    assert {plan.variant for plan in plans} == {"mini", "mini@int4"}
    assert plans[0].decisions[1] == RoutingDecision("split", plans[0].variant, "the conversation's share of int4")


def test_a_part_that_is_not_well_goes_to_the_largest_that_is() -> None:
    router = router_of(
        ill={"mini@int4": "it is down"},
        rules=[{"name": "canary", "split": "all"}],
        splits={"all": {"percent": {"draft": 20.0, "mini@int4": 30.0, "mini": 50.0}}},
    )
    plans = [router.route(exchange_of(asked_for(user=f"user {number}"))) for number in range(200)]
    assert {plan.variant for plan in plans} == {"draft", "mini"}
    assert RoutingDecision("health", "mini", "mini@int4: it is down") in {
        each for plan in plans for each in plan.decisions
    }


def test_a_cascade_has_its_small_model_and_its_threshold() -> None:
    router = router_of(rules=[{"name": "cheap", "cascade": "small"}], cascades={"small": CASCADE})
    plan = router.route(exchange_of())
    assert (plan.small, plan.variant) == ("draft", "mini")
    assert plan.cascade == CascadeConfig(small="draft", large="mini", threshold=0.5)


@pytest.mark.parametrize("asked", [asked_for(echo=True), asked_for(prompt_logprobs=1), asked_for(ignore_eos=True)])
def test_where_a_cascade_cannot_be_measured_the_large_model_answers(asked: TextRequest) -> None:
    router = router_of(rules=[{"name": "cheap", "cascade": "small"}], cascades={"small": CASCADE})
    plan = router.route(exchange_of(asked))
    assert (plan.small, plan.variant) == (None, "mini")


def test_a_small_model_that_is_not_well_is_left_out() -> None:
    router = router_of(
        ill={"draft": "it is down"}, rules=[{"name": "cheap", "cascade": "small"}], cascades={"small": CASCADE}
    )
    plan = router.route(exchange_of())
    assert (plan.small, plan.variant) == (None, "mini")
    assert plan.decisions[-1] == RoutingDecision("health", "mini", "draft: it is down")


def test_a_threshold_is_found_from_labelled_answers(tmp_path: Path) -> None:
    rows = [
        LabelledAnswer(confidence={"mean": sure}, small=small, large=1.0, small_cost=1.0, large_cost=10.0)
        for sure, small in ((0.9, 1.0), (0.8, 1.0), (0.3, 0.0))
    ]
    write_labelled(tmp_path / "labelled.jsonl", rows)
    cascade = {
        "small": "draft",
        "large": "mini",
        "calibration": str(tmp_path / "labelled.jsonl"),
        "quality": 1.0,
    }
    router = router_of(rules=[{"name": "cheap", "cascade": "small"}], cascades={"small": cascade})
    plan = router.route(exchange_of())
    assert plan.cascade is not None
    assert plan.cascade.threshold == 0.8
    write_labelled(tmp_path / "labelled.jsonl", rows[2:])
    hopeless = router_of(rules=[{"name": "cheap", "cascade": "small"}], cascades={"small": cascade})
    plan = hopeless.route(exchange_of())
    assert plan.cascade is not None
    assert plan.cascade.threshold == ALWAYS_LARGE


def test_a_chain_is_that_of_its_first_variant_too() -> None:
    router = router_of(chains={"safe": CHAIN})
    assert not router.idle
    plan = router.route(exchange_of())
    assert [plan.variant, *(step.variant for step in plan.steps)] == ["mini", "cloud", "draft"]
    assert plan.decisions == (RoutingDecision("chain", "mini", "safe, then cloud, draft"),)
    assert router.route(exchange_of(variant="draft")) == RoutePlan("draft")


def test_what_is_not_well_is_left_out_of_a_chain_unless_nobody_is_well() -> None:
    ill = {"mini": "it is down"}
    plan = router_of(ill=ill, chains={"safe": CHAIN}).route(exchange_of())
    assert [plan.variant, *(step.variant for step in plan.steps)] == ["cloud", "draft"]
    assert plan.decisions[0] == RoutingDecision("health", "cloud", "mini: it is down")
    ill = {variant: "it is down" for variant in VARIANTS}
    plan = router_of(ill=ill, chains={"safe": CHAIN}).route(exchange_of())
    assert [plan.variant, *(step.variant for step in plan.steps)] == ["mini", "cloud", "draft"]


def lacks(variant: str, text_request: TextRequest) -> str | None:
    return "it reads no images" if variant == "draft" and images_of(text_request.messages) else None


def test_images_go_to_variants_that_read_them() -> None:
    sections = {
        "rules": [
            {"name": "long", "when": {"surfaces": ["batch"]}, "variant": "draft"},
            {"name": "split", "when": {"surfaces": ["voice"]}, "split": "half"},
            {"name": "two", "when": {"surfaces": ["agent"]}, "cascade": "two"},
            {"name": "chain", "chain": "three"},
        ],
        "splits": {"half": {"percent": {"mini": 0.001, "draft": 99.999}}},
        "cascades": {"two": CASCADE},
        "chains": {"three": {"steps": [{"variant": "draft"}, {"variant": "mini"}, {"variant": "cloud"}]}},
    }
    router = Router(config_of(**sections), why_not_for=lacks, wall=lambda: 0.0)
    image = {"role": "user", "content": "\ufffc", "images": [{"url": "data:image/png;base64,aa"}]}

    def plan(surface: str, messages: list[dict[str, Any]]) -> RoutePlan:
        exchange = exchange_of(TextRequest(model="mini", messages=messages, surface=surface))
        exchange.surface = surface
        return router.route(exchange)

    for surface in ("batch", "voice", "agent", "chat"):
        found = plan(surface, [image])
        used = [found.variant, *(step.variant for step in found.steps)]
        assert (found.small, "draft" in used) == (None, False), surface
        assert "draft: it reads no images" in str(found.headers()), surface
        text = plan(surface, [{"role": "user", "content": "hi"}])
        assert "draft" in (text.variant, text.small), surface


def test_a_header_is_short_and_plain_whatever_names_are() -> None:
    decisions = [RoutingDecision("rule", "Mühle\r\nset-cookie: x", "y" * 900)]
    (shown,) = route_headers(decisions).values()
    assert len(shown) == 512
    assert shown.startswith("rule M?hle??set-cookie")


# What is wrong with a configuration


@pytest.mark.parametrize(
    ("sections", "where", "what"),
    [
        ({"rules": [{"name": "a", "variant": "maxi"}]}, "routing.rules[0].variant", 'unknown variant "maxi"'),
        ({"rules": [{"name": "a", "split": "x"}]}, "routing.rules[0].split", 'unknown split "x"; known splits: none'),
        ({"rules": [{"name": "a"}]}, "routing.rules[0]", "exactly one of variant, split, cascade, chain, opening"),
        (
            {"rules": [{"name": "a", "variant": "mini", "chain": "safe"}], "chains": {"safe": CHAIN}},
            "routing.rules[0]",
            "found variant and chain",
        ),
        (
            {"rules": [{"name": "a", "variant": "mini"}, {"name": "a", "variant": "mini"}]},
            "routing.rules[1].name",
            "duplicate name",
        ),
        (
            {"rules": [{"name": "a", "variant": "mini", "when": {"surfaces": ["phone"]}}]},
            "routing.rules[0].when.surfaces[0]",
            'unknown surface "phone"',
        ),
        (
            {"rules": [{"name": "a", "variant": "mini", "when": {"languages": ["xx"]}}]},
            "routing.rules[0].when.languages[0]",
            'unknown language "xx"',
        ),
        (
            {"rules": [{"name": "a", "variant": "mini", "when": {"hours": ["8-9"]}}]},
            "routing.rules[0].when.hours[0]",
            'found "8-9"',
        ),
        (
            {"rules": [{"name": "a", "variant": "mini", "when": {"least_tokens": 9, "most_tokens": 8}}]},
            "routing.rules[0].when.most_tokens",
            "expected at least least_tokens, 9, found 8",
        ),
        ({"splits": {"c": {"percent": {"mini": 99.0}}}}, "routing.splits.c.percent", "add up to 100 percent, found 99"),
        (
            {"splits": {"c": {"percent": {"mini": 50.0, "maxi@x": 50.0}}}},
            'routing.splits.c.percent."maxi@x"',
            "unknown variant",
        ),
        ({"cascades": {"c": CASCADE | {"large": "draft"}}}, "routing.cascades.c.large", "a variant other than"),
        ({"cascades": {"c": {"small": "draft", "large": "mini"}}}, "routing.cascades.c", "found none"),
        (
            {"cascades": {"c": {"small": "draft", "large": "mini", "calibration": "/nowhere.jsonl"}}},
            "routing.cascades.c.calibration",
            "/nowhere.jsonl",
        ),
        ({"chains": {"c": {"steps": []}}}, "routing.chains.c.steps", "at least one step"),
        ({"chains": {"c": {"steps": [{"variant": "x"}]}}}, "routing.chains.c.steps[0].variant", "unknown variant"),
        ({"hedges": {"x": {}}}, "routing.hedges.x", "unknown variant"),
        ({"hedges": {"mini": {"least_ms": 9.0, "most_ms": 8.0}}}, "routing.hedges.mini.most_ms", "found 8"),
        ({"breaker": {"open_s": 9.0, "open_most_s": 8.0}}, "routing.breaker.open_most_s", "found 8"),
        ({"timezone": "Mars/Olympus"}, "routing.timezone", 'unknown time zone "Mars/Olympus"'),
    ],
)
def test_a_mistake_is_told_with_its_place(sections: dict[str, Any], where: str, what: str) -> None:
    found = dict(findings(config_of(**sections), VARIANTS))
    assert list(found) == [where]
    assert what in found[where]


# What is done with a plan


class House:
    """Variants that follow scripts; what is left of a variant's script is its next part's."""

    def __init__(self, scripts: Mapping[str, list[list[Line]]], **options: Any) -> None:
        self.scripts = {name: list(each) for name, each in scripts.items()}
        self.parts: list[Scripted] = []
        self.ended: list[tuple[ApiError | None, bool]] = []
        self.health = VariantHealth(BreakerConfig(least_calls=2, open_s=60.0))
        self.composer = PlanComposer(
            self.make, self.health, settled=lambda _, error, gone: self.ended.append((error, gone)), **options
        )

    def make(self, variant: str, exchange: Exchange, asked: TextRequest, alone: bool) -> Answerer:
        part = Scripted(derive_exchange(exchange, served(variant), asked), self.scripts[variant].pop(0))
        self.parts.append(part)
        return part

    async def answer(
        self, plan: RoutePlan, exchange: Exchange | None = None
    ) -> tuple[Client, Exchange, list[RoutingDecision]]:
        exchange, client = exchange or exchange_of(), Client()
        answers = self.composer.answering(exchange, plan)
        error = await deliver(answers, client)
        assert [error] == [told for told, _ in self.ended[-1:]]
        for part in self.parts:
            assert part.settled == 1
        return client, exchange, routing_decisions(answers)


@asynchronous
async def test_a_plain_plan_is_one_part_and_is_settled_once() -> None:
    house = House({"mini": [answer("hello")]})
    client, exchange, decisions = await house.answer(RoutePlan("mini"))
    assert client.texts == {0: "hello"}
    assert exchange.usage == client.told()
    assert exchange.finish == "stop"
    assert decisions == []
    assert house.ended == [(None, False)]


@asynchronous
async def test_a_cascade_within_a_chain_goes_on_where_its_large_model_breaks() -> None:
    router = router_of(
        rules=[{"name": "cheap", "cascade": "small"}],
        cascades={"small": CASCADE},
        chains={"safe": {"steps": [{"variant": "mini"}, {"variant": "cloud", "then": "restart"}]}},
    )
    house = House(
        {
            "draft": [[said("unsure", logprob=-3.0), *answer()]],
            "mini": [[said("The mi"), broken()]],
            "cloud": [answer("The ", "mill")],
        }
    )
    client, exchange, decisions = await house.answer(router.route(exchange_of()))
    assert client.texts == {0: "The mill"}
    assert len(client.restarts) == 1
    assert exchange.usage == client.told()
    assert exchange.model == "cloud"
    assert [each.stage for each in decisions] == ["cascade", "fallback"]


@asynchronous
async def test_a_cascade_that_answers_by_its_small_model_says_its_name() -> None:
    house = House({"draft": [[said("sure", logprob=-0.01), *answer()]]})
    client, exchange, _ = await house.answer(
        RoutePlan("mini", cascade=CascadeConfig(small="draft", large="mini", threshold=0.5))
    )
    assert client.texts == {0: "sure"}
    assert exchange.model == "draft"
    assert exchange.served.name == "draft"


@asynchronous
async def test_a_hedge_is_between_two_parts_of_one_variant_and_one_is_charged() -> None:
    hedgings = hedge_policies({"mini": HedgeConfig(least_ms=5.0, most_ms=10.0)}, lambda variant: variant == "mini")
    for _ in range(MIN_SAMPLES):
        hedgings["mini"].record_first_token(0.001)
        hedgings["mini"].record_request()
    house = House({"mini": [[asyncio.Event()], answer("quick")]}, hedgings=hedgings)
    client, exchange, decisions = await house.answer(RoutePlan("mini"))
    assert client.texts == {0: "quick"}
    assert exchange.usage == client.told()
    assert [each.why for each in decisions] == ["the second of two requests answered first"]


@asynchronous
async def test_calls_that_fail_open_the_breaker_and_then_nobody_is_asked() -> None:
    house = House({"mini": [[broken()], [broken()]]})
    for _ in range(2):
        await house.answer(RoutePlan("mini"))
    assert house.health.why_not("mini") is not None
    asked = len(house.parts)
    house.scripts["mini"] = [answer("never")]
    exchange, client = exchange_of(), Client()
    error = await deliver(house.composer.answering(exchange, RoutePlan("mini")), client)
    assert error is not None
    assert error.code == "variant_unavailable"
    assert error.retry_after is not None
    assert error.retry_after > 0
    assert client.texts == {}
    assert len(house.parts) == asked + 1
    assert not house.parts[-1].begun


@asynchronous
async def test_a_variant_with_a_breaker_of_its_own_gets_none_of_ours() -> None:
    house = House({"cloud": [[broken()] for _ in range(5)]}, own_breakers=("cloud",))
    for _ in range(5):
        await house.answer(RoutePlan("cloud"))
    assert house.health.why_not("cloud") is None


@asynchronous
async def test_requests_that_are_wrong_open_no_breaker() -> None:
    wrong = ApiError("the deadline cannot be met", kind="overloaded_error", code="deadline_unreachable")
    house = House({"mini": [[wrong] for _ in range(10)]})
    for _ in range(10):
        await house.answer(RoutePlan("mini"))
    assert house.health.why_not("mini") is None


@asynchronous
async def test_a_client_that_leaves_is_no_failure_of_the_variant() -> None:
    house = House({"mini": [[asyncio.Event()] for _ in range(4)]})
    for _ in range(4):
        answers = house.composer.answering(exchange_of(), RoutePlan("mini"))
        await answers.begin()
        running = asyncio.ensure_future(answers.run(Client().take))
        await asyncio.sleep(0)
        answers.cancel()
        assert await running
        answers.settle()
    assert house.health.why_not("mini") is None
    assert house.ended == [(None, True)] * 4
