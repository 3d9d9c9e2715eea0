"""Server: starts in order (socket, engines, ready), and shuts down in order (admit nothing, drain, stop the engines).

App answers requests, and Edge speaks HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Generator
from typing import Final

import structlog

from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.gateway.serving.fleet import Fleet, Loading
from headrace.server.http.request_log import configure_log

log: Final = structlog.stdlib.get_logger("headrace")

_BACKLOG: Final = 2048  # connections that the kernel queues
_GARBAGE: Final = (5_000, 20, 20)  # thresholds of the collector's generations; a request leaves next to no cycles
_OWN_FILES: Final = 512  # open files beside connections: models, the database, uploads, workers' sockets
_HURRY: Final = 2.0  # seconds for engines and storage to close after a second signal


class AddressError(HeadraceError):
    """The address cannot be listened on."""


def run(
    config: Config,
    *,
    ready: Callable[[str], None] | None = None,
    loading: Loading | None = None,
    fleet: Fleet | None = None,
) -> None:
    """Serve until a signal ends it. `ready` is called with the server's URL once it takes requests; `fleet` replaces
    the configuration's models."""

    def started(url: str) -> None:
        # What is loaded now stays, so the collector need not scan it again, which takes tens of milliseconds each time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GARBAGE)
        if ready is not None:
            ready(url)

    configure_log(config.log)
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(serve(config, ready=started, loading=loading, fleet=fleet))


async def serve(
    config: Config,
    *,
    ready: Callable[[str], None] | None = None,
    loading: Loading | None = None,
    signals: bool = True,
    fleet: Fleet | None = None,
) -> None:
    await Server(config, fleet=fleet, loading=loading).run(ready=ready, signals=signals)


class Server:
    """All of it belongs to one event loop. AddressError, ModelError or RequestError if it cannot be created."""

    def __init__(self, config: Config, *, fleet: Fleet | None = None, loading: Loading | None = None) -> None:
        self.config = config
        with contextlib.ExitStack() as undo:
            self.listening = listen(config)
            undo.callback(self.listening.close)
            self.fleet = Fleet.of(config, loading, early=True) if fleet is None else fleet
            undo.callback(self.fleet.abandon)
            self._make()
            undo.pop_all()

    def _make(self) -> None:
        """Build everything but the engines, which load meanwhile; for that reason the imports are here."""
        from headrace.gateway.database import Database
        from headrace.server.admin.admin_usage import LedgerUsage
        from headrace.server.admin.administration import Administration
        from headrace.server.app import App
        from headrace.server.assemble import assemble
        from headrace.server.durable_state import DurableState
        from headrace.server.endpoint_context import EndpointContext
        from headrace.server.http.edge import ConnectionBounds, Edge
        from headrace.server.routes import all_routes

        config = self.config
        self.database = Database(config.storage.path)
        self.services = services = assemble(config, self.fleet, self.database, os.environ)
        usage = None if services.ledger is None else LedgerUsage(services.ledger)
        self.administration = Administration(config, services.accounts, usage)
        self.url = url_of(config, self.listening)
        self.context = EndpointContext(config, services)
        self.durable = DurableState(self.context, self.database)
        self.app = App(self.context, all_routes(self.context, self.durable, self.administration))
        self.edge = Edge(self.app, ConnectionBounds.of(config.server))
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()

    def end(self) -> None:
        """Drain and shut down. The second call stops waiting for requests in progress."""
        if self._ending.is_set():
            self._hurry.set()
            return
        self.context.is_draining = True
        self._ending.set()
        log.info("draining", running=self.context.running)

    async def run(self, *, ready: Callable[[str], None] | None = None, signals: bool = True) -> None:
        with _signals(self.end) if signals else contextlib.nullcontext():
            starting: asyncio.Task[None] | None = None
            try:
                _allow_connections(self.config.server.connections)
                await self.edge.listen(self.listening, _BACKLOG)
                starting = asyncio.create_task(self._start())
                if await _first(starting, self._ending):
                    starting.result()
                    if ready is not None:
                        ready(self.url)
                await self._ending.wait()
                await self.edge.drain(self.config.server.drain_s, self._hurry)
            finally:
                self.context.is_draining = True
                if starting is not None:
                    starting.cancel()
                    await asyncio.gather(starting, return_exceptions=True)
                await self.edge.close()
                await self._close()
                self.listening.close()

    async def _start(self) -> None:
        await self.fleet.start(lambda name: log.info("loading", model=name))
        await self.services.start()
        await self.administration.start(self.app)
        self.context.is_ready = True
        log.info("ready", models=sorted(self.fleet.served))
        try:
            await self.durable.start()
        except Exception as error:  # endpoints without storage are served all the same
            log.error("storage failed", exc_info=error)

    async def _close(self) -> None:
        async def both() -> None:
            await self.durable.close()
            await self.administration.close()
            await self.services.close()
            await self.fleet.close()
            await self.database.close()

        closing = asyncio.create_task(both())
        if not await _first(closing, self._hurry):
            await asyncio.wait({closing}, timeout=_HURRY)
            closing.cancel()
        for problem in await asyncio.gather(closing, return_exceptions=True):
            if isinstance(problem, Exception):
                log.error("the end failed", exc_info=problem)


async def _first(task: asyncio.Task[None], event: asyncio.Event) -> bool:
    """Wait for either. Return whether the task is done."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()


def _allow_connections(wanted: int) -> None:
    """Raise the limit of open files to what the connections need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft < needed:
        log.warning("the limit of open files is too low for server.connections", allowed=soft, needed=needed)


@contextlib.contextmanager
def _signals(end: Callable[[], None]) -> Generator[None]:
    loop = asyncio.get_running_loop()
    wanted = (signal.SIGINT, signal.SIGTERM)
    for each in wanted:
        loop.add_signal_handler(each, end)
    try:
        yield
    finally:
        for each in wanted:
            loop.remove_signal_handler(each)


def listen(config: Config) -> socket.socket:
    """Return the listening socket. AddressError if the port is taken or the host is not this machine's."""
    host, port = config.server.host, config.server.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, proto)
    except OSError as error:
        raise AddressError(f"cannot listen on {host}: {error.strerror or error}") from None
    except ValueError:  # not a host name at all
        raise AddressError(f"cannot listen on {host[:100]!r}: that is no host's name") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A client whose machine is gone is noticed, whether something is on the way to it or not. Connections inherit
        # this. The time is above the reader's, so that one that is only slow is the edge's to cut.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            patience = max(10, round(config.server.reader_s * 2))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience * 1000)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, patience)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)  # seconds
        found.bind(address)
        found.listen(_BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        reason = error.strerror or str(error)
        raise AddressError(f"cannot listen on {host}:{port}: {reason[:1].lower()}{reason[1:]}") from None
    return found


def url_of(config: Config, listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()
