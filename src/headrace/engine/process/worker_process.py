"""One worker process and its pipes. It can be started before there is an event loop and is awaited in one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from typing import IO, Final

from headrace.engine.process import early_worker

_LINE: Final = 64 * 1024  # bytes of a worker's report
_AT_ONCE: Final = 16 * 1024  # bytes that a pipe buffers without a reader
_LOOK: Final = 0.05  # seconds between polls on systems without pidfd


class WorkerProcess:
    def __init__(self, config: bytes) -> None:
        """`config` is the line that the process reads first. Raise OSError if no process can be started."""
        self._popen = early_worker.take() or early_worker.launch()
        self._output: asyncio.ReadTransport | None = None
        self._log: asyncio.ReadTransport | None = None  # closes at the end of what the process wrote
        self._ended: asyncio.Future[int] | None = None
        if len(config) < _AT_ONCE:
            self._tell(config)
        else:
            threading.Thread(target=self._tell, args=(config,), name="headrace-tell-worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    async def output(self) -> asyncio.StreamReader:
        """Return a reader of the process's standard output. Call it once."""
        reader, self._output = await _reader_of(self._popen.stdout)
        return reader

    async def log(self) -> asyncio.StreamReader:
        """Return a reader of the process's standard error, which outlives the process. Call it once."""
        reader, self._log = await _reader_of(self._popen.stderr)
        return reader

    async def wait(self) -> int:
        """Wait for the process to end and return its exit code."""
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._end())
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()

    def abandon(self) -> None:
        """Kill the process if no event loop ever ran."""
        self.kill()
        self._popen.wait()
        self._close()

    def _tell(self, config: bytes) -> None:
        # Standard input stays open. When it closes, the worker knows that its supervisor is gone.
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process is gone; `wait` reports that
            self._popen.stdin.write(config)
            self._popen.stdin.flush()

    async def _end(self) -> int:
        await _until_ended(self._popen)
        self._close()
        return self._popen.wait()

    def _close(self) -> None:
        if self._output is not None:
            self._output.close()
        for pipe in (
            self._popen.stdin,
            self._popen.stdout if self._output is None else None,
            self._popen.stderr if self._log is None else None,
        ):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten data
                    pipe.close()


async def _reader_of(pipe: IO[bytes] | None) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE, loop=loop)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe)
    return reader, transport


async def _until_ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return  # its pid may belong to another process by now
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        while process.poll() is None:
            await asyncio.sleep(_LOOK)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
