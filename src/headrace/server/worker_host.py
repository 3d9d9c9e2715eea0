"""Runs one engine process for servers on other hosts: behind a TLS listener, until a signal or a server drains it.

Checks what may connect and what it may expect; requests, tenants and limits are the servers' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec
import structlog

from headrace.engine.process.engine_client import EngineClient
from headrace.engine.process.supervisor import Supervisor, SupervisorTimeouts
from headrace.engine.process.wire import WorkerConfig
from headrace.engine.process.worker_address import WorkerAddress, WorkerTls, is_loopback
from headrace.engine.process.worker_listener import WorkerListener
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.redis_client import connect
from headrace.gateway.serving import fingerprint
from headrace.gateway.serving.registry.worker_announcer import WorkerAnnouncer
from headrace.gateway.serving.registry.worker_registry import WorkerAnnouncement, WorkerRegistry
from headrace.models.model_folder import find_model, open_model
from headrace.server.process_settings import event_loop
from headrace.tasks import end_tasks
from headrace.variant import Variant

log = structlog.stdlib.get_logger("headrace.worker")

_ANY: Final = ("0.0.0.0", "::")


class RegistryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker announces itself to servers."""

    url: str  # of the Redis
    namespace: str = "headrace"  # prefix of the keys
    model: str  # the model's name in the servers' configuration
    host: str = ""  # that servers connect to; empty: the one that it listens on
    port: int = 0  # 0: the one that it listens on
    lease_s: float = 10.0  # after its last word, until servers that are not connected forget it
    wait_s: float = 1.0  # Redis timeout


class WorkerHostOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int  # 0 picks a free one
    tls: WorkerTls | None = None  # required unless the host is a loopback address
    preemptible: bool = False
    drain_s: float = 30.0  # seconds that running requests may take at the end
    heartbeat_s: float = 3.0  # seconds that the engine's process may be frozen before it is replaced
    step_s: float = 60.0  # seconds that one step may take before it is replaced
    registry: RegistryOptions | None = None


def run(
    variant: Variant,
    options: WorkerHostOptions,
    *,
    ready: Callable[[WorkerAddress], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Serve until a signal ends it, or a server asks it to drain. `ready` is called once it takes requests."""
    if options.tls is None and not is_loopback(options.host):
        raise RequestError(
            f"A worker that other machines reach at {options.host} needs TLS. Pass --cert, --key and --ca.",
            parameter="cert",
        )
    registry = options.registry
    if registry is not None and not registry.host and options.host in _ANY:
        raise RequestError(
            f"Servers cannot connect to {options.host}. Pass --announce with a host that they reach.",
            parameter="announce",
        )
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(_run(variant, options, ready, progress))


async def _run(
    variant: Variant,
    options: WorkerHostOptions,
    ready: Callable[[WorkerAddress], None],
    progress: Callable[[int, int], None] | None,
) -> None:
    folder = open_model(find_model(variant.model))
    config = WorkerConfig(
        variant=msgspec.structs.replace(variant, model=str(folder.path)),
        drain_seconds=options.drain_s,
        fingerprint=fingerprint.of_model(folder, variant),
        preemptible=options.preemptible,
    )
    watch = SupervisorTimeouts(
        ping=min(SupervisorTimeouts().ping, options.heartbeat_s / 4),
        silence=options.heartbeat_s,
        longest_step=options.step_s,
    )
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ending.set)
    supervisor = Supervisor([config], watch=watch, progress=progress, restart_drained=False)
    address = WorkerAddress(host=options.host, port=options.port, tls=options.tls is not None)
    listener = WorkerListener(address, supervisor.paths[0], tls=options.tls)
    starting = asyncio.create_task(supervisor.start())
    try:
        if not await _first(starting, ending):
            return
        starting.result()
        try:
            address = await listener.start()
        except OSError as error:
            raise HeadraceError(f"Cannot listen on {address}: {error.strerror or error}.") from None
        log.info("serving", address=str(address), model=variant.model, fingerprint=config.fingerprint)
        async with _announced(supervisor, config, options, address) as announcer:
            ready(address)
            drained = asyncio.create_task(supervisor.drained.wait())
            await _first(drained, ending)
            drained.cancel()
            log.info("draining" if ending.is_set() else "drained")
            if announcer is not None:
                announcer.drain()
            await supervisor.stop()
    finally:
        await end_tasks([starting])
        await supervisor.stop()
        await listener.close()


@contextlib.asynccontextmanager
async def _announced(
    supervisor: Supervisor, config: WorkerConfig, options: WorkerHostOptions, address: WorkerAddress
) -> AsyncGenerator[WorkerAnnouncer | None]:
    """Keep the worker in the registry until the end of the block."""
    found = options.registry
    if found is None:
        yield None
        return
    registry = WorkerRegistry(
        connect(found.url, seconds=found.wait_s, used_for="registry of workers"), namespace=found.namespace
    )
    reached = WorkerAddress(host=found.host or address.host, port=found.port or address.port, tls=address.tls)
    async with EngineClient([supervisor.paths[0]]) as engine:
        welcome = await engine.ready()
        worker = WorkerAnnouncement(
            id=secrets.token_hex(8),
            address=str(reached),
            model=found.model,
            precision=welcome.variant,
            arithmetic=welcome.arithmetic,
            release=welcome.release,
            fingerprint=config.fingerprint,
            preemptible=config.preemptible,
        )
        announcer = WorkerAnnouncer(registry, engine, worker, lease_s=found.lease_s)
        announcing = asyncio.create_task(announcer.run())
        try:
            yield announcer
        finally:
            await end_tasks([announcing])
            await announcer.leave()


async def _first(task: asyncio.Task[object], event: asyncio.Event) -> bool:
    """Wait for either. Return whether the task is done."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()
