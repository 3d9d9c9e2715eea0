"""WorkerClients: the sockets of a worker's clients, and the wait for whatever happens next.

Reads and writes frames, and cuts off clients that break the protocol or do not read. Does not know what messages mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from headrace.engine.interface.outputs import SequenceOutput
from headrace.engine.process import wire

log = logging.getLogger("headrace.engine.process.worker")

_READ: Final = 256 * 1024  # bytes per read
_MOST_UNREAD: Final = 64 * 1024 * 1024  # 64 MiB of unread output, after which a client is disconnected
_BACKLOG: Final = 128


class ConnectedClient(msgspec.Struct, eq=False):
    socket: socket.socket
    frames: wire.FrameDecoder[wire.ClientMessage]
    unsent: bytearray = msgspec.field(default_factory=bytearray)
    greeted: bool = False
    pings: bool = False  # it has sent one
    leaving: bool = False  # disconnect once everything is sent
    requests: set[str] = set()
    outputs: list[SequenceOutput] = []  # outputs of the step being delivered


class WorkerClients:
    def __init__(
        self,
        path: Path,
        *,
        most: int,
        take: Callable[[ConnectedClient, wire.ClientMessage], None],
        left: Callable[[ConnectedClient], None],
    ) -> None:
        """`path`: of the socket to listen on. `most`: clients at once. `take` gets each message, and `left` each client
        that is gone."""
        self._path = path
        self._most = most
        self._take = take
        self._left = left
        self._clients: set[ConnectedClient] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
        self._listener = listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    # The wait

    def wait(self, timeout: float | None) -> None:
        """Handle what has happened, and wait up to `timeout` seconds for it."""
        for key, events in self._selector.select(timeout):
            key.data(key, events)

    def wake(self) -> None:
        """End a wait. Safe to call from any thread."""
        with contextlib.suppress(OSError):  # a full pipe means that it is awake already
            self._wake_writer.send(b"\0")

    @property
    def wake_descriptor(self) -> int:
        """Where a byte ends a wait, for signals."""
        return self._wake_writer.fileno()

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call back whenever a descriptor can be read."""

        def readable(*_: object) -> None:
            call()

        self._selector.register(descriptor, selectors.EVENT_READ, readable)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    # The clients

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: ConnectedClient) -> bool:
        return client in self._clients

    @property
    def pinging(self) -> list[ConnectedClient]:
        """Clients that have sent a ping."""
        return [client for client in self._clients if client.pings]

    @property
    def have_unsent(self) -> bool:
        return any(client.unsent for client in self._clients)

    def send(self, client: ConnectedClient, message: wire.WorkerMessage) -> None:
        """Send a message, later if the client does not read. WireError if it is too large for a frame."""
        if client not in self._clients or client.leaving:
            return
        data = wire.encode_frame(message)
        if client.unsent:
            client.unsent += data
            if len(client.unsent) > _MOST_UNREAD:
                log.warning("a client left %d bytes unread and is cut off", len(client.unsent))
                self.disconnect(client)
            return
        client.unsent = data
        self._write(client)

    def send_all(self, message: wire.WorkerMessage) -> None:
        for client in list(self._clients):
            self.send(client, message)

    def dismiss(self, client: ConnectedClient, reason: str) -> None:
        """Send the reason, then close the connection."""
        self.send(client, wire.Bye(reason))
        if client in self._clients:
            client.leaving = True
            if not client.unsent:
                self.disconnect(client)

    def disconnect(self, client: ConnectedClient) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()
        self._left(client)

    def close(self) -> None:
        for client in list(self._clients):
            self.disconnect(client)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    # Events

    def _on_wake(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _on_connection(self, *_: object) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return  # the peer left again, or no descriptors are left; it will retry
        connection.setblocking(False)
        client = ConnectedClient(connection, wire.from_clients())
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, _Handler(self, client))
        if len(self._clients) > self._most:
            self.dismiss(client, f"{self._most} clients are connected already")

    def on_client(self, client: ConnectedClient, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(client)
        if not events & selectors.EVENT_READ or client not in self._clients or client.leaving:
            return
        try:
            data = client.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.disconnect(client)
            return
        try:
            for message in client.frames.feed(data):
                self._take(client, message)
                if client not in self._clients or client.leaving:
                    return
        except wire.WireError as error:
            self.dismiss(client, str(error))

    def _write(self, client: ConnectedClient) -> None:
        unsent = client.unsent
        try:
            while unsent:
                del unsent[: client.socket.send(unsent)]
        except BlockingIOError:
            self._selector.modify(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, _Handler(self, client))
            return
        except OSError:
            self.disconnect(client)
            return
        if client.leaving:
            self.disconnect(client)
        else:
            self._stop_writing(client)

    def _stop_writing(self, client: ConnectedClient) -> None:
        key = self._selector.get_key(client.socket)
        if key.events & selectors.EVENT_WRITE:
            self._selector.modify(client.socket, selectors.EVENT_READ, key.data)


class _Handler:
    """The selector's callback for one client."""

    __slots__ = ("_client", "_clients")

    def __init__(self, clients: WorkerClients, client: ConnectedClient) -> None:
        self._clients = clients
        self._client = client

    def __call__(self, _: object, events: int) -> None:
        self._clients.on_client(self._client, events)


def listen(path: Path) -> socket.socket:
    """Return a listening socket that only this user can connect to."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left behind by a worker that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
