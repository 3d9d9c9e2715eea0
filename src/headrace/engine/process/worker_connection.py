"""A client's connection to one worker, on this machine or another: sends and receives messages. Does not interpret
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from headrace.engine.process import wire
from headrace.engine.process.worker_address import WorkerAddress, WorkerAddressError, WorkerTls

_CONNECT_S = 5.0  # to a host that may be gone


class WorkerConnection(asyncio.Protocol):
    def __init__(self, on_message: Callable[[wire.WorkerMessage], None]) -> None:
        self._on_message = on_message
        self._frames = wire.from_worker()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, address: WorkerAddress, on_message: Callable[[wire.WorkerMessage], None], *, tls: WorkerTls | None = None
    ) -> WorkerConnection:
        """Connect. OSError if that fails, WorkerAddressError for TLS files that cannot be used."""
        loop = asyncio.get_running_loop()
        if not address.is_remote:
            _, connection = await loop.create_unix_connection(lambda: cls(on_message), address.path)
            return connection
        if address.tls and tls is None:
            raise WorkerAddressError(f"The worker at {address} needs TLS. Configure a certificate, a key and a CA.")
        context = tls.client_context() if address.tls and tls is not None else None
        name = None if context is None or tls is None else tls.name or address.host
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: cls(on_message), address.host, address.port, ssl=context, server_hostname=name
            )
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not derive from asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except wire.WireError:
            self.abort()  # treat a worker that sends invalid data as dead

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: wire.ClientMessage) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode_frame(message))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
