"""Server: starts in order (socket, engines, ready), and shuts down in order (admit nothing, drain, stop the engines).

App answers requests, and Edge speaks HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from headrace.config import Config
from headrace.engine.process import early_worker
from headrace.errors import HeadraceError
from headrace.gateway.serving.fleet import Fleet, Loading
from headrace.observe.logs import configure_log
from headrace.server.late_loading import keep_spare_worker, load_rest, load_templates
from headrace.server.process_settings import allow_connections, event_loop, keep_what_is_loaded, prepare_threads
from headrace.tasks import end_tasks

if TYPE_CHECKING:
    from headrace.models.text.tokenizer import Tokenizer
    from headrace.server.grpc.grpc_server import GrpcServer
    from headrace.server.processes.front_processes import FrontProcesses

log: Final = structlog.stdlib.get_logger("headrace")

_BACKLOG: Final = 2048  # connections that the kernel queues
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
        keep_what_is_loaded()
        if os.geteuid() == 0:
            advice = "Start the server as a user of its own that can only read its models."
            log.warning("running as root", advice=advice)
        if ready is not None:
            ready(url)

    configure_log(config.log)
    prepare_threads()
    with asyncio.Runner(loop_factory=event_loop) as runner:
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

    def __init__(
        self,
        config: Config,
        *,
        fleet: Fleet | None = None,
        loading: Loading | None = None,
        front_command: Sequence[str] = (),
    ) -> None:
        """`front_command` replaces the command of front processes."""
        self.config = config
        self.fronts: FrontProcesses | None = None
        with contextlib.ExitStack() as undo:
            server = config.server
            self.listening, *front_sockets = listen_together(
                server.host, server.port, server.processes, reader_s=server.reader_s
            )
            for each in (self.listening, *front_sockets):
                undo.callback(each.close)
            self.internal_listening: socket.socket | None = None
            if server.internal_port is not None:
                self.internal_listening = listen(server.internal_host, server.internal_port, reader_s=server.reader_s)
                undo.callback(self.internal_listening.close)
            self.fleet = Fleet.of(config, loading, early=True) if fleet is None else fleet
            undo.callback(self.fleet.abandon)
            early_worker.discard()  # if no engine of this process took it
            self._make()
            self._make_fronts(front_sockets, front_command)
            undo.pop_all()

    def _make(self) -> None:
        """Build everything but the engines, which load meanwhile; for that reason the imports are here."""
        from headrace.gateway.database import Database
        from headrace.gateway.ledger.ledger import Ledger
        from headrace.server.admin.admin_usage import LedgerUsage
        from headrace.server.admin.administration import Administration
        from headrace.server.app import App
        from headrace.server.assemble import assemble, assemble_lab
        from headrace.server.durable_state import DurableState
        from headrace.server.endpoint_context import EndpointContext
        from headrace.server.http.connection import ConnectionBounds
        from headrace.server.http.edge import Edge
        from headrace.server.routes import all_routes
        from headrace.server.service_manager import ServiceManager

        config = self.config
        self.database = Database(config.storage.path)
        self.services = services = assemble(config, self.fleet, self.database, os.environ)
        context = self.context = EndpointContext(config, services)
        self._lab = lab = assemble_lab(config, services, self.database, lambda: context.running == 0)
        ledger = services.ledger
        usage = LedgerUsage(ledger, currency=config.ledger.currency) if isinstance(ledger, Ledger) else None
        self.administration = Administration(config, services.accounts, usage)
        self.url = url_of(config, self.listening)
        self.durable = DurableState(self.context, self.database)
        routes = all_routes(self.context, self.durable, self.administration, lab)
        bounds = ConnectionBounds.of(config.server)
        self.app = App(self.context, routes.public, host=config.server.host)
        self.edge = Edge(self.app, bounds)
        internal = App(self.context, routes.internal, host=config.server.internal_host)
        self.internal_edge = None if self.internal_listening is None else Edge(internal, bounds)
        self.grpc = None if config.server.grpc_port is None else self._make_grpc()
        self._manager = ServiceManager()
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()
        self._templates: asyncio.Task[None] | None = None

    def _make_grpc(self) -> GrpcServer:
        if any(importlib.util.find_spec(each) is None for each in ("grpc", "grpc_health", "grpc_reflection")):
            raise HeadraceError("server.grpc_port needs the extra grpc. Run pip install 'headrace[grpc]'.")
        from headrace.server.app import App
        from headrace.server.grpc import grpc_routes
        from headrace.server.grpc.grpc_server import GrpcServer

        config, context = self.config.server, self.context
        app = App(context, grpc_routes.routes(context), host=config.host)
        return GrpcServer(app, config, is_ready=lambda: context.is_ready and not context.is_draining)

    def _make_fronts(self, sockets: Sequence[socket.socket], command: Sequence[str]) -> None:
        if not sockets:
            return
        from headrace.server.processes.front_processes import FRONT_COMMAND, FrontProcesses

        self.fronts = FrontProcesses(
            self.config,
            self.services,
            sockets,
            command=command or FRONT_COMMAND,
            hard_cases=self._lab.hard_cases,
        )
        self.context.other_metrics, self.context.other_running = self.fronts.metrics, self.fronts.running

    def end(self) -> None:
        """Drain and shut down. The second call stops waiting for requests in progress."""
        if self._ending.is_set():
            self._hurry.set()
            return
        self.context.is_draining = True
        self._manager.notify(STOPPING=1, STATUS="Draining")
        self._ending.set()
        log.info("draining", running=self.context.running)

    async def run(self, *, ready: Callable[[str], None] | None = None, signals: bool = True) -> None:
        with _signals(self.end) if signals else contextlib.nullcontext():
            starting: asyncio.Task[None] | None = None
            feeding: asyncio.Task[None] | None = None
            loading: asyncio.Task[None] | None = None
            try:
                allow_connections(self.config.server.connections)
                await self.edge.listen(self.listening, _BACKLOG)
                if self.fronts is not None:
                    await self.fronts.listen(self.edge, self.app)
                if self.internal_edge is not None and self.internal_listening is not None:
                    await self.internal_edge.listen(self.internal_listening, _BACKLOG)
                if self.grpc is not None:
                    await self._start_grpc(self.grpc)
                starting = asyncio.create_task(self._start())
                feeding = asyncio.create_task(self._manager.feed_watchdog())
                if await _first(starting, self._ending):
                    starting.result()
                    self._manager.notify(READY=1, STATUS=f"Serving {', '.join(sorted(self.fleet.served))}")
                    if ready is not None:
                        ready(self.url)
                    loading = asyncio.create_task(self._load_rest())
                await self._ending.wait()
                seconds = self.config.server.drain_s
                draining = [
                    self.edge.drain(seconds, self._hurry),
                    self.durable.background.drain(seconds, self._hurry),
                ]
                if self.grpc is not None:
                    draining.append(self.grpc.drain(seconds, self._hurry))
                if self.fronts is not None:
                    draining.append(self.fronts.drain(seconds, self._hurry))
                await asyncio.gather(*draining)
            finally:
                self.context.is_draining = True
                await end_tasks([starting, feeding, loading, self._templates])
                await self.edge.close()
                if self.grpc is not None:
                    await self.grpc.close()
                if self.internal_edge is not None:  # the metrics stay until the end
                    await self.internal_edge.close()
                await self._close()
                self.listening.close()
                if self.internal_listening is not None:
                    self.internal_listening.close()

    async def _start_grpc(self, grpc: GrpcServer) -> None:
        try:
            await grpc.start()
        except OSError as error:
            raise AddressError(str(error)) from None
        log.info("serving gRPC", address=f"{self.config.server.host}:{grpc.port}")

    async def _load_rest(self) -> None:
        """See late_loading."""
        await load_rest(self._tokenizers(), self._is_idle)
        spare = self.config.server.spare_worker
        if spare == "on" or (spare == "auto" and any(each.autoscale for each in self.config.models.values())):
            await keep_spare_worker(self._is_idle)

    def _tokenizers(self) -> list[Tokenizer]:
        found = (served.own_tokenizer for served in self.fleet.served.values())
        return [each for each in found if each is not None]

    def _is_idle(self) -> bool:
        return self.context.running == 0

    def _log_loading(self, name: str) -> None:
        served = self.fleet.served.get(name)
        chosen = "" if served is None or served.description is None else served.description.choice
        log.info("loading", model=name, **({"weights": chosen} if chosen else {}))

    async def _start(self) -> None:
        self._templates = asyncio.create_task(load_templates(self._tokenizers()))
        await self.fleet.start(self._log_loading)
        await self.services.start()
        await self.administration.start(self.app)
        self.context.is_ready = True
        if self.fronts is not None:
            await self.fronts.start()
        log.info("ready", models=sorted(self.fleet.served))
        try:
            await self.durable.start()
        except Exception as error:  # endpoints without storage are served all the same
            log.error("storage failed", exc_info=error)

    async def _close(self) -> None:
        async def both() -> None:
            if self.fronts is not None:
                await self.fronts.close()
            await self.durable.close()
            await self.administration.close()
            await self.services.close()
            await self.fleet.close()
            early_worker.discard()
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


def listen_together(host: str, port: int, count: int, *, reader_s: float) -> list[socket.socket]:
    """Return listening sockets of one port, between which the kernel distributes connections. AddressError."""
    first = listen(host, port, reader_s=reader_s)
    if count == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()  # the port was free: without this, another server that shares its port would go unnoticed
    found: list[socket.socket] = []
    try:
        while len(found) < count:
            found.append(listen(host, port, reader_s=reader_s, shares_port=True))
    except AddressError:
        for each in found:
            each.close()
        raise
    return found


def listen(host: str, port: int, *, reader_s: float, shares_port: bool = False) -> socket.socket:
    """Return a listening socket. AddressError if the port is taken or the host is not this machine's.

    `reader_s`: seconds that a client may leave a full send buffer unread.
    """
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
        if shares_port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # A client whose machine is gone is noticed, whether something is on the way to it or not. Connections inherit
        # this. The time is above the reader's, so that one that is only slow is the edge's to cut.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            patience = max(10, round(reader_s * 2))
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
