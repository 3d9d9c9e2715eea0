"""An upstream that does what a test tells it to, on a free port of 127.0.0.1, and exchanges to be answered by it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.config.upstream_section import UpstreamConfig, UpstreamHealthConfig, UpstreamRetries, UpstreamTimeouts
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TextRequest
from headrace.gateway.routing.composite_answerer import collect_choices
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.gateway.upstreams.upstream import Upstream
from headrace.models.model_folder import BUNDLED, open_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.api.chat_completions import ChatStream
from headrace.server.api.completions import CompletionStream
from tests.support.dialect_exchanges import NoEngine

MESSAGES = [{"role": "user", "content": "Hello there"}]
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}


@functools.cache
def tokenizer() -> Tokenizer:
    return open_model(BUNDLED / "mini").tokenizer


@dataclass
class Heard:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Line:
    """A connection, for a handler to answer one request on."""

    heard: Heard
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kept: bool = False  # for another request

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"content-type: {kind}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.say("\r\n".join(lines).encode() + b"\r\n\r\n")

    def reset(self) -> None:
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Waits until the other side has left."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Handler = Callable[[Line], Awaitable[None]]


@dataclass
class Fake:
    answers: list[Handler]  # one for each request; the last for all that follow
    heard: list[Heard] = field(default_factory=list[Heard])
    left: int = 0  # handlers that were told that the other side left
    connections: int = 0
    server: asyncio.Server | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while (heard := await _request(reader)) is not None:
                place = min(len(self.heard), len(self.answers) - 1)
                self.heard.append(heard)
                line = Line(heard, reader, writer)
                await self.answers[place](line)
                if not line.kept:
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        assert self.server is not None
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def _request(reader: asyncio.StreamReader) -> Heard | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:-2])}
    return Heard(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


@contextlib.asynccontextmanager
async def faking(*answers: Handler) -> AsyncGenerator[Fake]:
    fake = Fake(list(answers))
    fake.server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    try:
        yield fake
    finally:
        await fake.close()


# What it says


def chunk(content: str | None = None, *, index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    delta: dict[str, Any] = {} if content is None else {"content": content}
    choice = {"index": index, "delta": delta | fields.pop("delta", {}), "finish_reason": finish}
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "theirs",
        "choices": [choice | fields],
    }


def used(**usage: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-theirs", "model": "theirs", "choices": [], "usage": USAGE | usage}


def sse(*values: Any, done: bool = True, end: str = "\n") -> bytes:
    blocks = [
        value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode() for value in values
    ]
    if done:
        blocks.append(b"[DONE]")
    ends = end.encode()
    return b"".join(b"data: " + block + ends + ends for block in blocks)


ANSWER = (
    chunk(delta={"role": "assistant", "content": ""}),
    chunk("Hel"),
    chunk("lo"),
    chunk("!"),
    chunk(finish="stop"),
)


def streams(*values: Any, done: bool = True, end: str = "\n") -> Handler:
    """The chunks at once, each in a packet of its own, and then the end."""
    said = values or (*ANSWER, used())

    async def handler(line: Line) -> None:
        await line.head()
        for value in said:
            await line.say(sse(value, done=False, end=end))
        if done:
            await line.say(sse(end=end))

    return handler


def says(data: bytes, *, kind: str = "text/event-stream", status: int = 200, **headers: str) -> Handler:
    """These bytes, and the end of the connection."""

    async def handler(line: Line) -> None:
        await line.head(status, kind, **headers)
        await line.say(data)

    return handler


def kept(data: bytes, *, kind: str = "text/event-stream", status: int = 200) -> Handler:
    """These bytes in one chunk, on a connection that stays."""

    async def handler(line: Line) -> None:
        line.kept = True
        head = f"HTTP/1.1 {status} Whatever\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        await line.say(head.encode(), b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    return handler


def refuses(status: int, body: Any = None, **headers: str) -> Handler:
    data = body if isinstance(body, bytes) else json.dumps(body or {"error": {"message": "no"}}).encode()
    return says(data, kind="application/json", status=status, **headers)


async def hangs(line: Line) -> None:
    """Says nothing at all."""
    await line.gone()


async def resets(line: Line) -> None:
    line.reset()


async def hangs_after_the_head(line: Line) -> None:
    await line.head()
    await line.gone()


async def hangs_in_the_stream(line: Line) -> None:
    await line.head()
    await line.say(sse(chunk("Hel"), done=False))
    await line.gone()


async def breaks(line: Line) -> None:
    await line.head()
    await line.say(sse(chunk("Hel"), chunk("lo"), done=False))
    await asyncio.sleep(0.05)  # so that it is read before the reset throws it away
    line.reset()


# Who asks


def config(fake: Fake | str, **changes: Any) -> UpstreamConfig:
    """Of the fake, with times that a test can wait for."""
    base = UpstreamConfig(
        url=fake if isinstance(fake, str) else fake.url,
        model="theirs",
        timeouts=UpstreamTimeouts(connect_s=5.0, first_s=20.0, chunk_s=20.0, usage_s=0.2, total_s=60.0),
        retries=UpstreamRetries(base_s=0.001, longest_s=1.0),
        health=UpstreamHealthConfig(path=""),
    )
    return msgspec.structs.replace(base, **changes)


@contextlib.asynccontextmanager
async def upstream_of(fake: Fake | str, **changes: Any) -> AsyncGenerator[Upstream]:
    """With nothing of it left at the end."""
    named = {name: changes.pop(name) for name in ("key", "clock", "tokenizer") if name in changes}
    upstream = Upstream("mini@far", config(fake, **changes), chance=lambda: 0.5, **named)
    await upstream.start()
    try:
        yield upstream
        assert upstream.slots.taken == 0
        assert upstream.slots.waiting == 0
    finally:
        await upstream.close()


def served(**changes: Any) -> ServedVariant:
    fields: dict[str, Any] = {
        "name": "mini@far",
        "engine": NoEngine(),
        "tokenizer": tokenizer(),
        "context": 2048,
        "fingerprint": "fp_far",
    }
    return ServedVariant(**(fields | changes))


def exchange(*, tenant: str = "acme", **asked: Any) -> Exchange:
    if "prompts" not in asked:
        asked.setdefault("messages", MESSAGES)
    return Exchange(
        caller=Caller(tenant=tenant), text_request=TextRequest(model="mini", **asked), served=served(), id="ours"
    )


async def answered(upstream: Upstream, **asked: Any) -> list[Choice]:
    """The whole answer."""
    answering = UpstreamGeneration(exchange(**asked), upstream, can_restart=True)
    try:
        await answering.begin()
        return await collect_choices(answering)
    finally:
        answering.settle()


async def pieces_of(upstream: Upstream, into: list[ChoiceDelta] | None = None, **asked: Any) -> list[ChoiceDelta]:
    """The answer as a stream; `into` has what came where it fails."""
    found: list[ChoiceDelta] = [] if into is None else into
    answering = UpstreamGeneration(exchange(stream=True, **asked), upstream)

    def take(piece: ChoiceDelta) -> bool:
        found.append(piece)
        return True

    try:
        await answering.begin()
        assert await answering.run(take)
        return found
    finally:
        answering.settle()


async def relayed(upstream: Upstream, into: list[bytes] | None = None, *, rename: bool = True, **asked: Any) -> bytes:
    found: list[bytes] = [] if into is None else into
    answering = UpstreamGeneration(exchange(stream=True, **asked), upstream)
    own: Any = ChatStream if answering.exchange.text_request.messages is not None else CompletionStream

    def write(data: bytes) -> bool:
        found.append(data)
        return True

    try:
        await answering.begin()
        assert answering.can_relay()
        assert await answering.relay(write, own, rename=rename)
        return b"".join(found)
    finally:
        answering.settle()


def text_of(pieces: Sequence[ChoiceDelta], index: int = 0) -> str:
    return "".join(piece.content for piece in pieces if piece.index == index)


async def soon(work: Awaitable[Any], seconds: float = 20.0) -> Any:
    """A bound for what must not hang."""
    return await asyncio.wait_for(work, seconds)
