"""Routes a share of a variant's requests to a candidate: the same conversations or tenants each time.

Owns the split and what a request's share is. Does not measure anything and does not decide when a share changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from headrace.config.routing_section import StepConfig
from headrace.gateway.routing.composite_answerer import RoutingDecision
from headrace.gateway.routing.router import RoutePlan, WhyNot, WhyNotFor
from headrace.gateway.routing.splits import BUCKETS, bucket_of, conversation_key
from headrace.gateway.serving.exchange import Caller, Exchange

CanaryUnit = Literal["conversation", "tenant"]
_PATIENCE_S: Final = 60.0  # for the candidate's first output, before the control answers


class CanaryRoute(msgspec.Struct, frozen=True):
    run: str  # salts the split, so that each canary draws its own conversations
    candidate: str
    percent: float  # of the control's requests
    unit: CanaryUnit = "conversation"


class CanaryRoutes:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        conversation: str = "conversation",
        why_not: WhyNot | None = None,
        why_not_for: WhyNotFor | None = None,
    ) -> None:
        """`conversation`: key of the metadata that names a conversation. `why_not_for`: what a variant lacks for a
        request; by default nothing."""
        self.may_use: Callable[[Caller, str], bool] = _may_use_all  # whether a caller may use a variant
        self.by_control: Mapping[str, CanaryRoute] = {}
        self._conversation = conversation
        self._why_not = why_not
        self._why_not_for = why_not_for

    def apply(self, exchange: Exchange, plan: RoutePlan) -> RoutePlan:
        """Return the plan with its arm. A request that names a variant gets that variant."""
        route = self.by_control.get(plan.variant)
        if route is None or plan.is_composed or "@" in exchange.text_request.model:
            return plan
        if not self.may_use(exchange.caller, route.candidate):
            return plan
        if self._why_not_for is not None and self._why_not_for(route.candidate, exchange.text_request) is not None:
            return plan  # it says nothing about the candidate's answers
        if route.unit == "tenant":
            key = exchange.caller.tenant.encode()
        else:
            key = conversation_key(exchange, self._conversation)
        if bucket_of(route.run, key) >= round(route.percent * BUCKETS / 100):
            return replace(plan, arm="control", control=plan.variant)
        if self._why_not is not None and (reason := self._why_not(route.candidate)) is not None:
            decision = RoutingDecision("health", plan.variant, f"{route.candidate}: {reason}")
            decisions = (*plan.decisions, decision)
            return replace(plan, decisions=decisions, arm="candidate", control=plan.variant)  # counts as a failure
        decision = RoutingDecision("canary", route.candidate, f"{route.percent:g} % of {plan.variant}")
        return replace(
            plan,
            variant=route.candidate,
            steps=(StepConfig(variant=plan.variant), *plan.steps),  # users never pay for a candidate that fails
            patience=max(plan.patience, _PATIENCE_S),
            decisions=(*plan.decisions, decision),
            arm="candidate",
            control=plan.variant,
        )


def _may_use_all(caller: Caller, variant: str) -> bool:
    return True
