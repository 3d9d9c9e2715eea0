"""Generate: an engine, an upstream or a composition of several answers, for one client or for identical requests."""

from __future__ import annotations

import time

from headrace.gateway.caches.exact.exact_cache import UncachedAnswer
from headrace.gateway.caches.exact.in_flight import JoinTerms
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.shared_generation import SharedGeneration
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.routing.rewrite import STAGE as REWRITE


async def generate(state: FlowState) -> None:
    exchange, services, lookup = state.exchange, state.services, state.lookups.exact
    dispatcher = services.dispatcher
    if state.plan.serves_draft:
        exchange.notes[REWRITE] = {"kept_draft": "the surface is under pressure"}
    if services.exact is not None and lookup is not None and lookup.access.reads:
        shared, plan = derive_exchange(exchange, exchange.served, exchange.text_request), state.plan
        # A generation that may be retried unheard is not for clients that receive it as it comes.
        whole = (bool(plan.steps) or exchange.served.upstream is not None) and not exchange.text_request.stream
        terms = JoinTerms(exchange.deadline, exchange.surface, exchange.text_request.priority, whole)
        state.answer = services.exact.generate(
            lookup, terms, lambda: SharedGeneration(dispatcher.generation(shared, plan), plan)
        )
        state.delivery.sets_timestamps = True
        if state.answer.role == "joiner":
            exchange.answered_by = "shared"
            exchange.timeline.part("generate", "exact", time.monotonic(), outcome="joined")
            exchange.headers["x-headrace-cache"] = exchange.notes["cache"] = "shared"
    else:
        state.own_generation = dispatcher.generation(exchange, state.plan)
        await state.own_generation.begin()
        state.answer = UncachedAnswer(state.own_generation)
    if services.ladder.has_steps(exchange.surface):
        state.wait = services.pressure.wait(exchange.served.variant, exchange.caller.tenant)
