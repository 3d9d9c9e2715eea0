"""Keeps worker processes running: starts them, detects dead or stuck ones and restarts them with a backoff.

Owns the processes and the private folder of their sockets. Does not know requests: clients continue those of a lost
worker on its successor, under the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.engine.process import wire
from headrace.engine.process.heartbeat import Heartbeat
from headrace.engine.process.wire import LoadProgress, StartReport, WorkerConfig
from headrace.engine.process.worker_address import WorkerAddress
from headrace.engine.process.worker_connection import WorkerConnection
from headrace.engine.process.worker_log import relay_log
from headrace.engine.process.worker_process import WorkerProcess
from headrace.errors import HeadraceError
from headrace.tasks import end_tasks

log = logging.getLogger(__name__)


class StartError(HeadraceError):
    """A worker that did not start."""


class SupervisorTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a supervisor, in seconds."""

    start: float = 900.0  # to load; packing a large model for the first time takes minutes
    ping: float = 0.5  # between pings
    silence: float = 3.0  # without an answer before an inactive worker counts as frozen
    longest_step: float = 60.0  # a longer step, or a longer silence of an active worker, counts as stuck
    pause: float = (
        0.25  # before the second restart in a row; the first is immediate, each further one waits twice as long
    )
    pause_most: float = 30.0
    healthy: float = 60.0  # of uptime that count as serving, for a worker without requests
    kill: float = 5.0  # for a worker to exit by itself before it is killed


class _Worker(msgspec.Struct, eq=False):
    config: WorkerConfig
    socket: Path
    process: WorkerProcess | None = None
    begun: bool = False  # started early, and not awaited yet
    started: asyncio.Future[StartReport] | None = None
    task: asyncio.Task[None] | None = None
    log: asyncio.Task[None] | None = None  # relays what the present process logs
    restarts: int = 0
    stopping: bool = False
    served: bool = False  # the present process has completed a step


