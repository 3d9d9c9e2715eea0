"""Posts budget alerts to a webhook, one after another, with bounded retries.

The store records each alert once, in the transaction of the charge that reached the threshold, and keeps it until it is
sent, so alerts survive restarts. An alert is posted until the receiver answers 2xx or the tries are used up. If the
process dies after the receiver answered and before that is recorded, it posts the alert again at the next start with
the same id in the body and in `Idempotency-Key`.
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
from headrace.observe.outage_log import OutageLog

log: Final = logging.getLogger(__name__)

# (url, body, headers, timeout in seconds) → HTTP status. May raise any exception.
Post = Callable[[str, bytes, Mapping[str, str], float], Awaitable[int]]
_POLL_S: Final = 60.0  # interval of checks for alerts to send
SendOutcome = Literal["sent", "failed"]


class AlertQueue(Protocol):
    """The methods of the store that the sender uses."""

    async def next_alert(self) -> BudgetAlert | None: ...
    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None: ...


class AlertWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """Posts alerts to a URL. The operator chooses the URL, so any address is allowed."""

    url: str
    headers: Mapping[str, str] = {}
    timeout_s: float = 5.0  # of one try
    tries: int = 5
    first_pause_s: float = 1.0  # doubles after each try
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
        webhook: AlertWebhook | None,  # None: alerts are only logged and stored
        *,
        post: Post | None = None,
        count: Callable[[SendOutcome], None] = lambda outcome: None,
    ) -> None:
        self._alerts = alerts
        self._webhook = webhook
        self._post = post_alert if post is None else post
        self._count = count
        self._woken = asyncio.Event()
        self._woken.set()  # alerts of an earlier process may be waiting

    def wake(self) -> None:
        """Check for alerts to send now."""
        self._woken.set()

    async def run(self) -> None:
        """Send alerts until cancelled."""
        outage = OutageLog(log, "alerts cannot be sent")
        while True:
            with contextlib.suppress(TimeoutError):  # another gateway may have died while sending one
                async with asyncio.timeout(_POLL_S):
                    await self._woken.wait()
            self._woken.clear()
            try:
                while (alert := await self._alerts.next_alert()) is not None:
                    sent = self._webhook is None or await self._send(self._webhook, alert)
                    await self._alerts.alert_done(alert, sent=sent)
                outage.succeeded()
            except Exception as error:  # of the store, which keeps the alerts
                outage.failed(error)
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
                status, what = 0, f"failed: {type(error).__name__}"  # the text may contain the URL, which may be secret
            if 200 <= status < 300:
                self._count("sent")
                return True
            log.warning("the webhook for alerts %s", what)
        self._count("failed")
        log.error("the webhook did not accept alert %s; giving up", alert.id)
        return False


async def post_alert(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> int:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as response,
    ):
        return response.status
