"""A front process: serves the calls that need no state of their own, and asks the main process for the rest.

    python -m headrace.server.processes.front CHANNEL LISTENING

The arguments are inherited file descriptors. Started by FrontProcesses only. It ends when the main process is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Final

import msgspec
import structlog

from headrace.config import Config
from headrace.gateway.database import Database
from headrace.gateway.flow.services import Services
from headrace.gateway.serving.fleet import Fleet
from headrace.lab.online.hard_cases import HardCases
from headrace.lab.online.online_lab import OnlineLab
from headrace.observe import metrics
from headrace.observe.logs import configure_log
from headrace.server.admin.administration import Administration
from headrace.server.app import App
from headrace.server.assemble import SharedState, assemble
from headrace.server.durable_state import DurableState
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.connection import ConnectionBounds
from headrace.server.http.edge import Edge
from headrace.server.http.route_table import Route
from headrace.server.late_loading import load_rest
from headrace.server.process_settings import allow_connections, event_loop, keep_what_is_loaded, prepare_threads
from headrace.server.processes.channel import CallHandler, Channel
from headrace.server.processes.finished_requests import finished
from headrace.server.processes.front_processes import FrontSetup
from headrace.server.processes.relay import MainProcessRelay
from headrace.server.processes.shared_accounts import FrontAccountStore
from headrace.server.processes.shared_ledger import FrontLedger
from headrace.server.processes.shared_limits import FrontLimitStore
from headrace.server.routes import all_routes

log: Final = structlog.stdlib.get_logger("headrace.processes")

# Whatever these need is here or asked for. All other calls are relayed.
_SERVED: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/version",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/health/live",
        "/health/ready",
        "/ping",
        "/version",
        "/",
    }
)
_BACKLOG: Final = 2048


class Front:
    """All of it belongs to one event loop."""

    def __init__(self, listening: socket.socket, fleet: Fleet | None = None) -> None:
        """`fleet` replaces the configuration's models."""
        self._listening = listening
        self._fleet = fleet
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lost = asyncio.Event()
        self._context: EndpointContext | None = None
        self.channel = Channel(
            {
                "drain": CallHandler(tuple[()], self.end),
                "refresh": CallHandler(tuple[()], self._refresh),
                "metrics": CallHandler(tuple[()], self._metrics),
                "running": CallHandler(tuple[()], lambda: 0 if self._context is None else self._context.running),
            },
            self._main_process_lost,
        )

    def _main_process_lost(self) -> None:
        self._lost.set()
        self._ending.set()
        self._hurry.set()

    def end(self) -> None:
        """Drain and end. The second call stops waiting for requests in progress."""
        if self._ending.is_set():
            self._hurry.set()
        if self._context is not None:
            self._context.is_draining = True
        self._ending.set()

    async def _refresh(self) -> bool:
        return self._context is not None and await self._context.services.accounts.shared.refresh()

    def _metrics(self) -> list[metrics.Family]:
        if self._context is not None:
            for name, served in self._context.services.fleet.served.items():
                if served.upstream is not None:
                    metrics.upstream(name, served.upstream.state())
        return metrics.families()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.end)
        setup: FrontSetup = await self.channel.call("setup", type=FrontSetup)
        config = setup.config
        configure_log(config.log)
        fleet = Fleet.of(config, attach=setup.workers) if self._fleet is None else self._fleet
        database = Database(config.storage.path)  # never opened: what needs it is relayed
        shared = SharedState(
            FrontLimitStore(lambda: self.channel) if config.limiting.redis_env is None else None,
            FrontLedger(lambda: self.channel),
            FrontAccountStore(lambda: self.channel, shared=setup.accounts_shared),
        )
        services = assemble(config, fleet, database, os.environ, shared=shared)
        self._keep_hard_cases(config, services)
        services.observer.forward = lambda record, sample: self.channel.notify("finished", finished(record, sample))
        context = self._context = EndpointContext(config, services)
        relay = MainProcessRelay(setup.relay)
        administration = Administration(config, services.accounts, None)
        routes = all_routes(context, DurableState(context, database), administration, OnlineLab()).public
        app = App(context, tuple(_routed(each, relay) for each in routes), host=config.server.host)
        edge = Edge(app, ConnectionBounds.of(config.server))
        try:
            allow_connections(config.server.connections)
            await fleet.start()
            await services.start()
            context.is_ready, context.is_draining = True, self._ending.is_set()
            await edge.listen(self._listening, _BACKLOG)
            keep_what_is_loaded()
            self.channel.notify("ready")
            found = (served.own_tokenizer for served in fleet.served.values())
            tokenizers = [each for each in found if each is not None]
            loading = asyncio.create_task(load_rest(tokenizers, lambda: context.running == 0))
            await self._ending.wait()
            loading.cancel()
            context.is_draining = True
            if not self._lost.is_set():
                await edge.drain(config.server.drain_s, self._hurry)
        finally:
            context.is_draining = True
            await edge.close()
            await relay.close()
            await services.close()
            await fleet.close()
            await self._flush()

    def _keep_hard_cases(self, config: Config, services: Services) -> None:
        """Let the main process keep the hard cases of the golden fallback."""
        hard_cases = HardCases.from_config(config, services.accounts.directory)
        if hard_cases is not None:
            hard_cases.keep = lambda case: self.channel.notify("hard_case", case)
            services.answer_observers += (hard_cases,)

    async def _flush(self) -> None:
        """Return once the main process has everything that was told it."""
        if self.channel.is_open:
            async with asyncio.timeout(2.0):
                await self.channel.call("setup")
            self.channel.close()


def _routed(route: Route, relay: MainProcessRelay) -> Route:
    if route.path in _SERVED:
        return route
    return msgspec.structs.replace(route, handler=relay, open=True, relayed=True, reserves=False)


async def serve(channel: socket.socket, listening: socket.socket, fleet: Fleet | None = None) -> None:
    channel.setblocking(False)
    listening.setblocking(False)
    front = Front(listening, fleet)
    await asyncio.get_running_loop().create_unix_connection(lambda: front.channel, sock=channel)
    await front.run()


def run(arguments: list[str], fleet: Fleet | None = None) -> None:
    prepare_threads()
    channel, listening = (socket.socket(fileno=int(each)) for each in arguments)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(serve(channel, listening, fleet))


if __name__ == "__main__":
    run(sys.argv[1:])
