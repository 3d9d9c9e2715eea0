"""RequestCharges: counts calls that reserve no tokens: endpoints other than the models', and requests with a mistake.

They count towards the requests per second and per minute of their tenant and key, never as running requests. Calls
without a valid key can have a limit for each address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from headrace.config import LimitSet
from headrace.gateway.limits.limit_errors import limit_reached_error
from headrace.gateway.limits.limit_scopes import LimitRefusal, LimitRequest, LimitScope
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.rate_limiter import RateLimiter

_ONE_REQUEST: Final = LimitRequest(input_tokens=0, most_output=0, first=(0, 0), step=(0, 0), ahead=0, runs=False)


class RequestCharges:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        limiter: RateLimiter,
        *,
        address_requests_per_s: int | None = None,  # of calls without a valid key; None: no limit
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter = limiter
        self._address = None if address_requests_per_s is None else LimitSet(requests_per_s=address_requests_per_s)
        self._addresses = LocalLimitStore(entries=64, clock=clock)

    async def charge(self, scopes: Sequence[LimitScope], tenant: str, *, closed: bool) -> None:
        """Count one request. LimitError if a limit on requests has no room; nothing is counted then."""
        if limited := _limiting_requests(scopes):
            reservation = await self._limiter.reserve(
                limited, input_tokens=0, most_output=0, tenant=tenant, closed=closed, runs=False
            )
            reservation.settle_soon(0, 0, whole=False)

    def check(self, scopes: Sequence[LimitScope]) -> None:
        """LimitError if a limit on requests has no room, as far as this process counts. Counts nothing."""
        if limited := _limiting_requests(scopes):
            self._limiter.check_requests(limited)

    def charge_address(self, address: str) -> None:
        """Count one request of an address. LimitError if it has no room."""
        if self._address is not None and address:
            found = self._addresses.reserve((LimitScope("address", address, self._address),), _ONE_REQUEST)
            if isinstance(found, LimitRefusal):
                self._refuse(found)
            else:
                found.close(0, 0)

    def check_address(self, address: str) -> None:
        """LimitError if an address has no room. Counts nothing."""
        if self._address is not None and address:
            found = self._addresses.requests_left((LimitScope("address", address, self._address),))
            if found is not None:
                self._refuse(found)

    def _refuse(self, refusal: LimitRefusal) -> None:
        self._limiter.note("refused", f"{refusal.scope.kind}_{refusal.field}")
        raise limit_reached_error(refusal)


def _limiting_requests(scopes: Sequence[LimitScope]) -> list[LimitScope]:
    return [
        scope
        for scope in scopes
        if scope.limits.requests_per_s is not None or scope.limits.requests_per_min is not None
    ]
