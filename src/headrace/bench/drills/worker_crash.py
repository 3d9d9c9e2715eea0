"""The drill `worker-crash`: the engine's process is killed while it writes sixteen answers.

Owns the load and what docs/how-to/playbooks.md promises of it.
"""

from __future__ import annotations

import asyncio

from headrace.bench.drills.drill_client import ChatClient
from headrace.bench.drills.drill_server import KEY, DrillServer, until
from headrace.bench.drills.promises import Promise, milliseconds

CONFIG = "[models.mini]\n"
STREAMS = 16
TOKENS = 160
_PAUSE = 10.0  # seconds that a client waits at most for the new process


async def run() -> list[Promise]:
    async with DrillServer(CONFIG) as server:
        asker = ChatClient(server.url, KEY)
        try:
            return await _run(server, asker)
        finally:
            await asker.close()


async def _run(server: DrillServer, asker: ChatClient) -> list[Promise]:
    before = [
        await asker.chat(f"Tell me about latency, part {place}.", max_tokens=TOKENS, ignore_eos=True)
        for place in range(STREAMS)
    ]
    running = [
        asyncio.create_task(asker.chat(f"Tell me about latency, part {place}.", max_tokens=TOKENS, ignore_eos=True))
        for place in range(STREAMS)
    ]
    await asyncio.sleep(0.6)
    killed = server.kill_worker()
    after = await asyncio.gather(*running)
    same = sum(one.text == other.text and other.answered for one, other in zip(before, after, strict=True))
    pause = max(each.longest_gap for each in after)
    back = await until(lambda: any(pid != killed for pid in server.workers()), _PAUSE)
    _, ready = await asker.send("GET", "/health/ready")
    return [
        Promise(
            "every stream goes on where it was, byte for byte as without the crash",
            f"{same} of {STREAMS} streams are the same",
            same == STREAMS,
        ),
        Promise(
            f"a client sees a pause of {_PAUSE:g} s at most, and no error",
            f"the longest pause was {milliseconds(pause)}; {sum(not each.answered for each in after)} errors",
            pause <= _PAUSE and all(each.answered for each in after),
        ),
        Promise(
            "the process is started again by itself, and the server stays ready",
            f"a new process {'is there' if back else 'is not there'}; /health/ready says {ready.get('status')}",
            back and ready.get("status") == "ready",
        ),
    ]
