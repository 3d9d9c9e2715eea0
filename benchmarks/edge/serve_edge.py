"""Serves one of two ASGI applications by one of three HTTP servers, and prints URL and process id.

    python benchmarks/edge/serve_edge.py --edge granian --app headrace

Used by compare_edges.py. uvicorn and granian must be importable.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from echo import Echo
from serve_mock import make_mock_fleet

from headrace.config import Config, ServerConfig, StorageConfig
from headrace.gateway.database import Database
from headrace.observe.logs import configure_log
from headrace.server.admin.administration import Administration
from headrace.server.app import App
from headrace.server.assemble import assemble
from headrace.server.durable_state import DurableState
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.connection import ConnectionBounds
from headrace.server.http.edge import Edge
from headrace.server.routes import all_routes

TOKENS_PER_S = 100.0


class LazyApp:
    """Headrace's application, built at the first request, because each server creates its own event loop."""

    def __init__(self) -> None:
        self._app: App | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            config = Config(server=ServerConfig(idle_s=600.0), storage=StorageConfig(folder=tempfile.mkdtemp()))
            configure_log(config.log)
            database = Database(Path(config.storage.path))
            services = assemble(config, make_mock_fleet(TOKENS_PER_S), database, {})
            context = EndpointContext(config, services)
            durable = DurableState(context, database)
            routes = all_routes(context, durable, Administration(config, services.accounts, None))
            self._app = App(context, routes.public, host=config.server.host)
            await services.start()
            context.is_ready = True
        await self._app(scope, receive, send)


def application(name: str) -> Any:
    return Echo(TOKENS_PER_S) if name == "echo" else LazyApp()


def granian_application() -> Any:
    """Called by granian's worker process, which is the one to measure."""
    print(f"http://127.0.0.1:{os.environ['EDGE_PORT']}", os.getpid(), flush=True)
    return application(os.environ["EDGE_APP"])


async def serve_headrace(app: Any) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listening.setblocking(False)
    await Edge(app, ConnectionBounds.of(ServerConfig(idle_s=600.0))).listen(listening, 2048)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", os.getpid(), flush=True)
    await asyncio.Event().wait()


async def serve_uvicorn(app: Any) -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=600,
    )
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", os.getpid(), flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


def serve_granian(app: str) -> None:
    from granian import Granian
    from granian.constants import HTTPModes, Interfaces, Loops

    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    os.environ |= {"EDGE_PORT": str(port), "EDGE_APP": app}
    Granian(
        "serve_edge:granian_application",
        port=port,
        interface=Interfaces.ASGINL,
        loop=Loops.uvloop,
        http=HTTPModes.http1,
        websockets=False,
        log_enabled=False,
        factory=True,
    ).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description="One application by one HTTP server.")
    parser.add_argument("--edge", choices=("headrace", "uvicorn", "granian"), required=True)
    parser.add_argument("--app", choices=("echo", "headrace"), required=True)
    options = parser.parse_args()
    if options.edge == "granian":
        serve_granian(options.app)
    else:
        serve = serve_uvicorn if options.edge == "uvicorn" else serve_headrace
        uvloop.run(serve(application(options.app)))


if __name__ == "__main__":
    main()
