"""One variant's answering under the eyes of its breaker and of whoever wants to know how long its first token took.

Owns Watched, which asks the breaker for a permit and tells it how the call ended. It looks at pieces up to the first
that a client hears, and at none after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.gateway.api_errors import ApiError
from headrace.gateway.circuit_breaker import CallPermit, CircuitBreaker
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.routing.composite_answerer import Answerer, Clock, Take, has_output
from headrace.gateway.serving.exchange import Exchange

# Errors that say nothing of the variant: the request asks for too much, or the server itself is about to end.
_NOT_ITS_FAULT = frozenset({"deadline_unreachable", "draining", "too_many_requests"})


def is_variant_failure(error: ApiError) -> bool:
    """Whether an error says that the variant is not well."""
    if error.code in _NOT_ITS_FAULT:
        return False
    return error.status >= 500 or error.kind == "rate_limit_error"


class BreakerAnswerer:
    def __init__(
        self,
        inner: Answerer,
        breaker: CircuitBreaker,
        *,
        answered: Callable[[float], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`answered` hears the seconds to the first token."""
        self.exchange: Exchange = inner.exchange
        self.gone = False
        self._inner = inner
        self._breaker = breaker
        self._permit: CallPermit | None = None
        self._answered = answered
        self._clock = clock
        self._began = 0.0
        self._first: float | None = None  # seconds to it

    async def begin(self) -> None:
        self._permit = self._breaker.enter()
        if self._permit is None:
            raise ApiError(
                f"'{self.exchange.served.name}' is left alone for now",
                kind="overloaded_error",
                code="variant_unavailable",
                retry_after=max(self._breaker.retry_after(), 0.1),
            )
        self._began = self._clock()
        try:
            await self._inner.begin()
        except Exception as error:
            self._hear(error)
            raise

    async def run(self, take: Take) -> bool:
        try:
            ended = await self._inner.run(take if self._first is not None else self._looking(take))
        except Exception as error:
            self._hear(error)
            raise
        if ended and not self.gone and self._permit is not None:
            self._permit.succeeded(self._first)
        return ended

    def cancel(self) -> None:
        self.gone = True
        self._inner.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        if self._permit is not None:
            if self._first is not None:
                self._permit.succeeded(self._first)  # it answered, and was not needed to its end
            else:
                self._permit.dropped()
        self._inner.settle(error)

    def _looking(self, take: Take) -> Take:
        def looked(piece: ChoiceDelta) -> bool:
            if self._first is None and has_output(piece):
                self._first = max(0.0, self._clock() - self._began)
                if self._answered is not None:
                    self._answered(self._first)
            return take(piece)

        return looked

    def _hear(self, error: Exception) -> None:
        if self._permit is None:
            return
        if not isinstance(error, ApiError) or is_variant_failure(error):
            self._permit.failed()
        else:
            self._permit.dropped()
