"""ScalePolicy: how many replicas a variant needs, from its predicted wait, its objective and what it may cost.

Pure: time and load are passed in, and a simulator can stand in for engines. A replica is added when requests would wait
too long for a while, and removed only when the rest would have been fast enough for much longer, so that the number
does not swing.
"""

from __future__ import annotations

import math

import msgspec


class ScaleRules(msgspec.Struct, frozen=True, kw_only=True):
    least: int = 1
    most: int = 1
    wait_s: float = 1.0  # predicted time to the first token above which a replica is added
    calm: float = 0.4  # share of `wait_s` that would still be kept with one replica less
    up_s: float = 2.0  # seconds that the wait must be too long
    down_s: float = 60.0  # seconds that it must be calm
    idle_stop_s: float | None = None  # seconds without a request before the last replica stops; None: it stays

    @classmethod
    def within(cls, *, price: float, budget: float | None, **rules: float | None) -> ScaleRules:
        """Lower `most` to what the budget pays, both for the same time. At least one replica is paid."""
        found = msgspec.convert(rules, cls)
        if budget is None or price <= 0:
            return found
        paid = max(1, found.least, math.floor(budget / price + 1e-9))
        return msgspec.structs.replace(found, most=min(found.most, paid))


class ScaleLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant's replicas have to do now."""

    replicas: int  # that run or start
    ready: int
    wait_s: float  # predicted, for a new request, at the replica that would answer first
    requests: int  # running, queued, or waiting for a replica


class ScalePolicy:
    """The policy of one variant. Remembers since when the load has been too high, calm or absent."""

    def __init__(self, rules: ScaleRules) -> None:
        self.rules = rules
        self._late_since: float | None = None
        self._calm_since: float | None = None
        self._idle_since: float | None = None

    def decide(self, now: float, load: ScaleLoad) -> int:
        """Return the number of replicas to have. `now` is in seconds and grows."""
        rules = self.rules
        self._idle_since = None if load.requests else self._first(self._idle_since, now)
        if load.replicas < max(rules.least, int(load.requests > 0)):
            return max(rules.least, 1 if load.requests else 0)
        if load.replicas > rules.most:
            return rules.most
        if load.ready < load.replicas:
            # What starts is not yet in the prediction.
            self._late_since = self._calm_since = None
            return load.replicas
        late = load.wait_s > rules.wait_s
        self._late_since = self._first(self._late_since, now) if late else None
        if self._late_since is not None and now - self._late_since >= rules.up_s:
            self._late_since = self._calm_since = None
            wanted = math.ceil(load.replicas * load.wait_s / rules.wait_s)
            return min(rules.most, max(load.replicas + 1, min(wanted, 2 * load.replicas)))
        return self._fewer(now, load)

    def _fewer(self, now: float, load: ScaleLoad) -> int:
        rules, count = self.rules, load.replicas
        if count > max(1, rules.least):
            calm = load.wait_s * count / (count - 1) <= rules.calm * rules.wait_s
            self._calm_since = self._first(self._calm_since, now) if calm else None
            if self._calm_since is not None and now - self._calm_since >= rules.down_s:
                self._calm_since = now  # the next one after as long again
                return count - 1
        elif count == 1 and rules.least == 0 and rules.idle_stop_s is not None and self._idle_since is not None:
            return 0 if now - self._idle_since >= rules.idle_stop_s else 1
        return count

    @staticmethod
    def _first(since: float | None, now: float) -> float:
        return now if since is None else since
