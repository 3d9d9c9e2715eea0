"""Guards one variant's answerer with its circuit breaker.

Asks the breaker for a permit, reports how the call ended, and measures the time to the first output. Looks at no delta
after that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.gateway.api_errors import ApiError
from headrace.gateway.circuit_breaker import CallPermit, CircuitBreaker
from headrace.gateway.requests.text_request import ChoiceDelta, TakeDelta
from headrace.gateway.routing.composite_answerer import Answerer, Clock, has_output
from headrace.gateway.serving.exchange import Exchange

# Errors that say nothing about the variant: the request asks for too much, or the server itself shuts down.
_NOT_VARIANT_FAILURES = frozenset({"deadline_unreachable", "draining", "too_many_requests"})


def is_variant_failure(error: ApiError) -> bool:
    """True if an error shows that the variant is unhealthy."""
    if error.code in _NOT_VARIANT_FAILURES:
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
        """`answered` is called with the seconds to the first output."""
        self.exchange: Exchange = inner.exchange
        self.gone = False
        self._inner = inner
        self._breaker = breaker
        self._permit: CallPermit | None = None
        self._answered = answered
        self._clock = clock
        self._began = 0.0
        self._first_s: float | None = None

    async def begin(self) -> None:
        self._permit = self._breaker.enter()
        if self._permit is None:
            raise ApiError(
                f"Variant '{self.exchange.served.name}' is unavailable: its circuit breaker is open. Retry later.",
                kind="overloaded_error",
                code="variant_unavailable",
                retry_after=max(self._breaker.retry_after(), 0.1),
            )
        self._began = self._clock()
        try:
            await self._inner.begin()
        except Exception as error:
            self._report(error)
            raise

    async def run(self, take: TakeDelta) -> bool:
        try:
            ended = await self._inner.run(take if self._first_s is not None else self._timing(take))
        except Exception as error:
            self._report(error)
            raise
        if ended and not self.gone and self._permit is not None:
            self._permit.succeeded(self._first_s)
        return ended

    def cancel(self) -> None:
        self.gone = True
        self._inner.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        if self._permit is not None:
            if self._first_s is not None:
                self._permit.succeeded(self._first_s)  # it answered, though not to its end
            else:
                self._permit.dropped()
        self._inner.settle(error)

    def _timing(self, take: TakeDelta) -> TakeDelta:
        def timed(piece: ChoiceDelta) -> bool:
            if self._first_s is None and has_output(piece):
                self._first_s = max(0.0, self._clock() - self._began)
                if self._answered is not None:
                    self._answered(self._first_s)
            return take(piece)

        return timed

    def _report(self, error: Exception) -> None:
        if self._permit is None:
            return
        if not isinstance(error, ApiError) or is_variant_failure(error):
            self._permit.failed()
        else:
            self._permit.dropped()
