"""From a plan to the answering that carries it out: cascades, hedges and chains put into one another.

Owns the order: each variant is watched by its breaker; two requests to it are a hedge; two variants a cascade; and
around all of that is the chain. Knows neither the engine nor the network: whoever calls makes the plain answerings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal, cast

from headrace.config.routing_section import HedgeConfig
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.breaker_answerer import BreakerAnswerer
from headrace.gateway.routing.cascade import CascadeAnswerer
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    CompositeAnswerer,
    RoutingDecision,
    SettledCallback,
    derive_exchange,
)
from headrace.gateway.routing.fallback import FallbackAnswerer, FallbackStep
from headrace.gateway.routing.health import VariantHealth
from headrace.gateway.routing.hedge import HedgedAnswerer, HedgePolicy
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange

# A variant's plain answering, as a part of an exchange; the bool: nothing else takes part in the answer at its time.
MakeAnswerer = Callable[[str, Exchange, TextRequest, bool], Answerer]


class PlanComposer:
    """All that plans have in common."""

    def __init__(
        self,
        make: MakeAnswerer,
        health: VariantHealth,
        hedgings: Mapping[str, HedgePolicy] | None = None,
        *,
        own_breakers: Collection[str] = (),
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`own_breakers`: variants that need none of ours, such as upstreams. `settled` hears of every whole, once; the
        plain answerings of its parts are to keep silent."""
        self._make = make
        self._health = health
        self._hedgings = dict(hedgings or {})
        self._own_breakers = frozenset(own_breakers)
        self._settled = settled
        self._clock = clock

    def answering(self, exchange: Exchange, plan: RoutePlan) -> CompositeAnswerer:
        alone = plan.small is None or plan.cascade is None
        factory = self._variant(exchange, plan.variant, alone)
        if plan.small is not None and plan.cascade is not None:
            small, large, cascade = self._variant(exchange, plan.small, False), factory, plan.cascade

            def make_cascade(asked: TextRequest) -> Answerer:
                whole = derive_exchange(exchange, exchange.served, asked)
                return CascadeAnswerer(whole, small, large, cascade, clock=self._clock)

            factory = make_cascade
        steps = [FallbackStep(plan.variant, factory)]
        steps += [
            FallbackStep(step.variant, self._variant(exchange, step.variant, True), step.then) for step in plan.steps
        ]
        return FallbackAnswerer(
            exchange,
            steps,
            patience=plan.patience,
            diverged=cast(Literal["restart", "error"], plan.diverged),
            whole=not exchange.asked.stream,
            settled=self._settled,
            clock=self._clock,
        )

    def _variant(self, exchange: Exchange, variant: str, alone: bool) -> AnswererFactory:
        hedging = self._hedgings.get(variant)
        watched = partial(self._watched, exchange, variant, alone and hedging is None)
        if hedging is None:
            return watched

        def make(asked: TextRequest) -> Answerer:
            first = watched(asked)
            whole = derive_exchange(exchange, first.exchange.served, asked)
            return HedgedAnswerer(whole, lambda _: first, watched, hedging, clock=self._clock)

        return make

    def _watched(self, exchange: Exchange, variant: str, alone: bool, asked: TextRequest) -> Answerer:
        part = self._make(variant, exchange, asked, alone)
        if variant in self._own_breakers:
            return part
        return BreakerAnswerer(part, self._health.breaker(variant), clock=self._clock)


def hedge_policies(hedges: Mapping[str, HedgeConfig], idle: Callable[[str], bool]) -> dict[str, HedgePolicy]:
    """By variant. `idle`: whether a variant has a replica with nothing to do."""
    return {variant: HedgePolicy(config, partial(idle, variant)) for variant, config in hedges.items()}


def routing_decisions(answers: Answerer) -> list[RoutingDecision]:
    """All that was decided while it was answered, the inner ones first."""
    if not isinstance(answers, CompositeAnswerer):
        return []
    found: list[RoutingDecision] = []
    for part in answers.parts:
        found += routing_decisions(part)
    return found + answers.decisions
