"""Tells systemd how the server is: ready, stopping, alive. Without systemd (no NOTIFY_SOCKET) it does nothing.

The protocol is one datagram of `NAME=VALUE` lines on a Unix socket; see sd_notify(3). The watchdog is fed from the
event loop, so a loop that is stuck is restarted by systemd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping


class ServiceManager:
    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ)

    def notify(self, **fields: str | int) -> bool:
        """Send fields such as READY=1. Return whether they were sent; a manager that is gone is no error."""
        if not self._address:
            return False
        # A leading @ stands for the abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.setblocking(False)
            s.connect(address)
            s.send(message.encode())
            return True
        return False

    async def feed_watchdog(self) -> None:
        """Tell the manager that the event loop runs, twice in each of its periods, until cancelled."""
        while self.watchdog_s:
            self.notify(WATCHDOG=1)
            await asyncio.sleep(self.watchdog_s / 2)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """Return the seconds after which systemd restarts a service that is silent; 0 without a watchdog."""
    text = environ.get("WATCHDOG_USEC", "")
    meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if meant and text.isdecimal() else 0.0
