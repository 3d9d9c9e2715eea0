"""Chooses the tenants that get their own metrics label: a bounded number, those with the most traffic.

All others share the label "other". Older traffic counts less. A tenant keeps its label until another has clearly more
traffic, so that two tenants of equal size do not alternate. A callback reports each label that is given up, so that its
metrics can be removed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Final

NONE: Final = "-"  # label of requests without a tenant
OTHER: Final = "other"
_MORE: Final = 1.5  # factor of traffic that takes a label from another tenant
_FORGOTTEN: Final = 0.01  # requests; older traffic is dropped


class TenantLabels:
    def __init__(
        self,
        most: int = 50,  # labels besides NONE and OTHER
        *,
        counted: int = 20_000,  # tenants whose traffic is counted
        half_life_s: float = 3600.0,  # half-life of traffic
        rank_s: float = 60.0,  # interval of rankings
        given_up: Callable[[str], None] = lambda label: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._counted = counted
        self._half_life_s = half_life_s
        self._rank_s = rank_s
        self._given_up = given_up
        self._monotonic = monotonic
        self._traffic: dict[str, float] = {}
        self._labelled: set[str] = set()
        self._ranked = monotonic()

    @property
    def labelled(self) -> frozenset[str]:
        return frozenset(self._labelled)

    def label(self, tenant: str, amount: float = 1.0) -> str:
        """Count `amount` of traffic and return the tenant's label."""
        if not tenant:
            return NONE
        now = self._monotonic()
        if now - self._ranked >= self._rank_s:
            self._rank(now)
        if tenant in self._traffic or len(self._traffic) < self._counted:
            self._traffic[tenant] = self._traffic.get(tenant, 0.0) + amount
        if tenant not in self._labelled:
            if len(self._labelled) >= self._most or tenant in (NONE, OTHER):
                return OTHER
            self._labelled.add(tenant)
        return tenant

    def _rank(self, now: float) -> None:
        faded = 0.5 ** ((now - self._ranked) / self._half_life_s)
        self._ranked = now
        left = {tenant: amount * faded for tenant, amount in self._traffic.items()}
        self._traffic = {tenant: amount for tenant, amount in left.items() if amount >= _FORGOTTEN}

        def weight(tenant: str) -> float:
            return self._traffic.get(tenant, 0.0) * (_MORE if tenant in self._labelled else 1.0)

        candidates = set(self._traffic) - {NONE, OTHER}
        top = set(heapq.nlargest(self._most, sorted(candidates), key=weight))
        gone, self._labelled = self._labelled - top, top
        for tenant in sorted(gone):
            self._given_up(tenant)
