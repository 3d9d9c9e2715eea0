"""The four measurements: each takes a running server and returns a flat dict of numbers.

Units are seconds unless the name says otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from client import Answer, FailedError, Pool, chat
from servers import Running


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The size of each measurement; `--quick` shortens it."""

    rate: float = 200.0  # requests a second, in the open loop
    open_s: float = 20.0
    short_tokens: int = 16  # of an answer at once
    chunk_streams: int = 32
    chunk_tokens: int = 512
    chunk_requests: int = 3  # one after the other, of each of the streams
    streams: int = 1000
    streams_s: float = 20.0
    tokens_per_s: float = 20.0
    memory_first: int = 1000  # requests
    memory_last: int = 100_000

    def short(self) -> Sizes:
        return replace(
            self, open_s=3.0, chunk_tokens=256, chunk_requests=1, streams=200, streams_s=4.0, memory_last=3000
        )


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def open_loop(server: Running, sizes: Sizes, *, stream: bool, seed: int) -> dict[str, float]:
    """Send short chats in an open loop, with random arrivals at a fixed rate; the engine answers immediately."""
    loop = asyncio.get_running_loop()
    requests = [chat("at-once", tokens=sizes.short_tokens, stream=stream, number=number) for number in range(64)]
    pool = Pool(server.port)
    lags: list[float] = []
    chance = random.Random(seed)
    failed = 0

    async def one(request: bytes, due: float) -> Answer | None:
        nonlocal failed
        try:
            answer = await pool.ask(request)
        except (FailedError, OSError):
            failed += 1
            return None
        lags.append(answer.sent - due)
        return answer

    try:
        await pool.warm(16)
        for request in requests:
            await pool.ask(request)
        cpu, due = server.cpu(), time.monotonic()
        end = due + sizes.open_s
        tasks: list[asyncio.Task[Answer | None]] = []
        for request in itertools.cycle(requests):
            due += chance.expovariate(sizes.rate)
            if due > end:
                break
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(loop.create_task(one(request, due)))
        done, unfinished = await asyncio.wait(tasks, timeout=sizes.open_s)
        used = server.cpu() - cpu
        for task in unfinished:
            task.cancel()
        answers = [answer for task in done if (answer := task.result()) is not None]
    finally:
        pool.close()
    seconds = [answer.seconds for answer in answers]
    return {
        "p50_ms": percentile(seconds, 0.5) * 1e3,
        "p99_ms": percentile(seconds, 0.99) * 1e3,
        "client_lag_p50_ms": percentile(lags, 0.5) * 1e3,
        "client_lag_p99_ms": percentile(lags, 0.99) * 1e3,
        "cpu_us_per_request": used / max(len(answers), 1) * 1e6,
        "requests": len(answers),
        "failed": failed,
        "unfinished": len(unfinished),
        "bytes": max((answer.bytes for answer in answers), default=0),
    }


async def chunks(server: Running, sizes: Sizes) -> dict[str, float]:
    """Measure the server's CPU per token of concurrent streams, including the start of their requests."""
    pool = Pool(server.port)
    request = chat("paced", tokens=sizes.chunk_tokens, stream=True)

    async def one(count: int) -> list[Answer]:
        return [await pool.ask(request) for _ in range(count)]

    try:
        await pool.warm(sizes.chunk_streams)
        await asyncio.gather(*(pool.ask(chat("at-once", tokens=4, stream=True)) for _ in range(sizes.chunk_streams)))
        cpu = server.cpu()
        async with asyncio.timeout(600):
            found = await asyncio.gather(*(one(sizes.chunk_requests) for _ in range(sizes.chunk_streams)))
        used = server.cpu() - cpu
    finally:
        pool.close()
    answers = list(itertools.chain.from_iterable(found))
    count = len(answers) * sizes.chunk_tokens
    return {
        "cpu_us_per_chunk": used / count * 1e6,
        "chunks": count,
        "events": sum(answer.events for answer in answers),
        "bytes_per_chunk": sum(answer.bytes for answer in answers) / count,
    }


async def streams(server: Running, sizes: Sizes) -> dict[str, float]:
    """Measure many concurrent streams at reading pace: the gaps between their chunks and the server's CPU."""
    pool = Pool(server.port)
    tokens = round(sizes.streams_s * sizes.tokens_per_s)
    request = chat("paced", tokens=tokens, stream=True)
    spread = 1.0 + sizes.streams / 500  # seconds in which they arrive
    late: list[float] = []

    async def watch() -> None:
        """Measure this client's own lateness with a 5 ms timer."""
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - due)

    async def one(number: int) -> Answer:
        await asyncio.sleep(spread * number / sizes.streams)
        return await pool.ask(request, timed=True)

    watching = asyncio.create_task(watch())
    try:
        await pool.warm(sizes.streams)
        async with asyncio.timeout(6 * (spread + sizes.streams_s)):
            asking = [asyncio.create_task(one(number)) for number in range(sizes.streams)]
            await asyncio.sleep(spread + 0.5)
            late.clear()
            begun, cpu = time.monotonic(), server.cpu()
            await asyncio.sleep(sizes.streams_s - spread - 1.0)
            ended, used = time.monotonic(), server.cpu() - cpu
            late_p99 = percentile(late, 0.99)
            answers = await asyncio.gather(*asking)
    finally:
        watching.cancel()
        pool.close()
    gaps: list[float] = []
    for answer in answers:
        # A gap counts that lies in the window with any part of it: the longest ones reach over its ends.
        for before, after in itertools.pairwise(answer.times or ()):
            if before < ended and after > begun:
                gaps.append(after - before)
    events = sum(begun < moment <= ended for answer in answers for moment in answer.times or ())
    per_s = events / (ended - begun)
    return {
        "itl_p50_ms": percentile(gaps, 0.5) * 1e3,
        "itl_p99_ms": percentile(gaps, 0.99) * 1e3,
        "itl_max_ms": max(gaps, default=float("nan")) * 1e3,
        "nominal_ms": 1e3 / sizes.tokens_per_s,
        "cpu_share": used / (ended - begun),
        "cpu_us_per_chunk": used / max(events, 1) * 1e6,
        "chunks_per_s": per_s,
        "delivered": per_s / (sizes.streams * sizes.tokens_per_s),
        "client_late_p99_ms": late_p99 * 1e3,
    }


async def memory(server: Running, sizes: Sizes) -> dict[str, float]:
    """Measure resident memory after some and after many different requests, half of them streamed."""
    pool = Pool(server.port)
    numbers = iter(range(sizes.memory_last))
    done = 0

    async def one(last: int) -> None:
        nonlocal done
        while done < last and (number := next(numbers, None)) is not None:
            done += 1
            await pool.ask(chat("at-once", tokens=sizes.short_tokens, stream=bool(number % 2), number=number))

    found: list[int] = []
    cpu = server.cpu()
    try:
        await pool.warm(16)
        for last in (sizes.memory_first, sizes.memory_last):
            await asyncio.gather(*(one(last) for _ in range(16)))
            found.append(server.memory())
    finally:
        pool.close()
    return {
        "first_mib": found[0] / 2**20,
        "last_mib": found[1] / 2**20,
        "grown_mib": (found[1] - found[0]) / 2**20,
        "requests": done,
        "cpu_us_per_request": (server.cpu() - cpu) / max(done, 1) * 1e6,
    }