class Supervisor:
    """Runs one worker process for each configuration, and further ones on demand. Belongs to one event loop."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        watch: SupervisorTimeouts | None = None,
        progress: Callable[[int, int], None] | None = None,
        restart_drained: bool = True,
    ) -> None:
        """`progress` receives the bytes of weights packed so far, and in all, while a worker starts.
        `restart_drained`: start another process in place of one that a client asked to drain; otherwise `drained` is
        set."""
        self.drained = asyncio.Event()
        self._restart_drained = restart_drained
        self._progress = progress
        self._watch = watch or SupervisorTimeouts()
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700: only this user may connect
        self._numbers = itertools.count()
        self._workers = [self._new(config) for config in configs]
        self._stopping = False

    def _new(self, config: WorkerConfig) -> _Worker:
        return _Worker(config, self._folder / f"worker-{next(self._numbers)}.socket")

    @property
    def paths(self) -> list[Path]:
        """The workers' sockets. They stay the same over restarts."""
        return [worker.socket for worker in self._workers]

    @property
    def pids(self) -> list[int | None]:
        return [None if worker.process is None else worker.process.pid for worker in self._workers]

    @property
    def restarts(self) -> list[int]:
        return [worker.restarts for worker in self._workers]

    async def __aenter__(self) -> Supervisor:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def begin(self) -> None:
        """Start the processes in the background, before there is an event loop. Call `start` or `abandon` next."""
        for worker in self._workers:
            with contextlib.suppress(OSError):  # `start` tries again and reports the error
                worker.process, worker.begun = self._launch(worker), True

    def abandon(self) -> None:
        """Stop the processes that `begin` started, in place of `start`."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def start(self) -> list[StartReport]:
        """Start all workers and return when each can take requests. Raise the error of the first start that fails."""
        loop = asyncio.get_running_loop()
        for worker in self._workers:
            worker.started = loop.create_future()
            worker.task = asyncio.create_task(self._keep(worker))
        try:
            return await asyncio.gather(*(worker.started for worker in self._workers if worker.started is not None))
        except BaseException:
            await self.stop(drain=False)
            raise

    async def add(self, config: WorkerConfig) -> Path:
        """Start one more worker, and return its socket when it can take requests. Raise the error of its start."""
        worker = self._new(config)
        worker.started = asyncio.get_running_loop().create_future()
        self._workers.append(worker)
        worker.task = asyncio.create_task(self._keep(worker))
        try:
            await worker.started
        except BaseException:
            await self.remove(worker.socket, drain=False)
            raise
        return worker.socket

    async def remove(self, path: Path, *, drain: bool = True) -> None:
        """Stop one worker and forget it. With `drain` it finishes its requests."""
        for worker in [worker for worker in self._workers if worker.socket == path]:
            worker.stopping = True
            try:
                await self._end(worker, drain=drain)
            finally:
                self._workers.remove(worker)

    async def stop(self, *, drain: bool = True) -> None:
        """Stop all workers. With `drain` they finish their requests; without it they are killed."""
        self._stopping = True
        try:
            await asyncio.gather(*(self._end(worker, drain=drain) for worker in self._workers))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, worker: _Worker, *, drain: bool) -> None:
        process = worker.process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM if drain else signal.SIGKILL)
            try:
                await asyncio.wait_for(process.wait(), worker.config.drain_seconds + self._watch.kill)
            except TimeoutError:
                await self._kill(process)
        await end_tasks([worker.task])
        if worker.log is not None:
            await asyncio.wait({worker.log}, timeout=self._watch.kill)
            worker.log.cancel()
        for future in (worker.started,):
            if future is not None and not future.done():
                future.cancel()

    async def _keep(self, worker: _Worker) -> None:
        """Run one worker, process after process. Pauses grow with processes in a row that ended without serving."""
        failures = 0
        while not (self._stopping or worker.stopping):
            began = time.monotonic()
            worker.served = False
            try:
                report = await self._spawn(worker)
            except StartError as error:
                if worker.started is not None and not worker.started.done():
                    worker.started.set_exception(error)
                    return
                log.error("worker %s did not start again: %s", worker.socket.name, error)
            else:
                if worker.started is not None and not worker.started.done():
                    worker.started.set_result(report)
                reason = await self._until_gone(worker)
                if self._stopping or worker.stopping:
                    return
                if not self._restart_drained and worker.process is not None and worker.process.returncode == 0:
                    self.drained.set()
                    return
                log.error("worker %s %s; starting another", worker.socket.name, reason)
            worker.restarts += 1
            served = worker.served or time.monotonic() - began > self._watch.healthy
            failures = 0 if served else failures + 1
            if failures > 1:
                await _pause(min(self._watch.pause * 2 ** min(failures - 2, 16), self._watch.pause_most))

    async def _spawn(self, worker: _Worker) -> StartReport:
        """Start a process and return its report when it can take requests. Raise StartError if it cannot."""
        if not worker.begun:
            try:
                worker.process = self._launch(worker)
            except OSError as error:
                raise StartError(f"Cannot start a worker process: {error.strerror or error}.") from None
        worker.begun = False
        process = worker.process
        assert process is not None
        worker.log = asyncio.create_task(relay_log(await process.log(), worker.socket.stem))
        try:
            async with asyncio.timeout(self._watch.start):
                report = await self.report_of(await process.output())
        except TimeoutError:
            await self._kill(process)
            raise StartError(f"The worker did not start within {self._watch.start:g} s.") from None
        except (msgspec.MsgspecError, ValueError, ConnectionError):
            await self._kill(process)
            raise StartError(f"The worker died during startup (exit code {process.returncode}).") from None
        except BaseException:
            await self._kill(process)
            raise
        if report.error is not None:
            await self._kill(process)
            raise StartError(report.error)
        return report

    def _launch(self, worker: _Worker) -> WorkerProcess:
        config = msgspec.structs.replace(worker.config, socket=str(worker.socket))
        return WorkerProcess(msgspec.json.encode(config) + b"\n")

    async def report_of(self, lines: asyncio.StreamReader) -> StartReport:
        """Read a worker's progress, and return the report at the end of its start."""
        while True:
            said = msgspec.json.decode(await lines.readline(), type=LoadProgress | StartReport)
            if isinstance(said, StartReport):
                return said
            if self._progress is not None:
                self._progress(said.done, said.total)

    async def _kill(self, process: WorkerProcess) -> None:
        process.kill()
        await process.wait()

    async def _until_gone(self, worker: _Worker) -> str:
        """Wait for the process to end, kill it if it is stuck, and return what happened."""
        process = worker.process
        assert process is not None
        ended = asyncio.create_task(process.wait())
        watched = asyncio.create_task(self._until_stuck(worker, process.pid, ended))
        try:
            await asyncio.wait({ended, watched}, return_when=asyncio.FIRST_COMPLETED)
            if watched.done() and not ended.done():
                await self._kill(process)
                return watched.result()
            await watched  # it reads what the process still said
            if worker.log is not None:
                await asyncio.wait({worker.log}, timeout=self._watch.kill)
            return f"ended with code {ended.result()}"
        finally:
            for task in (ended, watched):
                task.cancel()
            await asyncio.gather(ended, watched, return_exceptions=True)

    async def _until_stuck(self, worker: _Worker, pid: int, ended: asyncio.Task[int]) -> str:
        """Ping the worker until it is stuck or has ended. Return why it counts as stuck."""
        watch = self._watch
        heartbeat = Heartbeat(pid, ping=watch.ping, silence=watch.silence, longest_step=watch.longest_step)
        connection: WorkerConnection | None = None

        def on_message(message: wire.WorkerMessage) -> None:
            if isinstance(message, wire.Pong):
                heartbeat.beat(message.busy)
                worker.served = worker.served or message.steps > 0

        try:
            while True:
                if connection is None or connection.closed.done():
                    with contextlib.suppress(OSError):
                        connection = await WorkerConnection.open(WorkerAddress(path=str(worker.socket)), on_message)
                        connection.send(wire.Hello(wire.VERSION))
                if connection is not None:
                    connection.send(wire.Ping(0))
                await asyncio.wait({ended}, timeout=watch.ping)
                if ended.done():
                    if connection is not None:
                        await asyncio.wait({connection.closed}, timeout=watch.kill)
                    return ""
                stuck = heartbeat.tick()
                if stuck is not None:
                    return stuck
        finally:
            if connection is not None:
                connection.abort()


async def _pause(seconds: float) -> None:
    """Wait before a restart. Tests replace it."""
    await asyncio.sleep(seconds)
