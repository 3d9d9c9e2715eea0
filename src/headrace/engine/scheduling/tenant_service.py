"""Tracks what each tenant was served, in total and recently, and which tenants are over their fair share.

Recent service covers the last minute or two, older service counting less and less. A tenant is over its share if it
took `SEVERAL` times an equal share by weight among recently served tenants, and a large part of everything: three
quarters with a handful of tenants, a fifth with very many.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

LATE: Final = 60.0  # seconds after which service counts 1/e
SEVERAL: Final = 4.0
LEAST_PART: Final = 0.2  # of everything served recently
MOST_PART: Final = 0.75
_LEAST_TOKENS: Final = 4096.0  # served in all before any tenant can be over its share
_EVERY: Final = 0.25  # seconds between evaluations
_MOST_AGE: Final = 27.0  # times LATE that the scale grows, up to about 5e11, before it is reset
_GONE: Final = 600.0  # times LATE after which service counts nothing


class TenantAccount:
    """A tenant's charges and queue counts."""

    __slots__ = ("charged", "name", "over", "queued", "queued_tokens", "running", "used", "waiting", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0  # from its latest request
        self.charged = [0.0, 0.0]  # weighted tokens: foreground, background
        self.used = 0.0  # recent service, on RecentService's scale
        self.over = False  # much more than its fair share
        self.waiting = [0, 0]  # in the queue: foreground, background
        self.queued = 0  # waiting sequences, those following another's prefix included
        self.queued_tokens = 0
        self.running = 0


class RecentService:
    """Recent service per tenant. Instead of decaying old service, new service is counted with a growing scale."""

    def __init__(self) -> None:
        self._total = 0.0
        self._scale = 1.0
        self._since = 0.0  # when the scale was 1
        self._looked = 0.0
        self._weight = 0.0  # of recently served tenants
        # when last served, and the weight then
        self._recent: OrderedDict[TenantAccount, tuple[float, float]] = OrderedDict()
        self._served: set[TenantAccount] = set()  # since the last evaluation: only these can have become over
        self._over: set[TenantAccount] = set()
        self._now = 0.0

    def add(self, account: TenantAccount, tokens: float) -> None:
        scaled = tokens * self._scale
        account.used += scaled
        self._total += scaled
        self._served.add(account)
        before = self._recent.get(account)
        if before is None:
            self._weight += account.weight
            self._recent[account] = (self._now, account.weight)
        elif before[0] != self._now:
            self._recent[account] = (self._now, before[1])
            self._recent.move_to_end(account)

    def tick(self, now: float) -> list[TenantAccount]:
        """Re-evaluate who is over its share. Return the tenants that no longer are."""
        self._now = now
        age = (now - self._since) / LATE
        if age > _MOST_AGE:  # also after a pause: a clock may start anywhere, and an engine may be idle for days
            self._rescale(now, math.exp(-min(age, _GONE)))
            age = 0.0
        self._scale = math.exp(age)
        if now - self._looked < _EVERY:
            return []
        self._looked = now
        recent = self._recent
        while recent:
            account, (served, weight) = next(iter(recent.items()))
            if served > now - 2.0 * LATE:
                break
            del recent[account]
            self._weight -= weight
            self._total -= account.used
            account.used = 0.0
        return self._look()

    @property
    def any_over(self) -> bool:
        return bool(self._over)

    def forget(self, account: TenantAccount) -> None:
        """Remove an account."""
        self._over.discard(account)
        self._served.discard(account)
        before = self._recent.pop(account, None)
        if before is not None:
            self._weight -= before[1]
            self._total -= account.used

    def _look(self) -> list[TenantAccount]:
        over: set[TenantAccount] = set()
        if self._total > _LEAST_TOKENS * self._scale and len(self._recent) > 1:
            for account in self._served | self._over:
                recent = self._recent.get(account)
                part = account.used / self._total
                if recent is not None and part > min(max(SEVERAL * recent[1] / self._weight, LEAST_PART), MOST_PART):
                    over.add(account)
        self._served.clear()
        ended = [account for account in self._over if account not in over]
        for account in ended:
            account.over = False
        for account in over:
            account.over = True
        self._over = over
        return ended

    def _rescale(self, now: float, faded: float) -> None:
        for account in self._recent:
            account.used *= faded
        self._total *= faded
        self._since = now
