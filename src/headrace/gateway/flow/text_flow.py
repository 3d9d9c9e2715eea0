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

from functools import partial

from msgspec.structs import replace

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.degradation.shaping.change_record import header_value
from headrace.gateway.flow.admit import admit
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX, AnswerFlow
from headrace.gateway.flow.answer_observer import ObservedAnswer
from headrace.gateway.flow.degrade import degrade
from headrace.gateway.flow.deliver import deliver
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.generate import generate
from headrace.gateway.flow.identify import identify
from headrace.gateway.flow.recall import recall, replace_error
from headrace.gateway.flow.services import Services
from headrace.gateway.flow.settle import settle
from headrace.gateway.flow.shape import measure, prime, shape
from headrace.gateway.requests.text_request import ChoiceDelta, SourceText, TakeDelta
from headrace.gateway.routing.golden import failed_golden_check
from headrace.gateway.routing.plan_composer import routing_decisions
from headrace.gateway.routing.rewrite import with_draft_seed
from headrace.gateway.routing.router import RoutePlan, route_headers
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration


def open_flow(exchange: Exchange, services: Services) -> AnswerFlow:
    """Return the way of an exchange's answer: a pipeline's, if the request names one as its model."""
    if services.pipelines is not None and exchange.text_request.model.startswith(PIPELINE_PREFIX):
        return services.pipelines.open(exchange)
    return TextFlow(exchange, services)


class TextFlow:
    """All of it belongs to one event loop."""

    def __init__(self, exchange: Exchange, services: Services) -> None:
        self.exchange = exchange
        name = exchange.served.name
        self._state = FlowState(exchange, services, RoutePlan(name), name)
        self._unwatch = services.accounts.access.watch(exchange.caller, self.end)

    @property
    def is_client_gone(self) -> bool:
        return self._state.is_client_gone

    @property
    def is_charged(self) -> bool:
        """True if the request counts towards the limits on requests. Known once it is settled."""
        reservation = self._state.admission.reservation
        return reservation is not None and reservation.counted

    @property
    def sources(self) -> tuple[SourceText, ...]:
        """The sources in the prompt by their numbers; the first is [1]. Known once it has begun."""
        selected = self._state.shaping.sources
        return () if selected is None else selected.sources

    async def begin(self) -> None:
        """Run the stages up to `generate`. ApiError where the request is rejected."""
        state = self._state
        timeline = self.exchange.timeline
        timeline.enter("route")
        requested = self.exchange.text_request
        identify(state)
        if state.services.dispatcher.router.counts_tokens:
            await measure(state)
        _route(state)
        if observers := state.services.answer_observers:
            state.observed = ObservedAnswer.of(observers, self.exchange, state.plan, requested)
        degrade(state)
        _seed_draft(state)
        timeline.enter("shape")
        await shape(state)
        await prime(state)
        timeline.enter("admit")
        await admit(state)
        timeline.enter("recall")
        is_found = await recall(state)
        timeline.enter("generate")
        if not is_found and not state.is_stopped:
            try:
                await generate(state)
            except ApiError as error:
                if not replace_error(state, error):
                    raise
        if state.ended_by is not None and not state.is_client_gone:
            raise state.ended_by
        state.delivery.is_inspected = _needs_inspection(state)

    async def run(self, take: TakeDelta) -> bool:
        """Deliver and, at the end, settle. Return False where `take` asked for a pause: call this again then."""
        return await deliver(
            self._state, take if self.exchange.text_request.show_reasoning else partial(hide_reasoning, take)
        )

    def relayed(self) -> UpstreamGeneration | None:
        """Return an upstream's answer whose bytes may go to the client unchanged, because no stage inspects them."""
        own, delivery, text_request = self._state.own_generation, self._state.delivery, self.exchange.text_request
        if not text_request.show_reasoning or text_request.continuous_usage:
            return None
        return own if isinstance(own, UpstreamGeneration) and not delivery.is_inspected and own.can_relay() else None

    def headers(self) -> dict[str, str]:
        """Return the response headers that the stages set. They are final once the answer is complete."""
        state = self._state
        exchange = self.exchange
        capacity = state.services.capacity.headers(exchange.served.variant, exchange.surface)
        headers = {**exchange.headers, **capacity, **state.degradation.record.headers()}
        if state.shaping.changes:
            headers["x-headrace-shaped"] = header_value(state.shaping.changes)
        generation = state.generation
        decisions = (*state.plan.decisions, *(routing_decisions(generation) if generation is not None else ()))
        if decisions:
            headers |= route_headers(decisions)
            if (failed := failed_golden_check(decisions)) is not None:
                headers["x-headrace-golden"] = failed[0]
        return headers

    def cancel(self) -> None:
        """Note that the client has left. What runs for it alone ends by the engine's next step."""
        self._state.is_client_gone = True
        self._stop()

    def end(self, error: ApiError) -> None:
        """End the answer at once, with an error for the client: it may not have the rest."""
        if self._state.outcome is None and self._state.ended_by is None:
            self._state.ended_by = error
            self._stop()

    def _stop(self) -> None:
        state = self._state
        if state.running is not None:
            state.running.cancel()
        if state.answer is not None:
            state.answer.cancel()
        if state.delivery.extension is not None:
            state.delivery.extension.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        """Call at the end, however the exchange ended. Has an effect only once."""
        self._unwatch()
        settle(self._state, error)


def hide_reasoning(take: TakeDelta, delta: ChoiceDelta) -> bool:
    """Hand a delta over without its reasoning, or not at all if nothing else is in it."""
    if not delta.reasoning:
        return take(delta)
    if not (delta.content or delta.calls or delta.finish):
        return True
    # A copy, because others may get the same delta. Log-probabilities of reasoning would show its text.
    logprobs = delta.logprobs if delta.content else None
    return take(replace(delta, reasoning="", logprobs=logprobs))


def _route(state: FlowState) -> None:
    exchange, services = state.exchange, state.services
    state.plan = services.dispatcher.route(exchange)
    exchange.served = services.fleet.variant(state.plan.variant)
    if exchange.served.kind != "decoder":
        message = f"'{exchange.served.name}' {exchange.served.purpose}. Use a model that generates text."
        raise ApiError(message, parameter="model")


def _seed_draft(state: FlowState) -> None:
    """Make an answer that is rewritten repeatable, as far as the variants take seeds."""
    exchange, plan = state.exchange, state.plan
    if plan.rewrite is not None and state.services.dispatcher.takes_seeds(plan):
        exchange.text_request = with_draft_seed(exchange.text_request)
        if (original := state.degradation.original) is not None:
            original.text_request = with_draft_seed(original.text_request)


def _needs_inspection(state: FlowState) -> bool:
    """True if a stage has to see every delta. Those of a cache hit are known, unless they may cite sources."""
    if isinstance(state.answer, CacheHit) and state.shaping.sources is None and state.observed is None:
        return False
    admission, lookups = state.admission, state.lookups
    return (
        state.delivery.sets_timestamps
        or admission.reservation is not None
        or admission.has_ledger_hold
        or state.wait is not None
        or state.shaping.sources is not None
        or lookups.semantic is not None
        or state.observed is not None
    )
