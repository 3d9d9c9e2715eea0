"""ManagedEngine: starts the server of another engine, checks it, restarts it with a backoff, and stops it.

    starting ──healthy──▶ ready ──process ended, or no answer──▶ restarting ──▶ starting
                            └──close──▶ stopping: SIGTERM, then SIGKILL to its whole process group ──▶ stopped

Knows no requests: the upstream's connections, retries and breaker handle those.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

from headrace.config.managed_section import ManagedConfig
from headrace.errors import HeadraceError
from headrace.gateway.upstreams.engine_commands import EngineLoad
from headrace.tasks import end_tasks

log: Final = logging.getLogger(__name__)

EngineStatus = Literal["starting", "ready", "restarting", "stopping", "stopped"]

_POLL_S: Final = 0.1  # between health checks while it starts
_LOAD_S: Final = 1.0  # between readings of its metrics
_KILL_S: Final = 5.0
_LINE: Final = 16 * 1024  # bytes of a log line that are kept
_LAST_LINES: Final = 5  # of its output, for the error of a start that failed
_PR_SET_PDEATHSIG: Final = 1


class EngineProbe(Protocol):
    async def probe(self) -> bool:
        """Return whether the engine answers its health check in time."""
        ...

    async def read_load(self) -> EngineLoad: ...


class ManagedEngine:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        name: str,
        config: ManagedConfig,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        check_s: float,  # between health checks
        failures: int,  # failed checks in a row after which it is replaced
        changed: Callable[[bool], None] = lambda healthy: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self.status: EngineStatus = "stopped"
        self.restarts = 0
        self.load = EngineLoad()
        self._config = config
        self._command = list(command)
        self._environment = dict(environment)
        self._check_s = check_s
        self._failures = failures
        self._changed = changed
        self._pause = pause
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._logging: asyncio.Task[None] | None = None
        self._lines: list[str] = []
        self._since = 0.0

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def state(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "pid": self.pid,
            "restarts": self.restarts,
            "uptime_s": round(time.monotonic() - self._since, 1) if self.status == "ready" else 0.0,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "kv_used_share": self.load.kv_used,
        }

    @property
    def crowded(self) -> bool:
        """True if its own queue is longer than it may be."""
        return self.load.waiting is not None and self.load.waiting > self._config.most_waiting

    async def start(self, probe: EngineProbe) -> None:
        """Return when it answers. HeadraceError if it does not start; later, it is restarted as often as it ends."""
        try:
            await self._launch(probe)
        except BaseException:
            await self._stop()
            raise
        self._keeping = asyncio.create_task(self._keep(probe))

    async def close(self) -> None:
        self.status = "stopping"
        await end_tasks([self._keeping])
        await self._stop()
        self.status = "stopped"

    async def _keep(self, probe: EngineProbe) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            reason = await self._until_gone(probe)
            log.error("the engine of %s %s; restarting it", self.name, reason)
            self.status = "restarting"
            self._changed(False)
            self.load = EngineLoad()
            await self._stop()
            failures = 0 if time.monotonic() - began > self._config.restart_most_s else failures + 1
            while True:
                if failures > 1:
                    longest = self._config.restart_most_s
                    await self._pause(min(self._config.restart_s * 2 ** min(failures - 2, 16), longest))
                self.restarts += 1
                try:
                    await self._launch(probe)
                    break
                except HeadraceError as error:
                    log.error("%s", error)
                    await self._stop()
                    failures += 1

    async def _launch(self, probe: EngineProbe) -> None:
        self.status = "starting"
        self._lines.clear()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_LINE,
                start_new_session=True,  # one group with its own workers, and no Ctrl-C of our terminal
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:
            raise HeadraceError(
                f"Cannot start the engine of '{self.name}': {self._command[0]}: {error.strerror or error}. Install it, "
                "or name it in managed.command."
            ) from None
        self._logging = asyncio.create_task(self._relay_log(self._process))
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(self._config.start_s):
                while not ended.done():
                    if await probe.probe():
                        break
                    await asyncio.wait({ended}, timeout=_POLL_S)
        except TimeoutError:
            raise HeadraceError(
                f"The engine of '{self.name}' did not answer within {self._config.start_s:g} s.{self._said()}"
            ) from None
        if ended.done():
            await asyncio.wait({self._logging}, timeout=1.0)
            raise HeadraceError(
                f"The engine of '{self.name}' ended during its start (exit code {ended.result()}).{self._said()}"
            )
        ended.cancel()
        self._since = time.monotonic()
        self.status = "ready"
        self._changed(True)
        log.info("the engine of %s is ready", self.name)

    async def _until_gone(self, probe: EngineProbe) -> str:
        """Watch the running process. Return why it is to be replaced."""
        process = self._process
        assert process is not None
        ended = asyncio.ensure_future(process.wait())
        # Beside the health checks: an engine that hangs answers neither, and its metrics must not delay them.
        reading = asyncio.create_task(self._read_loads(probe))
        failed, check_at = 0, time.monotonic() + self._check_s
        try:
            while True:
                await asyncio.wait({ended}, timeout=max(0.0, check_at - time.monotonic()))
                if ended.done():
                    return f"ended with code {ended.result()}"
                check_at = time.monotonic() + self._check_s
                failed = 0 if await probe.probe() else failed + 1
                if failed >= self._failures:
                    return f"failed {failed} health checks in a row"
        finally:
            ended.cancel()
            reading.cancel()

    async def _read_loads(self, probe: EngineProbe) -> None:
        while True:
            await asyncio.sleep(min(_LOAD_S, self._check_s))
            self.load = await probe.read_load()

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            # One that was declared dead gets no time to end by itself.
            seconds = self._config.stop_s if self.status == "stopping" else min(1.0, self._config.stop_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
        _signal_group(process.pid, signal.SIGKILL)  # its workers, too
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _KILL_S)
        if self._logging is not None:
            await asyncio.wait({self._logging}, timeout=1.0)
            self._logging.cancel()
            self._logging = None

    async def _relay_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the limit, which has been discarded
                continue
            if not line:
                return
            text = "".join(each if each.isprintable() else " " for each in line.decode("utf-8", "replace").rstrip())
            self._lines = [*self._lines[1 - _LAST_LINES :], text[:500]]
            log.debug("%s: %s", self.name, text)

    def _said(self) -> str:
        return f" Its last output: {' | '.join(self._lines)[-1000:]}" if self._lines else ""


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _end_with_parent() -> Callable[[], object] | None:
    """Return a function that lets a child end when this process is killed; None where the system cannot."""
    try:
        return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signal.SIGTERM))
    except (OSError, AttributeError):
        return None
