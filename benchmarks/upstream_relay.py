"""What it saves to hand an upstream's bytes on, rather than to read them into pieces and to write these anew.

    python benchmarks/upstream_relay.py --streams 40 --chunks 1000 --rounds 7

A process of its own writes the same recorded stream again and again, as open servers do, and takes what clients would,
so that only the gateway's side is measured: processor time of this process for each chunk, from an upstream's socket to
a client's, of

    bare     the bytes are read and written, and nothing is looked at
    relay    RelayReader: read along, the model's name and the id replaced
    as is    the same, with nothing replaced
    pieces   AnswerReader and ChatStream: pieces, and chunks made of them, each written by itself as the server does

The ways take turns in every round; the median of the rounds is printed, the spread, and what is left without the
sockets' share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from headrace.config.upstream_section import UpstreamConfig, UpstreamHealthConfig
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream import Upstream
from headrace.models.model_folder import BUNDLED, open_model
from headrace.server.api.chat_completions import ChatStream

SECONDS = 600.0  # after which the whole measurement is given up


class NoEngine:
    def stream(self, request: object) -> object:
        raise AssertionError("nothing runs here")

    async def stats(self) -> list[dict[str, object]]:
        return []


def recorded(chunks: int, burst: int) -> list[bytes]:
    """Split a stream into writes of `burst` chunks."""
    head = {"id": "chatcmpl-5f2c9a", "object": "chat.completion.chunk", "created": 1760000000, "model": "served-there"}

    def event(choice: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + json.dumps({**head, "choices": choice, **more}, separators=(",", ":")).encode() + b"\n\n"

    def text(word: str) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None}]

    events = [event(text(f" word{place % 7}")) for place in range(chunks)]
    end = event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}])
    usage = {"prompt_tokens": 20, "completion_tokens": chunks, "total_tokens": chunks + 20}
    parts = [b"".join(events[place : place + burst]) for place in range(0, chunks, burst)]
    return [*parts, end + event([], usage=usage) + b"data: [DONE]\n\n"]


def serve(chunks: int, burst: int) -> None:
    parts = recorded(chunks, burst)
    framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                asked = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(asked.split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            writer.write(head)
            for part in framed:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)  # a packet for each, as tokens come
            writer.write(b"0\r\n\r\n")

    async def forget(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            pass
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = await asyncio.start_server(forget, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], client.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the measurement ends

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Client:
    """A connection's transport, like the one of the server's HTTP edge."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.bytes = 0

    def write(self, data: bytes) -> bool:
        self.bytes += len(data)
        self.transport.write(data)
        return True


async def measure(port: int, sink: int, streams: int, chunks: int, rounds: int) -> dict[str, list[float]]:
    config = UpstreamConfig(
        url=f"http://127.0.0.1:{port}/v1", model="served-there", health=UpstreamHealthConfig(path="")
    )
    upstream = Upstream("mini@far", config)
    tokenizer = open_model(BUNDLED / "mini").tokenizer
    served = ServedVariant(name="mini@far", engine=NoEngine(), tokenizer=tokenizer, context=8192)  # pyright: ignore
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for _ in range(streams):
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", sink)
        clients.append(Client(transport))

    def answering() -> UpstreamGeneration:
        asked = TextRequest(model="mini@far", messages=[{"role": "user", "content": "Say a lot."}], stream=True)
        return UpstreamGeneration(Exchange(caller=Caller(), text_request=asked, served=served), upstream)

    async def pieces(client: Client) -> None:
        made = answering()
        await made.begin()
        events = ChatStream(made.exchange)

        def take(piece: ChoiceDelta) -> bool:
            return client.write(events.piece(piece))

        client.write(events.begin())
        await made.run(take)
        client.write(events.end())
        made.settle()

    async def relay(client: Client, rename: bool = True) -> None:
        made = answering()
        await made.begin()
        await made.relay(client.write, ChatStream, rename=rename)
        made.settle()

    async def bare(client: Client) -> None:
        made = answering()
        await made.begin()
        reply = await upstream.client.post("/chat/completions", b"{}", time.monotonic() + 60.0)
        while data := await reply.read(time.monotonic() + 60.0):
            client.write(data)
        reply.let_go()
        made.settle()

    ways: dict[str, Callable[[Client], Coroutine[object, object, None]]] = {
        "bare": bare,
        "relay": relay,
        "as is": partial(relay, rename=False),
        "pieces": pieces,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for place in range(rounds + 1):
        for name, way in ways.items():
            before = sum(client.bytes for client in clients)
            began = time.process_time()
            await asyncio.gather(*map(way, clients))
            spent = time.process_time() - began
            if sum(client.bytes for client in clients) - before < streams * chunks * 50:
                raise RuntimeError(f"{name}: too little came")
            if place:  # the first round warms up
                found[name].append(spent / (streams * chunks) * 1e6)
    await upstream.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=40, help="answers at once")
    parser.add_argument("--chunks", type=int, default=1000, help="of one answer")
    parser.add_argument("--burst", type=int, default=1, help="chunks that come in one packet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.chunks, given.burst)
        return
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    command += ["--chunks", str(given.chunks), "--burst", str(given.burst)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port, sink = map(int, server.stdout.readline().split())

        async def bounded() -> dict[str, list[float]]:
            return await asyncio.wait_for(measure(port, sink, given.streams, given.chunks, given.rounds), SECONDS)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(bounded())
    finally:
        server.kill()
        server.wait()
    bare = statistics.median(found["bare"])
    print(f"{'way':<8}{'us/chunk':>10}{'least':>8}{'most':>8}{'over bare':>11}")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name:<8}{median:>10.2f}{min(values):>8.2f}{max(values):>8.2f}{median - bare:>11.2f}")


if __name__ == "__main__":
    main()
