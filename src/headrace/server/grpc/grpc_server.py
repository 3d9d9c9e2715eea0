"""GrpcServer: serves headrace.v1, health and reflection on `server.grpc_port`.

Each call runs through an App like an HTTP request, so keys, limits, budgets, metrics, traces and the log are the same.
A client that cancels, leaves or reaches its deadline ends its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Generator
from typing import Any, Final

from headrace.config import ServerConfig
from headrace.server.app import App
from headrace.server.grpc import grpc_routes
from headrace.server.grpc.frames import ERROR, read_error
from headrace.server.grpc.generate import DEADLINE_HEADER
from headrace.server.grpc.grpc_health import HEALTH_SERVICE, add_health
from headrace.server.grpc.messages import SERVICE
from headrace.server.grpc.rpc_cycle import RpcCycle
from headrace.server.grpc.status_codes import ascii_value, rpc_status

# grpcio has no types.
_grpc: Any = importlib.import_module("grpc")
_aio: Any = importlib.import_module("grpc.aio")
_reflection: Any = importlib.import_module("grpc_reflection.v1alpha.reflection")

_LONGEST_DEADLINE_S: Final = 86_400.0  # as of deadline_ms; a later one is none
_OWN_HEADERS: Final = ("content-type", "content-length", "cache-control", "x-accel-buffering")
_CLOSE_S: Final = 1.0  # seconds for calls that were cut to tell their clients
_DRAINING: Final = b'{"error":{"message":"The server has ended.","type":"overloaded_error","code":"draining"}}'


class GrpcServer:
    """All of it belongs to one event loop."""

    def __init__(self, app: App, config: ServerConfig, *, is_ready: Callable[[], bool]) -> None:
        self._app = app
        self._config = config
        self._is_ready = is_ready
        self._server: Any = None
        self.tasks: set[asyncio.Task[None]] = set()  # one for each call in progress
        self.port = 0
        self._calls = 0  # whose last byte is not sent
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending = asyncio.Event()

    async def start(self) -> None:
        """OSError if the address is taken."""
        config = self._config
        server = _aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # another server on this port must be noticed
                ("grpc.max_receive_message_length", config.body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", config.header_bytes),
                ("grpc.keepalive_time_ms", round(config.idle_s * 1000)),
                ("grpc.keepalive_timeout_ms", round(config.reader_s * 1000)),
            ),
            maximum_concurrent_rpcs=config.connections,
        )
        handlers = {
            "Generate": _grpc.unary_stream_rpc_method_handler(self._generate),
            "Embed": _grpc.unary_unary_rpc_method_handler(self._unary(grpc_routes.EMBED)),
            "ListModels": _grpc.unary_unary_rpc_method_handler(self._unary(grpc_routes.LIST_MODELS)),
        }
        server.add_generic_rpc_handlers((_grpc.method_handlers_generic_handler(SERVICE, handlers),))
        add_health(server, self._is_ready, self._ending)
        if config.docs:
            names = (SERVICE, HEALTH_SERVICE, _reflection.SERVICE_NAME)
            _reflection.enable_server_reflection(names, server)
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port = server.add_insecure_port(f"{host}:{config.grpc_port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{config.grpc_port} for gRPC") from error
        await server.start()
        self._server = server

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let calls in progress finish, for at most `seconds` or until `hurry` is set. New calls get UNAVAILABLE."""
        finished = asyncio.create_task(self._idle.wait())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({finished, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in (finished, hurried):
            each.cancel()
        await asyncio.gather(finished, hurried, return_exceptions=True)

    async def close(self) -> None:
        """Cut the remaining calls."""
        tasks = set(self.tasks)
        for task in tasks:
            task.cancel()
        self._ending.set()
        if self._server is not None:
            await self._server.stop(_CLOSE_S)
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)

    def _begin(self, method: str, body: bytes, context: Any) -> tuple[RpcCycle, asyncio.Task[None]]:
        metadata = list(context.invocation_metadata() or ())
        if method == grpc_routes.GENERATE:
            metadata = _with_deadline(metadata, context.time_remaining())
        cycle = RpcCycle(method, body, metadata, context.peer())
        task = asyncio.create_task(self._app(cycle.scope, cycle.receive, cycle.send))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(cycle.end)
        return cycle, task

    @contextlib.contextmanager
    def _counting(self) -> Generator[None]:
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def _generate(self, body: bytes, context: Any) -> None:
        with self._counting():
            await self._stream(body, context)

    async def _stream(self, body: bytes, context: Any) -> None:
        cycle, task = self._begin(grpc_routes.GENERATE, body, context)
        begun = False
        with contextlib.closing(cycle):
            while (frame := await cycle.next()) is not None:
                kind, data = frame
                if kind == ERROR:
                    await task
                    await _abort(context, *read_error(data), cycle)
                # A client that does not read is cut like one of the HTTP API.
                try:
                    async with asyncio.timeout(self._config.reader_s):
                        if not begun:
                            begun = True
                            await context.send_initial_metadata(_metadata(cycle))
                        await context.write(data)
                except TimeoutError:
                    cycle.close()
                    await context.abort(_grpc.StatusCode.CANCELLED, "slow_reader: The client does not read.")
            if task.cancelled():  # the server has ended
                await _abort(context, 503, _DRAINING, cycle)
            if cycle.status != 200:
                await _abort(context, cycle.status or 499, cycle.refusal, cycle)

    def _unary(self, method: str) -> Callable[[bytes, Any], Any]:
        async def call(body: bytes, context: Any) -> bytes:
            cycle, _ = self._begin(method, body, context)
            with self._counting(), contextlib.closing(cycle):
                frame = await cycle.next()
                if frame is None:
                    await _abort(context, cycle.status or 499, cycle.refusal, cycle)
                    raise AssertionError  # abort has raised
                await context.send_initial_metadata(_metadata(cycle))
                return frame[1]

        return call


def _with_deadline(metadata: list[Any], remaining: float | None) -> list[Any]:
    """Put the call's deadline into the metadata as the header of the HTTP API; the earlier one counts."""
    if remaining is None or remaining > _LONGEST_DEADLINE_S:
        return metadata
    left = max(remaining * 1000, 1.0)
    others: list[Any] = []
    for name, value in metadata:
        if name == DEADLINE_HEADER:
            try:
                left = min(left, float(value))
                continue
            except ValueError:
                return metadata  # its error names what is wrong with it
        others.append((name, value))
    return [*others, (DEADLINE_HEADER, f"{left:.3f}")]


def _metadata(cycle: RpcCycle) -> tuple[tuple[str, str], ...]:
    """Return the response's headers as initial metadata."""
    return tuple((name, ascii_value(value)) for name, value in cycle.headers.items() if name not in _OWN_HEADERS)


async def _abort(context: Any, status: int, body: bytes, cycle: RpcCycle) -> None:
    """Raise the error of the RPC."""
    found = rpc_status(status, body, cycle.headers)
    await context.abort(getattr(_grpc.StatusCode, found.code), found.details, found.metadata)
