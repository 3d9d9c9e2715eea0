"""Builds the answerer that carries out a route plan, from cascades, hedges and fallback chains.

Owns their nesting: a breaker guards each variant, two requests to it make a hedge, two variants a cascade, and the
fallback chain surrounds them all. The caller passes in a function that makes the plain answerers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal, cast

from msgspec.structs import replace

from headrace.config.routing_section import GoldenConfig, HedgeConfig, RewriteConfig
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
from headrace.gateway.routing.golden import AnswerCheck, GoldenAnswerer
from headrace.gateway.routing.health import VariantHealth
from headrace.gateway.routing.hedge import HedgedAnswerer, HedgePolicy
from headrace.gateway.routing.opening import OpeningAnswerer
from headrace.gateway.routing.rewrite import RewriteAnswerer
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange

# Makes the plain answerer of a variant. The bool: no other variant takes part in the answer at the same time.
MakeAnswerer = Callable[[str, Exchange, TextRequest, bool], Answerer]


class PlanComposer:
    def __init__(
        self,
        make: MakeAnswerer,
        health: VariantHealth,
        hedgings: Mapping[str, HedgePolicy] | None = None,
        *,
        own_breakers: Collection[str] = (),
        golden: GoldenConfig | None = None,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`own_breakers`: variants with a breaker of their own, such as upstreams. `settled` is called once for every
        exchange, but not for its parts."""
        self._make = make
        self._health = health
        self._hedgings = dict(hedgings or {})
        self._golden = golden or GoldenConfig()
        self.check: AnswerCheck | None = None  # of whole answers, for the golden fallback
        self._own_breakers = frozenset(own_breakers)
        self._settled = settled
        self._clock = clock

    def answering(self, exchange: Exchange, plan: RoutePlan) -> CompositeAnswerer:
        factory = self._variant(exchange, plan.variant, not plan.is_composed)
        if plan.cascade is not None:
            small, large, cascade = self._variant(exchange, plan.cascade.small, False), factory, plan.cascade

            def make_cascade(text_request: TextRequest) -> Answerer:
                whole = derive_exchange(exchange, exchange.served, text_request)
                return CascadeAnswerer(whole, small, large, cascade, clock=self._clock)

            factory = make_cascade
        elif plan.opening is not None:
            opener, continuer, opening = self._variant(exchange, plan.opening.small, False), factory, plan.opening

            def make_opening(text_request: TextRequest) -> Answerer:
                whole = derive_exchange(exchange, exchange.served, text_request)
                return OpeningAnswerer(whole, opener, continuer, opening, clock=self._clock)

            factory = make_opening
        if plan.rewrite is not None and not plan.serves_draft:
            factory = self._rewritten(exchange, plan.variant, factory, plan.rewrite)
        if plan.golden:
            checked, better = factory, self._variant(exchange, plan.golden, True)

            def make_golden(text_request: TextRequest) -> Answerer:
                whole = derive_exchange(exchange, exchange.served, text_request)
                return GoldenAnswerer(whole, checked, better, self._golden, self.check, clock=self._clock)

            factory = make_golden
        steps = [FallbackStep(plan.variant, factory)]
        steps += [
            FallbackStep(step.variant, self._variant(exchange, step.variant, True), step.then) for step in plan.steps
        ]
        return FallbackAnswerer(
            exchange,
            steps,
            patience=self._patience(plan),
            diverged=cast(Literal["restart", "error"], plan.diverged),
            whole=not exchange.text_request.stream,
            settled=self._settled,
            clock=self._clock,
        )

    def _patience(self, plan: RoutePlan) -> float:
        """Return the seconds until a first output, with those in which an answer is held."""
        held = [self._golden.within_s] if plan.golden else []
        if plan.rewrite is not None and not plan.serves_draft:
            held.append(plan.rewrite.within_s)
        return max(plan.patience, *held) if held else plan.patience

    def _rewritten(
        self, exchange: Exchange, variant: str, draft: AnswererFactory, config: RewriteConfig
    ) -> AnswererFactory:
        # Another prompt than the draft's, so not with the exchange's tokens.
        rewriter = self._variant(replace(exchange, prompts={}), config.variant or variant, True)

        def make_rewrite(text_request: TextRequest) -> Answerer:
            whole = derive_exchange(exchange, exchange.served, text_request)
            return RewriteAnswerer(whole, draft, rewriter, config, clock=self._clock)

        return make_rewrite

    def _variant(self, exchange: Exchange, variant: str, alone: bool) -> AnswererFactory:
        hedging = self._hedgings.get(variant)
        guarded = partial(self._guarded, exchange, variant, alone and hedging is None)
        if hedging is None:
            return guarded

        def make(text_request: TextRequest) -> Answerer:
            first = guarded(text_request)
            whole = derive_exchange(exchange, first.exchange.served, text_request)
            return HedgedAnswerer(whole, lambda _: first, guarded, hedging, clock=self._clock)

        return make

    def _guarded(self, exchange: Exchange, variant: str, alone: bool, text_request: TextRequest) -> Answerer:
        part = self._make(variant, exchange, text_request, alone)
        if variant in self._own_breakers:
            return part
        return BreakerAnswerer(part, self._health.breaker(variant), clock=self._clock)


def hedge_policies(hedges: Mapping[str, HedgeConfig], idle: Callable[[str], bool]) -> dict[str, HedgePolicy]:
    """Return the hedge policies by variant. `idle`: whether a variant has an idle replica."""
    return {variant: HedgePolicy(config, partial(idle, variant)) for variant, config in hedges.items()}


def routing_decisions(answers: Answerer) -> list[RoutingDecision]:
    """Return the decisions made while answering, the inner ones first."""
    if not isinstance(answers, CompositeAnswerer):
        return []
    inner: list[RoutingDecision] = []
    for part in answers.parts:
        inner += routing_decisions(part)
    return inner + answers.decisions
