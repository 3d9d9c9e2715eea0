"""Shadows: a share of served requests is answered once more by another variant, and the differences are summed up.

With `profile = "fast"` the copies are answered in the fast profile, by the same variant or another.
With `judge = "served"` the shadow is on trial. With `judge = "shadow"` it is a double-check: the shadow's variant is
the better one, and how far served answers agree with it is the quality of the route that served them.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from headrace.config.routing_section import ShadowConfig
from headrace.config.shaping_section import ProfileConfig
from headrace.gateway.accounts.access import allows_model
from headrace.gateway.degradation.shaping.fast_profile import apply_fast_profile
from headrace.gateway.flow.answer_observer import FinishedAnswer
from headrace.gateway.routing.cascade import with_logprobs
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.routing.splits import BUCKETS, bucket_of
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.lab.online.answer_difference import AnswerText, DifferenceSummary, Similarity
from headrace.lab.online.background_copies import (
    SURFACE,
    BackgroundCopies,
    Copy,
    CopyBounds,
    Generate,
    When,
    served_text,
)
from headrace.lab.online.judged_requests import CopiedAnswer, JudgedRequests
from headrace.observe import metrics

MOST_ROUTES: Final = 64  # of which a shadow keeps a summary
OTHER: Final = "other"

# Takes what a shadow compared: the shadow's name, what was served, and both answers.
Judged = Callable[[str, FinishedAnswer, AnswerText, AnswerText, float], None]


class Shadow:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        name: str,
        config: ShadowConfig,
        served: ServedVariant,
        generate: Generate,
        similarity: Similarity,
        *,
        judged: Judged | None = None,
        pairs: JudgedRequests | None = None,
        fast: ProfileConfig | None = None,
        is_idle: Callable[[], bool] = lambda: True,
        is_local: bool = True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`served`: the variant that answers the copies. `pairs`: where a double-check keeps what it judged. `fast`:
        the fast profile. `is_idle`: whether the server runs no request. `is_local`: whether an engine of this machine
        answers the copies, beside those of served requests."""
        self.name = name
        self.config = config
        self.total = DifferenceSummary()
        self.by_route: OrderedDict[tuple[str, str], DifferenceSummary] = OrderedDict()  # by served variant and route
        self.outcomes: Counter[str] = Counter()
        self._served = served
        self._similarity = similarity
        self._judged = judged
        self._pairs = pairs
        self._fast = fast
        self._variants = frozenset(config.of)
        self._tenants = frozenset(config.tenants)
        self._limit = round(config.share * BUCKETS)
        self.when: When = config.when or ("idle" if is_local else "always")
        bounds = CopyBounds(
            concurrent=config.concurrent,
            queue=config.queue,
            tokens_per_day=config.tokens_per_day,
            timeout_s=config.timeout_s,
        )
        self.copies = BackgroundCopies(
            bounds,
            generate,
            is_idle=is_idle,
            count=self._count,
            wall=wall,
        )

    @property
    def variant(self) -> str:
        return self._served.name

    @property
    def profile(self) -> str:
        return self.config.profile

    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        variant = self._served.name
        if exchange.surface == SURFACE or exchange.served.adapter is not None:
            return False  # no other variant gives the answers of an adapter
        if self._served.why_not_for(exchange.text_request) is not None:
            return False
        if self.profile == "fast":
            if exchange.text_request.profile != "standard":
                return False
        elif variant in (plan.variant, plan.small):
            return False
        if self._variants and plan.variant not in self._variants and plan.small not in self._variants:
            return False
        if self._tenants and (exchange.caller.tenant or "-") not in self._tenants:
            return False
        return bucket_of(self.name, exchange.id.encode()) < self._limit and allows_model(exchange.caller, variant)

    def take(self, finished: FinishedAnswer) -> None:
        exchange = finished.exchange
        if not (finished.is_complete and finished.is_generated):
            return
        if self._variants and exchange.served.name not in self._variants:
            return  # a fallback or a cascade's other model has answered
        if exchange.served.name == self._served.name and self.profile == "standard":
            return
        if (copy := Copy.of(exchange)) is None:
            return
        if self.profile == "fast":
            can_reason = self._served.reasoning is not None
            faster, _ = apply_fast_profile(copy.text_request, self._fast, can_reason=can_reason)
            copy = msgspec.structs.replace(copy, text_request=faster.but(profile="fast"))
        answer = served_text(exchange, list(finished.choices))
        self.copies.submit(partial(self._compare, copy, finished, answer), when=self.when)

    async def _compare(self, copy: Copy, finished: FinishedAnswer, served: AnswerText) -> None:
        choices, shadow = await self.copies.answer(copy, self._served)
        similarity = self._similarity(served.text, shadow.text)
        self.total.add(served, shadow, similarity)
        exchange = finished.exchange
        variant, route = exchange.served.name, exchange.route
        self._summary(variant, route).add(served, shadow, similarity)
        if served.text == shadow.text:
            self._count("exact")
        metrics.of(metrics.shadow_similarity, self.name).observe(similarity)
        if self.config.judge == "shadow":
            metrics.of(metrics.route_quality, variant, route).observe(similarity)
        if self._judged is not None:
            self._judged(self.name, finished, served, shadow, similarity)
        if self._pairs is not None and self._pairs.wants(finished):
            await self._keep_pair(self._pairs, copy, finished, CopiedAnswer(choices, shadow))

    async def _keep_pair(
        self, pairs: JudgedRequests, copy: Copy, finished: FinishedAnswer, better: CopiedAnswer
    ) -> None:
        """Ask the served variant once more, for the confidence in its answer, and keep both answers."""
        again = msgspec.structs.replace(copy, text_request=with_logprobs(copy.text_request))
        served = finished.exchange.served
        pairs.add(finished, CopiedAnswer(*await self.copies.answer(again, served, outcome="asked_again")), better)

    def _summary(self, variant: str, route: str) -> DifferenceSummary:
        key = (variant, route)
        if key not in self.by_route and len(self.by_route) >= MOST_ROUTES:
            key = (OTHER, OTHER)
        return self.by_route.setdefault(key, DifferenceSummary())

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        metrics.of(metrics.shadows, self.name, outcome).inc()

    def as_json(self) -> dict[str, Any]:
        config, copies = self.config, self.copies
        return {
            "object": "shadow",
            "name": self.name,
            "variant": self._served.name,
            "of": list(config.of),
            "profile": config.profile,
            "share": config.share,
            "judge": config.judge,
            "when": self.when,
            "waiting": copies.waiting,
            "tokens_today": copies.tokens_today,
            "tokens_per_day": config.tokens_per_day,
            "outcomes": dict(sorted(self.outcomes.items())),
            "differences": self.total.as_json(),
            "routes": [
                {"variant": variant, "route": route, **summary.as_json()}
                for (variant, route), summary in self.by_route.items()
            ],
        }


class RouteQuality(msgspec.Struct, frozen=True):
    """How far a route's answers agree with those of a better variant."""

    variant: str
    route: str
    judge: str  # the better variant
    summary: DifferenceSummary

    def as_json(self) -> dict[str, Any]:
        found = self.summary.as_json()
        return {
            "variant": self.variant,
            "route": self.route,
            "judge": self.judge,
            "compared": found["compared"],
            "quality": found["similarity"],
            "quality_error": found["similarity_error"],
            "exact_share": found["exact_share"],
        }
