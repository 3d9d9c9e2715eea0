"""Which requests a canary's candidate gets."""

from __future__ import annotations

from headrace.config.routing_section import CascadeConfig, StepConfig
from headrace.gateway.requests.text_request import TextRequest, Tool
from headrace.gateway.routing.canary_routes import CanaryRoute, CanaryRoutes
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Caller
from tests.support.scripted_answers import asked_for, exchange_of

PLAN = RoutePlan("mini")


def routes(percent: float, *, run: str = "one", unit: str = "conversation", **options: object) -> CanaryRoutes:
    found = CanaryRoutes(**options)  # type: ignore[arg-type]
    found.by_control = {"mini": CanaryRoute(run, "mini@new", percent, unit)}  # type: ignore[arg-type]
    return found


def arms(found: CanaryRoutes, count: int = 1000) -> dict[int, str]:
    """The arm of each of many conversations."""
    return {
        number: found.apply(exchange_of(asked_for(metadata={"conversation": str(number)})), PLAN).arm
        for number in range(count)
    }


def test_a_share_of_the_conversations_goes_to_the_candidate_and_stays_there() -> None:
    few = arms(routes(10.0))
    assert 60 <= sum(arm == "candidate" for arm in few.values()) <= 140
    assert set(few.values()) == {"control", "candidate"}
    assert arms(routes(10.0)) == few
    more = arms(routes(30.0))
    assert all(more[number] == "candidate" for number, arm in few.items() if arm == "candidate")
    assert arms(routes(10.0, run="two")) != few  # each canary draws its own


def test_the_candidates_plan_falls_back_to_the_control() -> None:
    plan = routes(100.0).apply(exchange_of(), RoutePlan("mini", (StepConfig(variant="last"),)))
    assert (plan.variant, plan.arm) == ("mini@new", "candidate")
    assert [step.variant for step in plan.steps] == ["mini", "last"]
    assert [(each.stage, each.chosen) for each in plan.decisions] == [("canary", "mini@new")]
    control = routes(0.0).apply(exchange_of(), PLAN)
    assert (control.variant, control.arm, control.control, control.steps) == ("mini", "control", "mini", ())


def test_tenants_can_be_the_unit() -> None:
    found = routes(50.0, unit="tenant")
    by_tenant = {
        tenant: {found.apply(exchange_of(asked_for(str(number)), tenant=tenant), PLAN).arm for number in range(20)}
        for tenant in map(str, range(40))
    }
    assert all(len(each) == 1 for each in by_tenant.values())
    assert {next(iter(each)) for each in by_tenant.values()} == {"control", "candidate"}


def test_requests_that_name_a_variant_other_plans_and_cascades_take_no_part() -> None:
    found = routes(100.0)
    named = exchange_of(asked_for().but(model="mini@int4"))
    assert found.apply(named, PLAN) is PLAN
    other = RoutePlan("draft")
    assert found.apply(exchange_of(), other) is other
    cascade = RoutePlan("mini", cascade=CascadeConfig(small="draft", large="mini", threshold=0.5))
    assert found.apply(exchange_of(), cascade) is cascade


def test_an_unavailable_candidate_and_one_that_the_caller_may_not_use_get_nothing() -> None:
    down = routes(100.0, why_not=lambda variant: "it is down" if variant == "mini@new" else None)
    plan = down.apply(exchange_of(), PLAN)
    assert (plan.variant, plan.arm, plan.decisions[0].why) == ("mini", "candidate", "mini@new: it is down")
    narrow = routes(100.0)
    asked: list[tuple[Caller, str]] = []
    narrow.may_use = lambda caller, variant: bool(asked.append((caller, variant)))
    assert narrow.apply(exchange_of(tenant="red"), PLAN) is PLAN
    assert [(caller.tenant, variant) for caller, variant in asked] == [("red", "mini@new")]


def test_requests_that_the_candidate_cannot_take_go_to_the_control_and_are_not_measured() -> None:
    def lacks(variant: str, text_request: TextRequest) -> str | None:
        return "it knows no tools" if variant == "mini@new" and text_request.tools else None

    found = routes(100.0, why_not_for=lacks)
    assert found.apply(exchange_of(asked_for(tools=(Tool("look"),))), PLAN) is PLAN
    assert found.apply(exchange_of(), PLAN).arm == "candidate"
