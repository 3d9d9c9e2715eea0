"""The drill `redis-frozen`: the Redis that limits are counted in stops answering, and comes back.

Owns the load and what docs/how-to/playbooks.md promises of it. Needs redis-server or valkey-server on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncGenerator

from headrace.bench.drills.drill_client import ChatClient, ChatReply
from headrace.bench.drills.drill_server import KEY, DrillError, DrillServer
from headrace.bench.drills.promises import Promise, milliseconds, percentile

BOUND = 0.05  # seconds that a request waits for Redis at most
_SLACK = 0.03  # seconds that two measurements of one machine may differ by
_BACK = 20.0  # seconds after which Redis counts again at the latest
_ASKED = 120  # requests of each measurement
CONFIG = """
[models.mini]

[limiting]
redis_env = "HEADRACE_DRILL_REDIS"
wait_ms = 50

[tenants.drill]
limits = { requests_per_s = 1000 }

[tenants.strict]
limits = { requests_per_s = 1000 }
fail = "closed"

[[keys]]
name = "strict"
key = "strict"
tenant = "strict"
"""


async def run() -> list[Promise]:
    async with _redis() as (process, port):
        address = f"redis://127.0.0.1:{port}/0"
        async with DrillServer(CONFIG, environ={"HEADRACE_DRILL_REDIS": address}) as server:
            asker = ChatClient(server.url, KEY)
            try:
                return await _run(asker, process.pid)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                await asker.close()


async def _run(asker: ChatClient, pid: int) -> list[Promise]:
    await _measure(asker, 20)
    before = await _measure(asker, _ASKED)
    os.kill(pid, signal.SIGSTOP)
    frozen = await _measure(asker, _ASKED)
    strict = [await asker.chat("Hello", key="strict", max_tokens=4) for _ in range(5)]
    os.kill(pid, signal.SIGCONT)
    back = await _back(asker)
    fine, slow = _p99(before), _p99(frozen)
    return [
        Promise(
            'a tenant with fail = "open" is served all the same',
            f"{sum(each.answered for each in frozen)} of {len(frozen)} requests were answered",
            all(each.answered for each in frozen),
        ),
        Promise(
            f"no request waits longer for it than {milliseconds(BOUND)}",
            f"p99 of the time to the first token {milliseconds(fine)} before, {milliseconds(slow)} while it was frozen",
            slow <= fine + BOUND + _SLACK,
        ),
        Promise(
            'a tenant with fail = "closed" gets 503 limits_unavailable with Retry-After',
            ", ".join(sorted({f"{each.status} {each.code}" for each in strict})),
            all(each.status == 503 and each.code == "limits_unavailable" and each.refused for each in strict),
        ),
        Promise(
            f"within {_BACK:g} s of its return Redis counts again",
            f"after {back:.1f} s" if back is not None else "it does not",
            back is not None,
        ),
    ]


async def _measure(asker: ChatClient, count: int) -> list[ChatReply]:
    """One after another: what is measured is a wait, not a queue."""
    return [await asker.chat(f"Say hello, {place}.", max_tokens=2, cache="off") for place in range(count)]


def _p99(replies: list[ChatReply]) -> float:
    return percentile([reply.ttft for reply in replies if reply.ttft is not None], 0.99)


async def _back(asker: ChatClient) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < _BACK:
        if (await asker.chat("Hello", key="strict", max_tokens=4)).answered:
            return time.monotonic() - began
        await asyncio.sleep(0.2)
    return None


@contextlib.asynccontextmanager
async def _redis() -> AsyncGenerator[tuple[asyncio.subprocess.Process, int]]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise DrillError("this drill needs redis-server or valkey-server (`make services` installs it)")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="headrace-drill-") as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _listens(port)
            yield process, port
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            await process.wait()


async def _listens(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
    raise DrillError("redis-server did not start")
