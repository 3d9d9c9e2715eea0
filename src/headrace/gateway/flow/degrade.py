"""Degrade: under pressure, the surface's ladder makes the request cheaper in the declared ways."""

from __future__ import annotations

import time

from msgspec.structs import replace

from headrace.gateway.accounts.access import allows_model
from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.degradation.ladder.ladder_steps import (
    AllowedSteps,
    cap_answer,
    find_smaller_variant,
    plan_degradation,
)
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange


def degrade(state: FlowState) -> None:
    exchange, services, degradation = state.exchange, state.services, state.degradation
    if not services.ladder.has_steps(exchange.surface):
        return
    text_request, served, tenant = exchange.text_request, exchange.served, exchange.caller.tenant
    degradation.signals = services.pressure.signals(
        served.variant,
        tenant,
        surface=exchange.surface,
        deadline_s=None if exchange.deadline is None else exchange.deadline - time.monotonic(),
        max_tokens=text_request.max_tokens,
        budget_left=None if services.ledger is None else services.ledger.budget_left(tenant, exchange.endpoint),
    )
    degradation.scope = f"{served.name}\n{tenant}"
    level = services.ladder.decide(exchange.surface, degradation.signals, scope=degradation.scope)
    if not level.number:
        return
    allowed = allowed_steps(exchange)
    degradation.plan = plan = plan_degradation(level, text_request, allowed)
    degradation.original = derive_exchange(exchange, served, text_request)
    # No other variant gives the answers of an adapter.
    smaller = (
        None if served.adapter is not None else find_smaller_variant(served.name, plan.variants, services.fleet.served)
    )
    is_routed = bool(state.plan.steps) or state.plan.is_composed
    can_answer = smaller is not None and services.fleet.served[smaller].why_not_for(text_request) is None
    if smaller is not None and can_answer and allows_model(exchange.caller, smaller) and not is_routed:
        exchange.served = services.fleet.served[smaller]
        state.plan = RoutePlan(smaller, rewrite=state.plan.rewrite, decisions=state.plan.decisions)
        degradation.record.add("variant", ShapingChange("variant", served.name, smaller))
    if state.plan.rewrite is not None and allowed.degrades:  # a second pass costs as much as the first
        state.plan = replace(state.plan, serves_draft=True)
    exchange.text_request, changes = cap_answer(text_request, plan)
    degradation.record.add("max_tokens", *changes)


def allowed_steps(exchange: Exchange) -> AllowedSteps:
    """Return the steps that the request and its tenant's settings allow."""
    return AllowedSteps.of(exchange.text_request.degrade, None if settings_of(exchange.caller).ladder else "off")
