"""ReplicaLinks: keeps a client connected to its replicas: connects, greets, watches and reconnects.

Does not know requests: the client decides whether it takes a worker, and what becomes of a lost worker's requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from headrace.engine.process import wire
from headrace.engine.process.submission import ClientTimeouts, Replica
from headrace.engine.process.worker_address import WorkerAddressError, WorkerTls
from headrace.engine.process.worker_connection import WorkerConnection

log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    def take(self, replica: Replica, message: wire.WorkerMessage) -> None: ...

    def accept(self, replica: Replica, connection: WorkerConnection, welcome: wire.Welcome) -> bool:
        """Return whether the worker can serve. If not, `replica.wrong` says why."""
        ...

    def lose(self, replica: Replica) -> None:
        """The worker is gone, or was not accepted."""
        ...


class ReplicaLinks:
    def __init__(self, owner: LinkOwner, waits: ClientTimeouts, tls: WorkerTls | None) -> None:
        self._owner = owner
        self._waits = waits
        self._tls = tls

    async def keep(self, replica: Replica) -> None:
        """Connect, watch and reconnect until cancelled."""
        waits, wait, told = self._waits, self._waits.reconnect, False
        most = waits.reconnect_most_remote if replica.address.is_remote else waits.reconnect_most
        while True:
            try:
                connection = await WorkerConnection.open(
                    replica.address, lambda message: self._owner.take(replica, message), tls=self._tls
                )
            except (OSError, WorkerAddressError) as error:
                if replica.address.is_remote and not told:
                    log.warning("cannot connect to the worker at %s: %s", replica.address, str(error) or "timeout")
                    told = True
                await asyncio.sleep(wait)
                wait = min(wait * 1.5, most)
                continue
            try:
                replica.greeting = asyncio.get_running_loop().create_future()
                connection.send(wire.Hello(wire.VERSION))
                welcome = await _wait_unless_closed(connection.closed, replica.greeting, waits.silence)
                if welcome is not None and self._owner.accept(replica, connection, welcome):
                    wait, told = waits.reconnect, False
                    await self._watch(replica, connection)
                else:
                    if replica.wrong is not None and not told:
                        log.warning("%s", replica.wrong)
                        told = True
                    await asyncio.sleep(wait)
                    wait = min(wait * 1.5, most)
            finally:
                connection.abort()
                replica.connection = None
                self._owner.lose(replica)

    async def _watch(self, replica: Replica, connection: WorkerConnection) -> None:
        """Return when the worker is gone, or does not answer pings."""
        replica.unanswered = 0
        while not connection.closed.done():
            silent = replica.unanswered * self._waits.ping > self._waits.silence
            if silent and (replica.submissions or replica.address.is_remote):
                return  # a network that was cut says nothing
            connection.send(wire.Ping(replica.unanswered))
            replica.unanswered += 1
            await asyncio.wait({connection.closed}, timeout=self._waits.ping)


T = TypeVar("T")


async def _wait_unless_closed(ended: asyncio.Future[None], awaited: Awaitable[T], seconds: float) -> T | None:
    """Return the awaited value, or None if the connection ends or the time is over first."""
    task = asyncio.ensure_future(awaited)
    await asyncio.wait({ended, task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None
