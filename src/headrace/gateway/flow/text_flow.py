"""TextFlow: the way of one request for text through the stages of the flow, from top to bottom.

    identify   surface, fast profile, fast mode
    route      model → variant: rules, splits, cascades, fallback chains
    degrade    under pressure, the declared steps that make the request cheaper
    shape      sources, a conversation that fits, messages → prompt → tokens
    admit      limits and budgets, reserved before anything is computed
    recall     an existing answer: exact, semantic, extracted
    generate   an engine, an upstream, or several of them
    deliver    deltas as they come, as far as the limits allow
    settle     usage, charges and caches, exactly once

Knows neither dialects nor the network.
"""

from __future__ import annotations

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.degradation.shaping.change_record import header_value
from headrace.gateway.flow.admit import admit
from headrace.gateway.flow.degrade import degrade
from headrace.gateway.flow.deliver import deliver
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.generate import generate
from headrace.gateway.flow.identify import identify
from headrace.gateway.flow.recall import recall, replace_error
from headrace.gateway.flow.services import Services
from headrace.gateway.flow.settle import settle
from headrace.gateway.flow.shape import prime, shape
from headrace.gateway.requests.text_request import TakeDelta
from headrace.gateway.routing.plan_composer import routing_decisions
from headrace.gateway.routing.router import RoutePlan, route_headers
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration


class TextFlow:
    """All of it belongs to one event loop."""

    def __init__(self, exchange: Exchange, services: Services) -> None:
        self.exchange = exchange
        name = exchange.served.name
        self._state = FlowState(exchange, services, RoutePlan(name), name)

    @property
    def is_client_gone(self) -> bool:
        return self._state.is_client_gone

    async def begin(self) -> None:
        """Run the stages up to `generate`. ApiError where the request is rejected."""
        state = self._state
        identify(state)
        _route(state)
        degrade(state)
        await shape(state)
        await prime(state)
        await admit(state)
        if not await recall(state) and not state.is_client_gone:
            try:
                await generate(state)
            except ApiError as error:
                if not replace_error(state, error):
                    raise
        state.delivery.is_inspected = _needs_inspection(state)

    async def run(self, take: TakeDelta) -> bool:
        """Deliver and, at the end, settle. Return False where `take` asked for a pause: call this again then."""
        return await deliver(self._state, take)

    def relayed(self) -> UpstreamGeneration | None:
        """Return an upstream's answer whose bytes may go to the client unchanged, because no stage inspects them."""
        own, delivery = self._state.own_generation, self._state.delivery
        return own if isinstance(own, UpstreamGeneration) and not delivery.is_inspected and own.can_relay() else None

    def headers(self) -> dict[str, str]:
        """Return the response headers that the stages set. They are final once the answer is complete."""
        state = self._state
        headers = {**self.exchange.headers, **state.degradation.record.headers()}
        if state.shaping.changes:
            headers["x-headrace-shaped"] = header_value(state.shaping.changes)
        generation = state.generation
        decisions = (*state.plan.decisions, *(routing_decisions(generation) if generation is not None else ()))
        if decisions:
            headers |= route_headers(decisions)
        return headers

    def cancel(self) -> None:
        """Note that the client has left. What runs for it alone ends by the engine's next step."""
        state = self._state
        state.is_client_gone = True
        if state.answer is not None:
            state.answer.cancel()
        if state.delivery.extension is not None:
            state.delivery.extension.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        """Call at the end, however the exchange ended. Has an effect only once."""
        settle(self._state, error)


def _route(state: FlowState) -> None:
    exchange, services = state.exchange, state.services
    state.plan = services.dispatcher.route(exchange)
    exchange.served = services.fleet.served[state.plan.variant]
    if exchange.served.kind != "decoder":
        raise ApiError(f"'{exchange.served.name}' makes embeddings, not text", parameter="model")


def _needs_inspection(state: FlowState) -> bool:
    """Whether a stage has to see every delta. Those of a cache hit are known, unless they may cite sources."""
    if isinstance(state.answer, CacheHit) and state.shaping.sources is None:
        return False
    admission, lookups = state.admission, state.lookups
    return (
        state.delivery.sets_timestamps
        or admission.reservation is not None
        or admission.has_ledger_hold
        or state.wait is not None
        or state.shaping.sources is not None
        or lookups.semantic is not None
    )
