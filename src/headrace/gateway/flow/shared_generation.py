"""A generation that several clients may have."""

from __future__ import annotations

from collections.abc import Callable

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.routing.composite_answerer import Answerer
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange

Take = Callable[[ChoiceDelta], bool]


def by_plan(exchange: Exchange, plan: RoutePlan) -> bool:
    """Whether it was answered by whom it was meant for, and by nobody who stood in."""
    return exchange.served.name in (plan.variant, plan.small)


class Shared:
    """It settles itself when the last of them has left, or at its end."""

    def __init__(self, answers: Answerer, plan: RoutePlan) -> None:
        self.answers = answers
        self._plan = plan
        self._begun = False
        self._cancelled = False

    @property
    def exchange(self) -> Exchange:
        """Its own, of nobody in particular."""
        return self.answers.exchange

    def keeps(self) -> bool:
        return by_plan(self.exchange, self._plan)

    async def run(self, take: Take) -> bool:
        answers = self.answers
        if self._cancelled:
            return True
        error: ApiError | None = None
        try:
            if not self._begun:
                self._begun = True
                await answers.begin()
                if self._cancelled:
                    answers.cancel()
            return await answers.run(take)
        except ApiError as caught:
            error = caught
            raise
        finally:
            answers.settle(error)

    def cancel(self) -> None:
        self._cancelled = True
        self.answers.cancel()
