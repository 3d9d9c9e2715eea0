"""The baseline: a bare ASGI server under uvicorn, uvloop and httptools that answers every chat with fixed bytes.

    python benchmarks/edge/echo.py --tokens-per-s 20

The bytes have the shape and length of Headrace's responses, whole or streamed. It has no routes, validation or log. It
also serves as an upstream.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec
import uvicorn
import uvloop
from pace import Wheel

WORDS: Final = [
    f" {word}" for word in "The river runs past the old mill , turns the wheel and goes on to the sea .".split()
]
HEAD: Final = {
    "id": "chatcmpl-0123456789abcdef01234567",
    "object": "chat.completion",
    "created": 1_800_000_000,
    "model": "paced",
    "system_fingerprint": "fp_0123456789",
}
TIMING: Final = b"shape;dur=0.123, queue;dur=0.0, prefill;dur=0.0, decode;dur=0.0, post;dur=0.123, total;dur=0.123"
REQUEST_ID: Final = (b"x-request-id", b"req_0123456789abcdef01234567")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Body(msgspec.Struct):
    model: str = "at-once"
    stream: bool = False
    max_tokens: int = 16


class Echo:
    def __init__(self, tokens_per_s: float) -> None:
        self._wheel = Wheel(tokens_per_s)
        self._decode = msgspec.json.Decoder(Body).decode

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = self._decode(body) if body else Body()
        if asked.stream:
            await self._stream(send, asked)
            return
        found = _whole(asked.max_tokens)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(found)).encode()),
            REQUEST_ID,
            (b"server-timing", TIMING),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": found})

    async def _stream(self, send: Send, asked: Body) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            REQUEST_ID,
        ]
        first, chunks, last = _events()
        turn = _Turn()
        if asked.model == "paced":
            self._wheel.add(turn)
            await turn.come()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first + chunks[0], "more_body": True})
        for place in range(1, asked.max_tokens):
            if asked.model == "paced":
                await turn.come()
            await send({"type": "http.response.body", "body": chunks[place % len(chunks)], "more_body": True})
        turn.over = True
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _Turn:
    """Lets a stream wait for its next chunk's time."""

    def __init__(self) -> None:
        self.over = False
        self._missed = 0
        self._waiter: asyncio.Future[None] | None = None

    def __call__(self) -> bool:
        self._missed += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return not self.over

    async def come(self) -> None:
        if not self._missed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._missed -= 1


@functools.cache
def _whole(tokens: int) -> bytes:
    text = "".join(WORDS[place % len(WORDS)] for place in range(tokens))
    message = {"role": "assistant", "content": text, "refusal": None}
    usage = {
        "prompt_tokens": 30,
        "completion_tokens": tokens,
        "total_tokens": 30 + tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    headrace = {"queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0, "total_ms": 0.123, "cached_tokens": 0}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    return msgspec.json.encode({**HEAD, "choices": [choice], "usage": usage, "headrace": headrace})


@functools.cache
def _events() -> tuple[bytes, list[bytes], bytes]:
    """Return the start of a stream, its chunks, and its end."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        value = {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}
        return b"data: " + msgspec.json.encode(value) + b"\n\n"

    first = chunk({"role": "assistant", "content": "", "refusal": None})
    return first, [chunk({"content": word}) for word in WORDS], chunk({}, "length") + b"data: [DONE]\n\n"


async def serve(port: int, tokens_per_s: float) -> None:
    listening = socket.create_server(("127.0.0.1", port), backlog=2048)
    config = uvicorn.Config(
        Echo(tokens_per_s),
        http="httptools",
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=600,
        backlog=2048,
    )
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", os.getpid(), flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


def main() -> None:
    parser = argparse.ArgumentParser(description="A minimal chat server.")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of each stream of the model `paced`")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.tokens_per_s))


if __name__ == "__main__":
    main()
