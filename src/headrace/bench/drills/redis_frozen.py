"""The drill `redis-frozen`: the Redis that counts limits stops answering, then comes back.

Needs redis-server or valkey-server on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from headrace.bench.drills.drill_client import ChatClient, ChatReply, retry_until
from headrace.bench.drills.drill_server import KEY, DrillError, DrillServer, wait_for_port
from headrace.bench.drills.promises import Promise, milliseconds, percentile

WAIT_S = 0.05  # Redis timeout
RETURN_S = 20.0  # by when Redis must count again
_NOISE_S = 0.03  # by which two measurements on one machine may differ
_REQUESTS = 120  # of each measurement
CONFIG = f"""
[models.mini]

[limiting]
redis_env = "HEADRACE_DRILL_REDIS"
wait_ms = {WAIT_S * 1e3:.0f}

[tenants.drill]
limits = {{ requests_per_s = 1000 }}

[tenants.strict]
limits = {{ requests_per_s = 1000 }}
fail = "closed"

[[keys]]
name = "strict"
key = "strict"
tenant = "strict"
"""


async def run() -> list[Promise]:
    async with _redis() as (pid, port):
        environ = {"HEADRACE_DRILL_REDIS": f"redis://127.0.0.1:{port}/0"}
        async with DrillServer(CONFIG, environ=environ) as server, ChatClient(server.url, KEY) as client:
            strict = partial(client.chat, "Hello", key="strict", max_tokens=4)
            await _measure(client, 20)
            before = await _measure(client, _REQUESTS)
            os.kill(pid, signal.SIGSTOP)
            frozen = await _measure(client, _REQUESTS)
            rejected = [await strict() for _ in range(5)]
            os.kill(pid, signal.SIGCONT)
            returned = await retry_until(strict, lambda reply: reply.answered, RETURN_S, 0.2)
            return [
                open_tenants_are_served(frozen),
                no_request_waits_longer(before, frozen),
                closed_tenants_are_rejected(rejected),
                redis_counts_again(returned),
            ]


def open_tenants_are_served(frozen: Sequence[ChatReply]) -> Promise:
    answered = sum(each.answered for each in frozen)
    return Promise(
        'a tenant with fail = "open" is still served',
        f"{answered} of {len(frozen)} requests were answered",
        answered == len(frozen),
    )


def no_request_waits_longer(before: Sequence[ChatReply], frozen: Sequence[ChatReply]) -> Promise:
    usual, slow = _p99_ttft(before), _p99_ttft(frozen)
    return Promise(
        f"no request waits for Redis longer than {milliseconds(WAIT_S)}",
        f"p99 TTFT {milliseconds(usual)} before, {milliseconds(slow)} while it was frozen",
        slow <= usual + WAIT_S + _NOISE_S,
        timed=True,
    )


def closed_tenants_are_rejected(replies: Sequence[ChatReply]) -> Promise:
    return Promise(
        'a tenant with fail = "closed" gets 503 limits_unavailable with Retry-After',
        ", ".join(sorted({f"{each.status} {each.code}" for each in replies})),
        all(each.status == 503 and each.code == "limits_unavailable" and each.refused for each in replies),
    )


def redis_counts_again(after_s: float | None) -> Promise:
    return Promise(
        f"Redis counts again within {RETURN_S:g} s of its return",
        "it does not" if after_s is None else f"after {after_s:.1f} s",
        after_s is not None,
        timed=True,
    )


async def _measure(client: ChatClient, count: int) -> list[ChatReply]:
    """Send requests one after another, so that waiting is measured and queueing is not."""
    return [await client.chat(f"Say hello, {place}.", max_tokens=2, cache="off") for place in range(count)]


def _p99_ttft(replies: Sequence[ChatReply]) -> float:
    return percentile([reply.ttft for reply in replies if reply.ttft is not None], 0.99)


@contextlib.asynccontextmanager
async def _redis() -> AsyncGenerator[tuple[int, int]]:
    """Run a Redis; yield its process id and its port."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise DrillError("This drill needs redis-server or valkey-server. Run `make services` to install it.")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="headrace-drill-") as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches only the drill
        )
        try:
            await wait_for_port(port, "redis-server", process)
            yield process.pid, port
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            await process.wait()
