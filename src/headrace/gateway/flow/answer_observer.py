"""AnswerObserver: what parts above the gateway implement in order to see finished answers.

An observer never changes an answer. What it raises is logged, and it must not block: it takes the answer and returns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, RestartDelta, TextRequest
from headrace.gateway.routing.composite_answerer import choice_count
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.exchange import Exchange

log: Final = logging.getLogger(__name__)


class FinishedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A settled exchange with its answer. It holds a tenant's texts: keep it only where the operator allows that."""

    exchange: Exchange  # its request is the one that was answered: shaped, degraded, within limits
    requested: TextRequest  # as the client sent it
    plan: RoutePlan
    choices: Sequence[Choice]
    ended: str  # finished, limited, deadline, gone, or the kind of error
    is_complete: bool  # the client got every choice to its end
    error: ApiError | None = None

    @property
    def is_generated(self) -> bool:
        """True if the variant computed the answer for this exchange; False for answers from a cache."""
        return not self.exchange.answered_by


class AnswerObserver(Protocol):
    def wants(self, exchange: Exchange, plan: RoutePlan) -> bool:
        """Return whether to see the answer of a routed exchange. Called once, before anything is generated."""
        ...

    def take(self, finished: FinishedAnswer) -> None:
        """Take a finished answer, once, after it was settled."""
        ...


class ObservedAnswer:
    """Collects an answer for the observers that want it."""

    def __init__(self, observers: Sequence[AnswerObserver], requested: TextRequest) -> None:
        self.observers = observers
        self.requested = requested
        self.choices: list[Choice] = []

    @classmethod
    def of(
        cls, observers: Sequence[AnswerObserver], exchange: Exchange, plan: RoutePlan, requested: TextRequest
    ) -> ObservedAnswer | None:
        """Return None if no observer wants the answer."""
        found = [each for each in observers if _wants(each, exchange, plan)]
        return cls(found, requested) if found else None

    def add(self, exchange: Exchange, delta: ChoiceDelta) -> None:
        if not self.choices:
            self.choices = [Choice(index) for index in range(choice_count(exchange.text_request))]
        if delta.index >= len(self.choices):
            return
        if isinstance(delta, RestartDelta):
            self.choices[delta.index] = Choice(delta.index)
        else:
            self.choices[delta.index].add(delta)

    def finish(self, finished: FinishedAnswer) -> None:
        for observer in self.observers:
            try:
                observer.take(finished)
            except Exception as error:  # a request never fails because of those who watch it
                log.error("an observer failed", exc_info=error)


def _wants(observer: AnswerObserver, exchange: Exchange, plan: RoutePlan) -> bool:
    try:
        return observer.wants(exchange, plan)
    except Exception as error:
        log.error("an observer failed", exc_info=error)
        return False
