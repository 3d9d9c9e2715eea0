"""The drill `worker-crash`: the engine's worker process is killed while it generates sixteen answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.bench.drills.drill_client import ChatClient, ChatReply, wait_until
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.bench.drills.promises import Promise, milliseconds

CONFIG = "[models.mini]\n"
STREAMS = 16
TOKENS = 160
PAUSE_S = 10.0  # that a client may wait for the new worker
_RESTART_TIMEOUT_S = 600.0


async def run() -> list[Promise]:
    async with DrillServer(CONFIG) as server, ChatClient(server.url, KEY) as client:

        async def ask(part: int, reply: ChatReply | None = None) -> ChatReply:
            question = f"Tell me about latency, part {part}."
            return await client.chat(question, max_tokens=TOKENS, ignore_eos=True, reply=reply)

        undisturbed = [await ask(part) for part in range(STREAMS)]
        crashed = [ChatReply() for _ in range(STREAMS)]
        streams = asyncio.gather(*(ask(part, reply) for part, reply in enumerate(crashed)))
        await wait_until(lambda: streams.done() or all(reply.text for reply in crashed), _RESTART_TIMEOUT_S)
        killed = server.kill_worker()
        await streams
        restarted = await wait_until(lambda: any(pid != killed for pid in server.workers()), _RESTART_TIMEOUT_S)
        _, ready = await client.send("GET", "/health/ready")
        return [
            streams_continue(undisturbed, crashed),
            pause_is_short(crashed),
            worker_restarts(restarted is not None, str(ready.get("status"))),
        ]


def streams_continue(undisturbed: Sequence[ChatReply], crashed: Sequence[ChatReply]) -> Promise:
    same = sum(one.text == other.text and other.answered for one, other in zip(undisturbed, crashed, strict=True))
    return Promise(
        "every stream continues where it was, byte for byte as without the crash",
        f"{same} of {len(crashed)} streams are the same",
        same == len(crashed),
    )


def pause_is_short(crashed: Sequence[ChatReply]) -> Promise:
    pause_s = max(each.longest_gap for each in crashed)
    errors = sum(not each.answered for each in crashed)
    return Promise(
        f"a client sees a pause of at most {PAUSE_S:g} s and no error",
        f"the longest pause was {milliseconds(pause_s)}; {errors} errors",
        pause_s <= PAUSE_S and not errors,
        timed=True,
    )


def worker_restarts(restarted: bool, readiness: str) -> Promise:
    return Promise(
        "the worker restarts by itself, and the server is ready again",
        f"the worker {'restarted' if restarted else 'did not restart'}; /health/ready says {readiness}",
        restarted and readiness == "ready",
    )
