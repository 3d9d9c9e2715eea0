"""Starts and stops a drill's server: a `headrace serve` process with its own configuration in a temporary folder.

It listens on 127.0.0.1 on a free port. Contains no drill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final

from headrace.config import PLAIN_SECTIONS
from headrace.errors import HeadraceError

KEY: Final = "drill"  # API key, with write access to the admin API
_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 20.0
_PORT_TIMEOUT_S: Final = 300.0

_SERVING: Final = re.compile(r"^Serving .* at (http://127\.0\.0\.1:\d+)/v1", re.MULTILINE)  # with format = "text"
_COMMON_CONFIG: Final = """
[server]
host = "127.0.0.1"
port = 0
drain_s = 2.0

[storage]
folder = {folder}

[log]
format = "text"

[[keys]]
name = "drill"
key = "drill"
admin = "write"
"""


class DrillError(HeadraceError):
    """The drill could not run."""


class DrillServer:
    def __init__(self, config: str, *, environ: dict[str, str] | None = None, name: str = "drill") -> None:
        """`config` is added to the headrace.toml that sets up the server, the storage and the key. `name` says in
        errors whose server it is."""
        self.url = ""
        self._name = name
        self._config = config
        self._environ = {**_neutral_environment(), **(environ or {})}
        self._folder = tempfile.TemporaryDirectory(prefix=f"headrace-{name}-")
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> DrillServer:
        folder = Path(self._folder.name)
        file = folder / "headrace.toml"
        file.write_text(_COMMON_CONFIG.format(folder=f'"{folder / "state"}"') + self._config)
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
                start_new_session=True,  # so that Ctrl-C reaches only the drill, which stops the server
            )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not self.url:
                    self._read_url(self._process)
                    await asyncio.sleep(0.05)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def _read_url(self, process: asyncio.subprocess.Process) -> None:
        """Take the URL from the log, where the server writes it once it is ready."""
        found = _SERVING.search(self.log())
        if found is not None:
            self.url = found[1]
        elif process.returncode is not None:
            raise DrillError(f"The {self._name}'s server did not start: {self.log()[-500:].strip()}")

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            await self._end(process)
        self._folder.cleanup()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def log(self) -> str:
        return (Path(self._folder.name) / "log").read_text(errors="replace")

    def workers(self) -> list[int]:
        """Return the process ids of the engine's workers."""
        assert self._process is not None
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError, ValueError):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    command = (folder / "cmdline").read_bytes()
                    if int(fields[1]) == self._process.pid and b"headrace.engine.process" in command:
                        found.append(int(folder.name))
        return found

    def kill_worker(self) -> int:
        """Kill one worker and return its process id."""
        workers = self.workers()
        if not workers:
            raise DrillError("The drill's server has no worker process.")
        os.kill(workers[0], signal.SIGKILL)
        return workers[0]


def _neutral_environment() -> dict[str, str]:
    """Return this process's environment without the variables that would override the configuration file."""
    prefixes = tuple(f"HEADRACE_{section.upper()}_" for section in PLAIN_SECTIONS)
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


async def wait_for_port(port: int, name: str, process: asyncio.subprocess.Process) -> None:
    """Wait until a program of the drill takes connections on 127.0.0.1."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PORT_TIMEOUT_S):
            while process.returncode is None:
                with contextlib.suppress(ConnectionError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return
                await asyncio.sleep(0.05)
    raise DrillError(f"{name} did not start within {_PORT_TIMEOUT_S:g} s.")
