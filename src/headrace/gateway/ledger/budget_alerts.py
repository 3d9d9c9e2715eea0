"""Sends what the store has recorded of budgets to a webhook, one alert after another.

Owns the tries, their bounds and what is sent. The store says which alerts are still to be sent, so that they outlive
the process; what a budget is, and when an alert is due, is not known here.

Each alert is recorded once, in the transaction of the charge that reached its threshold. It is posted until the
receiver says 2xx or its tries are used up. A process that dies between the receiver's answer and its note of it posts
the alert again at the next start, with the same id in the body and in `Idempotency-Key`: nobody can do better without
the receiver's help.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, Protocol

import msgspec

from headrace.config.environment import required_secret
from headrace.config.ledger_section import LedgerConfig
from headrace.gateway.ledger.ledger_store import BudgetAlert

log: Final = logging.getLogger(__name__)

# url, body, headers, seconds → HTTP's status. It may raise what it likes.
Post = Callable[[str, bytes, Mapping[str, str], float], Awaitable[int]]
_LOOK_S: Final = 60.0  # between two looks at what is to be sent, where nobody wakes it
SendOutcome = Literal["sent", "failed"]


class AlertQueue(Protocol):
    """The store, as far as the courier uses it."""

    async def next_alert(self) -> BudgetAlert | None: ...
    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None: ...


class AlertWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """Where alerts go. The URL is the operator's own, and may lead wherever the operator likes."""

    url: str
    headers: Mapping[str, str] = {}
    timeout_s: float = 5.0  # of one try
    tries: int = 5
    first_pause_s: float = 1.0  # and twice as long after each further try
    longest_pause_s: float = 60.0

    @classmethod
    def from_config(cls, config: LedgerConfig, environ: Mapping[str, str]) -> AlertWebhook | None:
        """Return None where no webhook is configured. ConfigError where the environment lacks its URL or header."""
        if config.webhook_url_env is None:
            return None
        headers: dict[str, str] = {}
        if config.webhook_header_env is not None:
            headers["authorization"] = required_secret(environ, config.webhook_header_env, "ledger.webhook_header_env")
        return cls(url=required_secret(environ, config.webhook_url_env, "ledger.webhook_url_env"), headers=headers)


class AlertSender:
    def __init__(
        self,
        alerts: AlertQueue,
        webhook: AlertWebhook | None,  # without one, alerts are in the log and the store alone
        *,
        post: Post | None = None,
        count: Callable[[SendOutcome], None] = lambda outcome: None,
    ) -> None:
        self._alerts = alerts
        self._webhook = webhook
        self._post = _post if post is None else post
        self._count = count
        self._woken = asyncio.Event()
        self._woken.set()  # what an earlier process has left

    def wake(self) -> None:
        """There may be something to send."""
        self._woken.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):  # then another gateway may have died over one
                async with asyncio.timeout(_LOOK_S):
                    await self._woken.wait()
            self._woken.clear()
            try:
                while (alert := await self._alerts.next_alert()) is not None:
                    sent = self._webhook is None or await self._send(self._webhook, alert)
                    await self._alerts.alert_done(alert, sent=sent)
            except Exception as error:  # of the store; what it has of them stays there
                log.error("alerts cannot be sent: %s", str(error) or type(error).__name__)
                await asyncio.sleep(1.0 if self._webhook is None else self._webhook.longest_pause_s)
                self._woken.set()

    async def _send(self, webhook: AlertWebhook, alert: BudgetAlert) -> bool:
        body = msgspec.json.encode(alert.as_json())
        headers = {"content-type": "application/json", "idempotency-key": alert.id, **webhook.headers}
        pause = webhook.first_pause_s
        for number in range(webhook.tries):
            if number:
                await asyncio.sleep(pause)
                pause = min(2 * pause, webhook.longest_pause_s)
            try:
                async with asyncio.timeout(webhook.timeout_s):
                    status = await self._post(webhook.url, body, headers, webhook.timeout_s)
                what = f"answered {status}"
            except Exception as error:
                status, what = 0, f"failed: {type(error).__name__}"  # its text may have the URL, which may be a secret
            if 200 <= status < 300:
                self._count("sent")
                return True
            log.warning("the webhook for alerts %s", what)
        self._count("failed")
        log.error("alert %s was not taken by the webhook and is given up", alert.id)
        return False


async def _post(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> int:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as response,
    ):
        return response.status
