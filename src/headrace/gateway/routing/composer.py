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
from headrace.gateway.requests.text_request import Asked
from headrace.gateway.routing.cascade import CascadeAnswering
from headrace.gateway.routing.composition import Answers, Clock, Composed, Decision, Factory, Settled, part_of
from headrace.gateway.routing.fallback import FallbackAnswering, Step
from headrace.gateway.routing.health import Health
from headrace.gateway.routing.hedge import HedgedAnswering, Hedging
from headrace.gateway.routing.observed_answering import Watched
from headrace.gateway.routing.router import Plan
from headrace.gateway.serving.exchange import Exchange

# A variant's plain answering, as a part of an exchange; the bool: nothing else takes part in the answer at its time.
Make = Callable[[str, Exchange, Asked, bool], Answers]


class Composer:
    """All that plans have in common."""

    def __init__(
        self,
        make: Make,
        health: Health,
        hedgings: Mapping[str, Hedging] | None = None,
        *,
        own_breakers: Collection[str] = (),
        settled: Settled | None = None,
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

    def answering(self, exchange: Exchange, plan: Plan) -> Composed:
        alone = plan.small is None or plan.cascade is None
        factory = self._variant(exchange, plan.variant, alone)
        if plan.small is not None and plan.cascade is not None:
            small, large, cascade = self._variant(exchange, plan.small, False), factory, plan.cascade

            def make_cascade(asked: Asked) -> Answers:
                whole = part_of(exchange, exchange.served, asked)
                return CascadeAnswering(whole, small, large, cascade, clock=self._clock)

            factory = make_cascade
        steps = [Step(plan.variant, factory)]
        steps += [Step(step.variant, self._variant(exchange, step.variant, True), step.then) for step in plan.steps]
        return FallbackAnswering(
            exchange,
            steps,
            patience=plan.patience,
            diverged=cast(Literal["restart", "error"], plan.diverged),
            whole=not exchange.asked.stream,
            settled=self._settled,
            clock=self._clock,
        )

    def _variant(self, exchange: Exchange, variant: str, alone: bool) -> Factory:
        hedging = self._hedgings.get(variant)
        watched = partial(self._watched, exchange, variant, alone and hedging is None)
        if hedging is None:
            return watched

        def make(asked: Asked) -> Answers:
            first = watched(asked)
            whole = part_of(exchange, first.exchange.served, asked)
            return HedgedAnswering(whole, lambda _: first, watched, hedging, clock=self._clock)

        return make

    def _watched(self, exchange: Exchange, variant: str, alone: bool, asked: Asked) -> Answers:
        part = self._make(variant, exchange, asked, alone)
        if variant in self._own_breakers:
            return part
        return Watched(part, self._health.breaker(variant), clock=self._clock)


def hedgings_of(hedges: Mapping[str, HedgeConfig], idle: Callable[[str], bool]) -> dict[str, Hedging]:
    """By variant. `idle`: whether a variant has a replica with nothing to do."""
    return {variant: Hedging(config, partial(idle, variant)) for variant, config in hedges.items()}


def decisions_of(answers: Answers) -> list[Decision]:
    """All that was decided while it was answered, the inner ones first."""
    if not isinstance(answers, Composed):
        return []
    found: list[Decision] = []
    for part in answers.parts:
        found += decisions_of(part)
    return found + answers.decisions
