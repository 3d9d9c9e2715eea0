"""A server that answers every chat without reading it, immediately or at a known pace.

    python benchmarks/client/mock.py --first 0.05 --pace 0.02

It prints its port, and stops with the program that started it. Deviations from the pace are due to the client or the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import re
import signal
from typing import Any, Final

import uvloop

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_WHOLE: Final = re.compile(rb'"stream": *false')
PROMPT_TOKENS: Final = 64  # that it says a prompt has


def _event(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


_COMMON: Final = b'"id":"x","object":"chat.completion.chunk","created":1800000000,"model":"mock"'
_PIECE: Final = _event(
    b"{%b,%b}" % (_COMMON, b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]')
)
_LAST: Final = _event(b"{%b,%b}" % (_COMMON, b'"choices":[{"index":0,"delta":{},"finish_reason":"length"}]'))


def _usage(tokens: int) -> bytes:
    total = PROMPT_TOKENS + tokens
    return b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (PROMPT_TOKENS, tokens, total)


def _end(tokens: int) -> bytes:
    usage = _event(b'{%b,"choices":[],%b}' % (_COMMON, _usage(tokens)))
    return _LAST + usage + _event(b"[DONE]") + b"0\r\n\r\n"


class Mock(asyncio.Protocol):
    def __init__(self, first: float, pace: float) -> None:
        self._first = first  # seconds to the first token
        self._pace = pace  # seconds between tokens; with 0 all come at once
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = _LENGTH.search(head)
        if len(body) < (int(length[1]) if length is not None else 0):
            return
        self._data = b""
        asked = _TOKENS.search(body)
        if head.startswith(b"GET"):
            self._say(b'{"object":"list","data":[{"id":"mock","object":"model"}]}')
        elif head.startswith(b"POST /tokenize"):
            self._say(b'{"tokens":[' + b",".join([b"1"] * max(1, len(body.split(b" ")) - 1)) + b"]}")
        elif asked is None or _WHOLE.search(body):
            said = b'"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}]'
            self._say(b"{%b,%b,%b}" % (_COMMON, said, _usage(1)))
        else:
            self._stream(int(asked[1]))

    def _say(self, text: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        self._transport.write(head + text)

    def _stream(self, tokens: int) -> None:
        if not (self._first or self._pace):
            self._transport.write(_HEAD + _PIECE * tokens + _end(tokens))
            return
        loop = asyncio.get_running_loop()
        begin = loop.time() + self._first

        def more(number: int) -> None:
            if self._transport.is_closing():
                return
            self._transport.write(_PIECE if number < tokens else _end(tokens))
            if number < tokens:
                loop.call_at(begin + (number + 1) * self._pace, more, number + 1)

        self._transport.write(_HEAD)
        loop.call_at(begin, more, 0)


async def _serve(first: float, pace: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Mock(first, pace), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer chats at a known pace.")
    parser.add_argument("--first", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between tokens; 0: all at once")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    uvloop.run(_serve(options.first, options.pace))


if __name__ == "__main__":
    main()
