"""Watches the objectives: logs alerts, posts them to the webhook, and switches fast mode on while one pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.ledger.budget_alerts import Post, post_alert
from headrace.observe import metrics
from headrace.observe.slo.objectives import Alert, Objectives

log: Final = logging.getLogger(__name__)

_EVERY_S: Final = 10.0
_FAST_S: Final = 300.0  # that fast mode lasts after the last time that an objective paged
_TRIES: Final = 4
_TIMEOUT_S: Final = 5.0

# Switches fast mode on for all tenants: seconds and reason.
SetFast = Callable[[float, str], Coroutine[Any, Any, Any]]


class ObjectiveWatch:
    def __init__(
        self,
        objectives: Objectives,
        *,
        url: str = "",  # of the webhook; empty: alerts are only logged
        headers: Mapping[str, str] | None = None,
        fast: Collection[str] = (),  # SLOs that switch fast mode on
        set_fast: SetFast | None = None,
        post: Post = post_alert,
        every_s: float = _EVERY_S,
        pause_s: float = 1.0,  # after the first try to post; doubles each time
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objectives = objectives
        self._url = url
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._fast = frozenset(fast)
        self._set_fast = set_fast
        self._post = post
        self._every_s = every_s
        self._pause_s = pause_s
        self._clock = clock
        self._fast_until = 0.0

    async def run(self) -> None:
        """Look at the objectives until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        for alert in self._objectives.evaluate():
            known = alert_json(alert)
            if alert.fires:
                log.warning("an objective burns its error budget: %s", known)
            else:
                log.info("an objective recovered: %s", known)
            metrics.of(metrics.slo_alerts, alert.objective.slo, alert.severity if alert.fires else "resolved").inc()
            if self._url:
                await self._send(known)
        await self._hold_fast_mode()

    async def _send(self, known: dict[str, Any]) -> None:
        body = msgspec.json.encode(known)
        pause = self._pause_s
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(pause)
                pause *= 2.0
            with contextlib.suppress(Exception):  # its text may contain the URL, which may be secret
                async with asyncio.timeout(_TIMEOUT_S):
                    if 200 <= await self._post(self._url, body, self._headers, _TIMEOUT_S) < 300:
                        metrics.of(metrics.alerts, "sent").inc()
                        return
        metrics.of(metrics.alerts, "failed").inc()
        log.error("the webhook did not accept the alert of %s", known["slo"])

    async def _hold_fast_mode(self) -> None:
        paging = sorted(self._objectives.paging() & self._fast)
        now = self._clock()
        if not paging or self._set_fast is None or self._fast_until - now > _FAST_S / 2:
            return
        try:
            await self._set_fast(_FAST_S, f"objectives of {', '.join(paging)}")
            self._fast_until = now + _FAST_S
        except ApiError as error:
            log.warning("fast mode was not switched on: %s", error)
            self._fast_until = now + _FAST_S  # do not say so every few seconds


def alert_json(alert: Alert) -> dict[str, Any]:
    objective = alert.objective
    return {
        "type": "slo_alert",
        "state": "firing" if alert.fires else "resolved",
        "severity": alert.severity,
        "slo": objective.slo,
        "surface": objective.surface,
        "objective": objective.name,
        "target": objective.target,
        "burn_rate": round(alert.burn_rate, 2),
        "window": alert.window,
        "at": int(time.time()),
    }
