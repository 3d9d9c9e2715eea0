"""`headrace worker` processes, as hosts that a test can kill, stop and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.engine.process.worker_address import WorkerTls

PATIENCE = 120.0  # seconds, after which a test that waits has failed


class WorkerHost:
    """The processes of one host: the one that listens, and the engine's."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def worker_host(
    folder: Path, tls: WorkerTls | None, cache: Path, *arguments: str, preemptible: bool = False
) -> AsyncIterator[WorkerHost]:
    files = [] if tls is None else ["--cert", tls.cert, "--key", tls.key, "--ca", tls.ca]
    command = [sys.executable, "-m", "headrace", "worker", str(folder), "--listen", "127.0.0.1:0", *files, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(["--preemptible"] if preemptible else []),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HEADRACE_CACHE": str(cache), "COLUMNS": "200"},
    )
    assert process.stderr is not None
    said = ""
    try:
        async with asyncio.timeout(PATIENCE):
            while not (found := re.search(r" at (t\w+://\S+:\d+)\. ", said)):
                line = await process.stderr.readline()
                assert line, said
                said += line.decode()
        reading = asyncio.create_task(process.stderr.read())  # so that the pipe never fills
        yield WorkerHost(process, found[1])
        reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(PATIENCE):
                await process.wait()
        except TimeoutError:
            process.kill()
            raise


class CuttingProxy:
    """Relays a port. While it is cut, connections stay open and nothing comes through, as in a network partition."""

    def __init__(self, port: int = 0, *, delay_s: float = 0.0) -> None:
        """`delay_s`: of everything that comes through. Set `target` to the port, if it is not known yet."""
        self.target = port
        self._delay_s = delay_s
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        inner = None
        try:
            await self._whole.wait()
            inner_reader, inner = await asyncio.open_connection("127.0.0.1", self.target)
            pumps = [
                asyncio.create_task(self._pump(reader, inner)),
                asyncio.create_task(self._pump(inner_reader, writer)),
            ]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, inner):
                if each is not None:
                    each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(self._delay_s)
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()  # what was written before still arrives
