"""Dispatcher: the variants that are to answer an exchange, and what generates the answer.

Connects the router, the breakers and the hedges with the fleet. Does not admit, cache or charge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from headrace.config import RoutingConfig
from headrace.gateway.requests.text_request import Choice, TextRequest
from headrace.gateway.routing.canary_routes import CanaryRoutes
from headrace.gateway.routing.capacity_order import CapacityOrder
from headrace.gateway.routing.composite_answerer import Answerer, RoutingDecision, collect_choices, derive_exchange
from headrace.gateway.routing.golden import AnswerCheck
from headrace.gateway.routing.health import VariantHealth
from headrace.gateway.routing.opening import ROLE
from headrace.gateway.routing.plan_composer import PlanComposer, hedge_policies
from headrace.gateway.routing.rewrite import STAGE as REWRITE
from headrace.gateway.routing.rewrite import choose_rewrite, why_not_rewritten
from headrace.gateway.routing.router import RoutePlan, Router
from headrace.gateway.serving.capacity import VariantCapacity
from headrace.gateway.serving.engine_answering import EngineAnswering
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.observe import metrics

log: Final = logging.getLogger(__name__)


class Dispatcher:
    """All of it belongs to one event loop."""

    def __init__(
        self, config: RoutingConfig, fleet: Fleet, *, capacity: Callable[[str], VariantCapacity] | None = None
    ) -> None:
        """`capacity`: of a variant, for chains in that order; by default it is unknown."""
        self._fleet = fleet
        self._golden = config.golden
        self._rewrites = config.rewrites
        self.health = VariantHealth(config.breaker, config.health, changed=_breaker_changed)
        self.router = Router(
            config,
            self._why_unavailable,
            why_not_for=self._why_not_for,
            order=None if capacity is None else CapacityOrder(capacity),
        )
        self.canaries = CanaryRoutes(config.conversation, self._why_unavailable, self._why_not_for)
        self._hedgings = hedge_policies(config.hedges, lambda variant: fleet.served[variant].idle)
        upstreams = [name for name, served in fleet.served.items() if served.upstream is not None]
        self._composer = PlanComposer(
            self._part, self.health, self._hedgings, own_breakers=upstreams, golden=config.golden
        )

    def route(self, exchange: Exchange) -> RoutePlan:
        if exchange.served.adapter is not None:  # no other variant gives the answers of an adapter
            return self._with_rewrite(exchange, RoutePlan(exchange.served.name))
        plan = RoutePlan(exchange.served.name) if self.router.idle else self.router.route(exchange)
        if plan.opening is not None and (why := self._why_not_opened(plan.variant, plan.opening.small)) is not None:
            decisions = (*plan.decisions, RoutingDecision(ROLE, plan.variant, f"answers alone: {why}"))
            plan = replace(plan, opening=None, decisions=decisions)
        plan = self._with_rewrite(exchange, plan)
        if self.canaries.by_control:
            plan = self.canaries.apply(exchange, plan)
        return self._with_golden(exchange, plan) if self._golden.checks else plan

    def _with_rewrite(self, exchange: Exchange, plan: RoutePlan) -> RoutePlan:
        """Add the rewrite that the request names or its surface has. ApiError for a name that does not exist."""
        found = choose_rewrite(self._rewrites, exchange)
        if found is None:
            return plan
        name, config = found
        why = why_not_rewritten(exchange.text_request)
        if why is None and config.variant is not None:
            if exchange.served.adapter is not None:
                why = "no other variant gives the answers of an adapter"
            elif not self.canaries.may_use(exchange.caller, config.variant):
                why = f"{config.variant} is not among the key's models"
            elif (lacks := self._why_not_for(config.variant, exchange.text_request)) is not None:
                why = f"{config.variant}: {lacks}"
            elif (reason := self._why_unavailable(config.variant)) is not None:
                why = f"{config.variant}: {reason}"
        if why is not None:
            decision = RoutingDecision(REWRITE, plan.variant, f"not by {name}: {why}")
            return replace(plan, decisions=(*plan.decisions, decision))
        decision = RoutingDecision(REWRITE, config.variant or plan.variant, f"by {name}")
        # The text that a client has of an opening cannot be rewritten.
        return replace(plan, opening=None, rewrite=config, decisions=(*plan.decisions, decision))

    def takes_seeds(self, plan: RoutePlan) -> bool:
        """True if our own engines alone may answer: upstreams need not know seeds."""
        names = {*plan.variants, *(step.variant for step in plan.steps)}
        return all(self._fleet.variant(name).upstream is None for name in names)

    def _why_not_opened(self, large: str, small: str) -> str | None:
        """Return why two variants cannot write one answer together."""
        if self._fleet.served[large].upstream is not None:
            return f"{large} is an upstream, which cannot continue a text"
        for name in (large, small):
            if self._fleet.served[name].reasoning is not None:
                return f"{name} reasons before it answers"
        return None

    def check_answers(self, check: AnswerCheck) -> None:
        """Set the checks of whole answers, for the golden fallback."""
        self._composer.check = check

    def _with_golden(self, exchange: Exchange, plan: RoutePlan) -> RoutePlan:
        """Add the golden variant, but not to requests that measure or name a variant."""
        config, text_request = self._golden, exchange.text_request
        golden = config.variant or f"{plan.variant.partition('@')[0]}@golden"
        if golden == plan.variant or golden not in self._fleet.served or "@" in text_request.model:
            return plan
        if config.of and plan.variant not in config.of and plan.small not in config.of:
            return plan
        if (
            plan.opening is not None
            or text_request.echo
            or text_request.max_tokens == 0
            or not self.canaries.may_use(exchange.caller, golden)
            or self._why_not_for(golden, text_request) is not None
        ):
            return plan
        return replace(plan, golden=golden)

    def generation(self, exchange: Exchange, plan: RoutePlan) -> Answerer:
        """Return what carries out the plan. Nothing of it runs yet."""
        composes = plan.steps or plan.golden or plan.is_composed or plan.rewrite is not None
        is_plain = not composes and plan.variant not in self._hedgings
        if is_plain and self.router.idle and not plan.arm:
            return self._plain(exchange)
        for decision in plan.decisions:
            metrics.of(metrics.routes, decision.stage, decision.chosen).inc()
        return self._composer.answering(exchange, plan)

    async def generate(self, exchange: Exchange) -> list[Choice]:
        """Generate a complete answer by the exchange's own variant, without routing or any stage of the flow."""
        generation = self._plain(exchange)
        try:
            await generation.begin()
            return await collect_choices(generation)
        finally:
            generation.settle()

    async def watch_health(self) -> None:
        """Probe the engines until cancelled. Upstreams watch themselves."""
        own = {name: served for name, served in self._fleet.served.items() if served.upstream is None}
        await self.health.watch({name: partial(_probe, served) for name, served in own.items()})

    def _part(self, variant: str, exchange: Exchange, text_request: TextRequest, alone: bool) -> Answerer:
        return self._plain(derive_exchange(exchange, self._fleet.variant(variant), text_request), alone=alone)

    def _plain(self, exchange: Exchange, *, alone: bool = True) -> Answerer:
        """`alone`: no other variant takes part in the answer, so it may be retried until the client has heard of it."""
        upstream = exchange.served.upstream
        if upstream is None:
            return EngineAnswering(exchange)
        return UpstreamGeneration(exchange, upstream, can_restart=alone and not exchange.text_request.stream)

    def _why_not_for(self, variant: str, text_request: TextRequest) -> str | None:
        return self._fleet.variant(variant).why_not_for(text_request)

    def _why_unavailable(self, variant: str) -> str | None:
        upstream = self._fleet.served[variant].upstream
        if upstream is not None:
            return upstream.why_not()
        return self.health.why_not(variant)


async def _probe(served: ServedVariant) -> None:
    await served.stats()


def _breaker_changed(variant: str, state: str) -> None:
    log.warning("the circuit breaker of %s is now %s", variant, state)
    metrics.of(metrics.breakers, variant, state).inc()
