"""Sends one kind of hostile request in a loop.

It is a process of its own, so that its work does not slow the clock of the drill:

    python -m headrace.bench.drills.hostile_requests URL KEY ATTACK

It prints `begun` after its first response, runs until it is terminated, and then prints the responses by status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import msgspec

_LONGEST: Final = 8 * 1024 * 1024  # bytes, the default limit of a body
_SENDERS: Final = 4  # connections that send one request after the other
_HALVES: Final = 256  # connections that hold half a body each
_PAUSE_S: Final = 0.01  # after each response


class Attack(msgspec.Struct, frozen=True):
    about: str
    path: str
    body: Callable[[], bytes]
    half: bool = False  # send all but the last byte, and wait


def _chat(field: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"Hello"}],' + field + b"}"


def _filled(before: bytes, unit: bytes, after: bytes) -> bytes:
    return before + unit * ((_LONGEST - len(before) - len(after)) // len(unit)) + after


CHAT_PATH: Final = "/v1/chat/completions"
ATTACKS: Final[dict[str, Attack]] = {
    "detokenize": Attack(
        "1,000,000 ids to /detokenize",
        "/detokenize",
        lambda: b'{"tokens":[' + b",".join(b"%d" % (number % 1000) for number in range(1_000_000)) + b"]}",
    ),
    "stop-ids": Attack(
        "1,000,000 stop_token_ids",
        CHAT_PATH,
        lambda: _chat(b'"stop_token_ids":[' + b",".join(b"%d" % (n % 1000) for n in range(1_000_000)) + b"]"),
    ),
    "unknown-keys": Attack(
        "500,000 unknown parameters",
        CHAT_PATH,
        lambda: _chat(b",".join(b'"k%d":1' % number for number in range(500_000))),
    ),
    "values": Attack(
        "as many values as a body may have",
        "/v1/embeddings",
        lambda: b'{"input":[' + b",".join(b"%d" % (number % 1000) for number in range(260_000)) + b"]}",
    ),
    "escapes": Attack(
        "8 MiB of escapes in one text", CHAT_PATH, lambda: _filled(b'{"messages":[{"content":"', b"\\u00e4", b'"}]}')
    ),
    "decimals": Attack(
        "long decimals",
        CHAT_PATH,
        lambda: _chat(b'"metadata":[' + b",".join([b"1.2345678901234567890123456789e-300"] * 200_000) + b"]"),
    ),
    "nesting": Attack(
        "4,000,000 open brackets", CHAT_PATH, lambda: b'{"messages":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"
    ),
    "mistakes": Attack("small requests with a mistake", CHAT_PATH, lambda: _chat(b'"temperature":9')),
    "half-sent": Attack(
        f"{_HALVES} half-sent bodies of 8 MiB", CHAT_PATH, lambda: _filled(b'{"messages":"', b"a", b'"}'), half=True
    ),
}


async def attack(url: str, key: str, name: str) -> Counter[int]:
    """Attack until the process is told to terminate; return the number of responses by status, 0 for none."""
    chosen = ATTACKS[name]
    body = chosen.body()
    address = urlsplit(url)
    head = (
        f"POST {chosen.path} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    found: Counter[int] = Counter()

    data = memoryview(head + (body[:-1] if chosen.half else body))  # one copy for all connections

    begun = asyncio.Event()

    async def send() -> None:
        while True:
            found[await _status_of(str(address.hostname), address.port or 80, data)] += 1
            begun.set()
            await asyncio.sleep(_PAUSE_S)

    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    senders = [asyncio.create_task(send()) for _ in range(_HALVES if chosen.half else _SENDERS)]
    if not chosen.half:
        await begun.wait()
    print("begun", flush=True)
    await ending.wait()
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    return found


async def _status_of(host: str, port: int, data: memoryview) -> int:
    """Send a request and return the status of its response, 0 without one. The response may come while it is sent."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    sending: asyncio.Task[None] | None = None
    try:
        await loop.sock_connect(connection, (host, port))
        sending = asyncio.create_task(loop.sock_sendall(connection, data))
        return _status(await loop.sock_recv(connection, 4096))
    except OSError:
        return 0
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        connection.close()


def _status(line: bytes) -> int:
    with contextlib.suppress(ValueError, IndexError):
        return int(line.split(b" ")[1])
    return 0


if __name__ == "__main__":
    os.nice(19)  # a real attacker does not take the server's processors
    print(json.dumps(asyncio.run(attack(*sys.argv[1:4]))), flush=True)
