"""The drill `upstream-down`: the upstream that serves a model goes away in the middle of answers, then comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Final

from headrace.bench.drills.drill_client import ChatClient, ChatReply, retry_until, wait_until
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.bench.drills.promises import Promise, milliseconds, percentile

STREAMS = 12
OPEN_S = 2.0  # for which the circuit breaker stays open
RETURN_S = 20.0  # by when the upstream must be used again
QUICK_S = 1.5  # TTFT once the upstream is known to be down
WORD: Final = "upstream "
_TIMEOUT_S = 300.0
CONFIG = """
[models.mini]

[models.mini.upstreams.remote]
url = "http://127.0.0.1:{port}/v1"
timeouts = {{ connect_s = 10.0, first_s = 30.0, chunk_s = 10.0 }}
retries = {{ most = 0 }}
breaker = {{ least_calls = 4, failures = 0.5, open_s = {open_s}, open_most_s = {open_s} }}

[routing.chains.main]
steps = [{{ variant = "mini@remote" }}, {{ variant = "mini", then = "restart" }}]
patience_s = 60.0
"""


class DrillUpstream:
    """An OpenAI-compatible server that repeats one word, and that can go away and come back."""

    def __init__(self) -> None:
        self.port = 0
        self.requests = 0
        self.endless = False  # answers go on until the upstream goes away
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Behave like a machine that is switched off: refuse connections and break the open ones."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                lengths = [line.partition(b":")[2] for line in lines if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0]) if lengths else 0)
                self.requests += 1
                await self._answer(writer)
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        words = 0
        while words < 20 or self.endless:
            delta = {"role": "assistant", "content": WORD} if words == 0 else {"content": WORD}
            self._event(writer, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            await writer.drain()
            await asyncio.sleep(0.1)
            words += 1
        self._event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 8, "completion_tokens": words, "total_tokens": 8 + words}
        self._event(writer, {"choices": [], "usage": usage})
        self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, fields: dict[str, object]) -> None:
        event = {"id": "drill", "object": "chat.completion.chunk", "created": 0, "model": "mini", **fields}
        self._write(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def run() -> list[Promise]:
    upstream = DrillUpstream()
    await upstream.open()
    try:
        config = CONFIG.format(port=upstream.port, open_s=OPEN_S)
        async with DrillServer(config) as server, ChatClient(server.url, KEY) as client:
            ask = partial(client.chat, "What is time to first token?", model="mini@remote", max_tokens=48)
            whole = await ask()
            upstream.endless = True
            broken = [ChatReply() for _ in range(STREAMS)]
            streams = asyncio.gather(*(ask(reply=reply) for reply in broken))
            await wait_until(lambda: streams.done() or all(reply.text for reply in broken), _TIMEOUT_S)
            await upstream.close()
            upstream.endless = False
            await streams
            for _ in range(6):
                await ask()
            requests = upstream.requests
            later = [await ask() for _ in range(10)]
            requests = upstream.requests - requests
            await upstream.open()
            returned = await retry_until(ask, is_from_upstream, RETURN_S, 0.3)
            return [
                upstream_answers(whole),
                broken_streams_restart(broken),
                downtime_costs_nothing(later, requests),
                upstream_is_used_again(returned),
            ]
    finally:
        await upstream.close()


def is_from_upstream(reply: ChatReply) -> bool:
    return reply.text.startswith(WORD)


def upstream_answers(reply: ChatReply) -> Promise:
    return Promise("while it is up, the upstream answers", reply.text[:24].strip(), is_from_upstream(reply))


def broken_streams_restart(replies: Sequence[ChatReply]) -> Promise:
    answered = sum(each.answered for each in replies)
    restarts = sum(each.restarts for each in replies)
    mixed = sum(WORD in each.text for each in replies)
    return Promise(
        "streams that it breaks restart on the next variant, marked, and finish",
        f"{answered} of {len(replies)} finished, {restarts} restarts were marked, {mixed} mix two answers",
        all(each.answered and each.restarts == 1 and WORD not in each.text for each in replies),
    )


def downtime_costs_nothing(replies: Sequence[ChatReply], requests: int) -> Promise:
    """`requests` counts those that still reached the upstream."""
    ttft = percentile([each.ttft for each in replies if each.ttft is not None], 0.99)
    return Promise(
        f"once it is known to be down, it costs nothing: TTFT within {milliseconds(QUICK_S)}",
        f"p99 {milliseconds(ttft)}; {requests} of {len(replies)} requests went to it",
        ttft <= QUICK_S and all(each.answered for each in replies),
        timed=True,
    )


def upstream_is_used_again(after_s: float | None) -> Promise:
    return Promise(
        f"it is used again by itself within {RETURN_S:g} s of its return",
        "it is not" if after_s is None else f"after {after_s:.1f} s",
        after_s is not None,
        timed=True,
    )
