"""A server of a drill's own: a configuration in a folder that goes away, a process, and what it says of itself.

Owns the process from its start to its end. It listens on 127.0.0.1 on a free port. Knows no drill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from headrace.errors import HeadraceError

KEY: Final = "drill"  # of the tenant that asks, with rights on the admin API
_START: Final = 120.0  # seconds until it takes requests
_END: Final = 20.0  # seconds until it has ended by itself

_SERVING: Final = re.compile(r"Serving .* at (http://127\.0\.0\.1:\d+)/v1")
_HEAD: Final = """
[server]
host = "127.0.0.1"
port = 0
drain_s = 2.0

[storage]
folder = {folder}

[log]
format = "json"

[[keys]]
name = "drill"
key = "drill"
admin = "write"
"""


class DrillError(HeadraceError):
    """The drill could not be held."""


class DrillServer:
    def __init__(self, config: str, *, environ: dict[str, str] | None = None) -> None:
        """`config`: what the drill's headrace.toml has beside the server, the storage and the key."""
        self.url = ""
        self._config = config
        self._environ = {**os.environ, **(environ or {})}
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-drill-")
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> DrillServer:
        folder = Path(self._folder.name)
        file = folder / "headrace.toml"
        file.write_text(_HEAD.format(folder=f'"{folder / "state"}"') + self._config)
        with (folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace",
                "serve",
                "--config",
                str(file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
            )
        try:
            async with asyncio.timeout(_START):
                while not self.url:
                    self._look(self._process)
                    await asyncio.sleep(0.05)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()
        self._folder.cleanup()

    def _look(self, process: asyncio.subprocess.Process) -> None:
        """The server says its URL once it takes requests."""
        found = _SERVING.search(self.log())
        if found is not None:
            self.url = found[1]
        elif process.returncode is not None:
            raise DrillError(f"the server did not start: {self.log()[-500:].strip()}")

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END)
        except TimeoutError:
            process.kill()
            await process.wait()

    def log(self) -> str:
        return (Path(self._folder.name) / "log").read_text(errors="replace")

    def workers(self) -> list[int]:
        """The engine's processes, by their ids."""
        assert self._process is not None
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError, ValueError):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    command = (folder / "cmdline").read_bytes()
                    if int(fields[1]) == self._process.pid and b"worker" in command:
                        found.append(int(folder.name))
        return found

    def kill_worker(self) -> int:
        """Kills one; its id."""
        workers = self.workers()
        if not workers:
            raise DrillError("the server has no engine process")
        os.kill(workers[0], signal.SIGKILL)
        return workers[0]


async def until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not true():
                await asyncio.sleep(0.02)
    return true()
