"""FrontProcesses: starts, watches, replaces and ends the front processes of a server. Belongs to the main process.

    kernel ──▶ listening socket of each process (SO_REUSEPORT)
    front ──channel──▶ main: limits, ledger, accounts, finished requests
    front ──relay────▶ main: every call about files, batches, responses, the admin API

The main process keeps a copy of each front's listening socket and serves it while that front starts or is replaced, so
that no connection waits for a process that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog

from headrace.config import Config
from headrace.gateway.api_errors import ApiError
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.ledger import Ledger
from headrace.lab.online.hard_cases import HardCase, HardCases
from headrace.observe import metrics
from headrace.server.admin.admin_socket import listen_on
from headrace.server.http.connection import Application, ConnectionBounds
from headrace.server.http.edge import Edge
from headrace.server.processes.channel import CallHandler, Channel
from headrace.server.processes.finished_requests import FinishedRequest, adopt
from headrace.server.processes.relay import taking_relayed
from headrace.server.processes.shared_accounts import account_handlers
from headrace.server.processes.shared_ledger import SharedLedger
from headrace.server.processes.shared_limits import SharedLimits

log: Final = structlog.stdlib.get_logger("headrace.processes")

FRONT_COMMAND: Final = (sys.executable, "-m", "headrace.server.processes.front")
_READY_S: Final = 120.0  # for a front process to start
_ANSWER_S: Final = 2.0  # for a front process to apply a change; one that does not is replaced
_METRICS_S: Final = 1.0
_PAUSES_S: Final = (0.0, 0.5, 2.0, 5.0)  # before a front that ends again and again is replaced
_KILL_S: Final = 2.0
T = TypeVar("T")


class FrontSetup(msgspec.Struct):
    """What a front process starts with."""

    config: Config
    workers: dict[str, list[str]]  # sockets of the workers of each variant
    relay: str  # the main process's socket
    accounts_shared: bool  # other gateways change the accounts too


class _Front:
    """One front process and its successors."""

    def __init__(self, number: int, listening: socket.socket) -> None:
        self.number = number
        self.listening = listening
        self.channel: Channel | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.failures = 0
        self.stand_in: asyncio.Server | None = None
        self.ends: list[Callable[[], None]] = []  # what settles its open requests


class FrontProcesses:
    def __init__(
        self,
        config: Config,
        services: Services,
        listening: Sequence[socket.socket],
        *,
        command: Sequence[str] = FRONT_COMMAND,
        hard_cases: HardCases | None = None,
    ) -> None:
        """`listening`: one bound socket for each front. `hard_cases`: where those of the fronts are kept."""
        self._config = config
        self._services = services
        self._command = command
        self._hard_cases = hard_cases
        self._fronts = [_Front(number, each) for number, each in enumerate(listening, 1)]
        self._keeping: list[asyncio.Task[None]] = []
        self._ending = False
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self._relay: Edge | None = None
        self._relay_server: asyncio.Server | None = None
        self._edge: Edge | None = None

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._fronts if each.process is not None]

    @property
    def are_ready(self) -> bool:
        return all(each.ready.is_set() for each in self._fronts)

    async def listen(self, edge: Edge, application: Application) -> None:
        """Serve the fronts' sockets until the fronts are there, and what they will relay."""
        self._edge = edge
        bounds = msgspec.structs.replace(
            ConnectionBounds.of(self._config.server), connections=1 << 20, address_connections=1 << 20, idle_s=1e6
        )
        self._relay = Edge(taking_relayed(application), bounds)
        self._relay_server = await self._relay.listen_on_path(listen_on(self._folder / "main.sock"))
        for front in self._fronts:
            await self._stand_in(front)

    async def start(self) -> None:
        """Start the fronts and return when all serve. The engines must have started."""
        self._services.accounts.shared.spread = self._refresh
        self._keeping = [asyncio.create_task(self._keep(front)) for front in self._fronts]
        try:
            async with asyncio.timeout(_READY_S):
                for front in self._fronts:
                    await front.ready.wait()
        except TimeoutError:
            log.error("front processes did not start", seconds=_READY_S)

    async def _stand_in(self, front: _Front) -> None:
        if front.stand_in is None and self._edge is not None and not self._ending:
            front.stand_in = await self._edge.listen_also(front.listening.dup())

    def _step_aside(self, front: _Front) -> None:
        if front.stand_in is not None:
            front.stand_in.close()
            front.stand_in = None

    # One front's life

    async def _keep(self, front: _Front) -> None:
        while not self._ending:
            try:
                await self._run_once(front)
            except Exception as error:
                log.error("a front process could not be started", process=front.number, exc_info=error)
            if self._ending:
                return
            await self._stand_in(front)
            pause = _PAUSES_S[min(front.failures, len(_PAUSES_S) - 1)]
            front.failures += 1
            await asyncio.sleep(pause)

    async def _run_once(self, front: _Front) -> None:
        loop = asyncio.get_running_loop()
        front.ready.clear()
        own, other = socket.socketpair()
        own.setblocking(False)
        gone = asyncio.Event()
        with other:
            channel = Channel(self._handlers(front), gone.set)
            await loop.create_unix_connection(lambda: channel, sock=own)
            front.channel = channel
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(other.fileno()),
                str(front.listening.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(other.fileno(), front.listening.fileno()),
            )
        front.process = process
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            # What it wrote before it ended is read first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await gone.wait()
            channel.close()
            front.channel = front.process = None
            front.ready.clear()
            for end in front.ends:
                end()
            front.ends.clear()
        if not self._ending:
            metrics.of(metrics.processes_replaced, "signal" if code < 0 else "exit").inc()
            log.warning("a front process ended and is replaced", process=front.number, code=code)

    def _handlers(self, front: _Front) -> dict[str, CallHandler]:
        services = self._services
        limits = SharedLimits(services.limiter.local)
        front.ends = [limits.end]
        handlers = {**limits.handlers(), **account_handlers(services.accounts.shared.store)}
        if isinstance(services.ledger, Ledger):
            ledger = SharedLedger(services.ledger)
            front.ends.append(ledger.end)
            handlers |= ledger.handlers()

        def setup() -> FrontSetup:
            return FrontSetup(
                self._config,
                services.fleet.workers(),
                str(self._folder / "main.sock"),
                services.accounts.shared.store.shared,
            )

        def ready() -> None:
            self._step_aside(front)
            front.failures = 0
            front.ready.set()
            log.info("front process ready", process=front.number, pid=0 if front.process is None else front.process.pid)

        def finished(request: FinishedRequest) -> None:
            adopt(services.observer, request)

        def keep_hard_case(case: HardCase) -> None:
            if self._hard_cases is not None:
                self._hard_cases.add(case)

        return handlers | {
            "hard_case": CallHandler(tuple[HardCase], keep_hard_case),
            "setup": CallHandler(tuple[()], setup),
            "ready": CallHandler(tuple[()], ready),
            "finished": CallHandler(tuple[FinishedRequest], finished),
        }

    # All fronts

    async def _ask(self, front: _Front, name: str, seconds: float, type: Any) -> Any:
        """Return a front's answer; None if it does not answer in time."""
        channel = front.channel
        if channel is None:
            return None
        try:
            async with asyncio.timeout(seconds):
                return await channel.call(name, type=type)
        except (TimeoutError, ApiError):
            return None

    async def _refresh(self) -> None:
        """Return once every front has applied the changes of accounts. One that does not answer is replaced: it might
        serve a key that is revoked."""

        async def one(front: _Front) -> None:
            if not front.ready.is_set():
                return  # it reads the accounts when it starts
            process = front.process
            if await self._ask(front, "refresh", _ANSWER_S, bool) is not True and process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

        await asyncio.gather(*(one(front) for front in self._fronts))

    async def running(self) -> list[int]:
        """Return the requests that each front runs which answers."""
        ready = [front for front in self._fronts if front.ready.is_set()]
        asking = (self._ask(front, "running", _METRICS_S, int) for front in ready)
        return [each for each in await asyncio.gather(*asking) if each is not None]

    async def metrics(self) -> list[list[metrics.Family]]:
        """Return the metrics of every front that answers."""
        ready = [front for front in self._fronts if front.ready.is_set()]
        asking = (self._ask(front, "metrics", _METRICS_S, list[metrics.Family]) for front in ready)
        return [each for each in await asyncio.gather(*asking) if each is not None]

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let the fronts finish their requests, for at most `seconds` or until `hurry` is set, and end them."""
        self._ending = True
        for front in self._fronts:
            self._step_aside(front)
            if front.channel is not None:
                front.channel.notify("drain")
        if not self._keeping:
            return
        done = asyncio.ensure_future(asyncio.wait(self._keeping, timeout=seconds + _KILL_S))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({done, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        done.cancel()
        await self.close()

    async def close(self) -> None:
        """End what is left."""
        self._ending = True
        for front in self._fronts:
            self._step_aside(front)
            if front.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    front.process.send_signal(signal.SIGKILL)
        await asyncio.gather(*self._keeping, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
        if self._relay_server is not None:
            self._relay_server.close()
        for front in self._fronts:
            front.listening.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
