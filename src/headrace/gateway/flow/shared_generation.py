"""SharedGeneration: a generation that several identical requests may receive."""

from __future__ import annotations

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import TakeDelta
from headrace.gateway.routing.composite_answerer import Answerer
from headrace.gateway.routing.rewrite import was_rewritten
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange


def is_by_plan(exchange: Exchange, plan: RoutePlan) -> bool:
    """True if a variant of the plan answered, and not a fallback, and a draft was rewritten."""
    return exchange.served.name in plan.variants and (plan.rewrite is None or was_rewritten(exchange))


class SharedGeneration:
    """Settles itself at its end, or when the last of its readers has left."""

    def __init__(self, answerer: Answerer, plan: RoutePlan) -> None:
        self.answerer = answerer
        self._plan = plan
        self._is_begun = False
        self._is_cancelled = False

    @property
    def exchange(self) -> Exchange:
        """The generation's own exchange, which belongs to none of the readers."""
        return self.answerer.exchange

    def keeps(self) -> bool:
        return is_by_plan(self.exchange, self._plan)

    async def run(self, take: TakeDelta) -> bool:
        answerer = self.answerer
        if self._is_cancelled:
            return True
        error: ApiError | None = None
        try:
            if not self._is_begun:
                self._is_begun = True
                await answerer.begin()
                if self._is_cancelled:
                    answerer.cancel()
            return await answerer.run(take)
        except ApiError as caught:
            error = caught
            raise
        finally:
            answerer.settle(error)

    def cancel(self) -> None:
        self._is_cancelled = True
        self.answerer.cancel()
