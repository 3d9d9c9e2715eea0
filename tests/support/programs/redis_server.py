"""A Redis of the test's own on a free loopback port, and servers that only look like one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "neither redis-server nor valkey-server is installed (make services)"
_PATIENCE = 120.0  # seconds for it to start

Way = Literal["frozen", "reset", "full", "well"]


@dataclass
class Redis:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def redis_server(folder: Path) -> Generator[Redis, None, None]:
    assert PROGRAM is not None
    port = _free_port()
    options = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly no --loglevel warning".split()
    process = subprocess.Popen([PROGRAM, *options, "--save", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _PATIENCE
        while not _answers(port):
            assert process.poll() is None, "it did not start"
            assert time.monotonic() < end, "it does not answer"
            time.sleep(0.02)
        yield Redis(f"redis://127.0.0.1:{port}/0", process)
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@dataclass
class Pretender:
    """Answers every command with one line, or does what `way` says."""

    way: Way
    port: int = 0
    commands: list[bytes] = field(default_factory=list[bytes])
    connections: int = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while command := await _command(reader):
                self.commands.append(command)
                if self.way == "frozen":
                    await reader.read()
                elif self.way == "reset":
                    connection = writer.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                elif command == b"EVALSHA":
                    full = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
                    writer.write(full if self.way == "full" else b"*2\r\n:1\r\n:1\r\n")
                else:
                    writer.write(b"+OK\r\n")
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _command(reader: asyncio.StreamReader) -> bytes:
    """The name of the next one; nothing at the end."""
    line = await reader.readline()
    if not line.startswith(b"*"):
        return b""
    words: list[bytes] = []
    for _ in range(int(line[1:])):
        length = int((await reader.readline())[1:])
        words.append((await reader.readexactly(length + 2))[:-2])
    return words[0].upper()


@contextlib.asynccontextmanager
async def pretending(way: Way) -> AsyncGenerator[Pretender, None]:
    pretender = Pretender(way)
    server = await asyncio.start_server(pretender.serve, "127.0.0.1", 0)
    pretender.port = server.sockets[0].getsockname()[1]
    try:
        yield pretender
    finally:
        server.close()
