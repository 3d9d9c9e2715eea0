"""The drill `upstream-down`: the server that answers for a model goes away in the middle of answers, and comes back.

Owns a small upstream of its own, the load, and what docs/how-to/playbooks.md promises of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Final

from headrace.bench.drills.drill_client import ChatClient, ChatReply
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.bench.drills.promises import Promise, milliseconds, percentile

STREAMS = 12
OPEN = 2.0  # seconds that the upstream is left alone at first
_BACK = 20.0  # seconds after which it is used again at the latest
_QUICK = 1.5  # seconds that a request may wait once the upstream is known to be gone
_WORD: Final = "upstream "
CONFIG = """
[models.mini]

[models.mini.upstreams.remote]
url = "http://127.0.0.1:{port}/v1"
timeouts = {{ connect_s = 1.0, first_s = 5.0, chunk_s = 2.0 }}
retries = {{ most = 0 }}
breaker = {{ least_calls = 4, failures = 0.5, open_s = {open}, open_most_s = {open} }}

[routing.chains.main]
steps = [{{ variant = "mini@remote" }}, {{ variant = "mini", then = "restart" }}]
patience_s = 5.0
"""


class DrillUpstream:
    """An OpenAI-compatible server that says one word again and again; it can be taken away."""

    def __init__(self) -> None:
        self.port = 0
        self.asked = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """As a machine that is switched off: nobody listens, and what was open breaks off."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (
                        int(line.partition(b":")[2])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-length:")
                    ),
                    0,
                )
                await reader.readexactly(length)
                self.asked += 1
                await self._answer(writer)
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for place in range(20):
            delta = {"role": "assistant", "content": _WORD} if place == 0 else {"content": _WORD}
            self._event(writer, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            await writer.drain()
            await asyncio.sleep(0.1)
        self._event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 8, "completion_tokens": 20, "total_tokens": 28}
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
        async with DrillServer(CONFIG.format(port=upstream.port, open=OPEN)) as server:
            asker = ChatClient(server.url, KEY)
            try:
                return await _run(asker, upstream)
            finally:
                await asker.close()
    finally:
        await upstream.close()


async def _run(asker: ChatClient, upstream: DrillUpstream) -> list[Promise]:
    whole = await _ask(asker)
    running = [asyncio.create_task(_ask(asker)) for _ in range(STREAMS)]
    await asyncio.sleep(0.7)
    await upstream.close()
    broken = await asyncio.gather(*running)
    for _ in range(6):
        await _ask(asker)
    asked = upstream.asked
    later = [await _ask(asker) for _ in range(10)]
    waited = percentile([each.ttft for each in later if each.ttft is not None], 0.99)
    await upstream.open()
    back = await _back(asker)
    return [
        Promise("while it is there, the upstream answers", whole.text[:24].strip(), whole.text.startswith(_WORD)),
        Promise(
            "streams that it breaks begin anew with the next variant, marked, and come to their end",
            f"{sum(each.answered for each in broken)} of {STREAMS} ended well, {sum(each.restarts for each in broken)} "
            f"restarts were marked, {sum(_WORD in each.text for each in broken)} mix two answers",
            all(each.answered and each.restarts == 1 and _WORD not in each.text for each in broken),
        ),
        Promise(
            f"once it is known to be gone, it costs nothing: a first token within {milliseconds(_QUICK)}",
            f"p99 {milliseconds(waited)}; {upstream.asked - asked} of 10 requests went to it",
            waited <= _QUICK and all(each.answered for each in later),
        ),
        Promise(
            f"it is used again by itself within {_BACK:g} s of its return",
            f"after {back:.1f} s" if back is not None else "it is not",
            back is not None,
        ),
    ]


async def _ask(asker: ChatClient) -> ChatReply:
    return await asker.chat("What is time to first token?", model="mini@remote", max_tokens=48)


async def _back(asker: ChatClient) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < _BACK:
        if (await _ask(asker)).text.startswith(_WORD):
            return time.monotonic() - began
        await asyncio.sleep(0.3)
    return None
