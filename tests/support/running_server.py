"""A server with an engine that a test controls, and clients that speak raw bytes: for the tests of the network edge."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from headrace.config import Config, LogConfig, ServerConfig, StorageConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.model_folder import BUNDLED, open_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.observe import metrics
from headrace.observe.logs import configure_log
from headrace.server.server import Server

LONG = 300.0  # seconds after which a test has failed; nothing waits so long on purpose
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


Test = Callable[..., Coroutine[Any, Any, None]]


def asynchronous_within(seconds: float) -> Callable[[Test], Callable[..., None]]:
    def decorate(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run_it(*arguments: Any, **named: Any) -> None:
            async def bounded() -> None:
                await asyncio.wait_for(test(*arguments, **named), seconds)

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(bounded())

        return run_it

    return decorate


asynchronous = asynchronous_within(LONG)


async def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


@functools.cache
def tokenizer() -> Tokenizer:
    return open_model(BUNDLED / "mini").tokenizer


class FakeEngine:
    """Streams stay open until the test says something in them; `answer` says it at once."""

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []
        self.dropped: list[OutputStream] = []  # cancelled before their end
        self.answer: Callable[[OutputStream], None] | None = None

    @property
    def open(self) -> list[OutputStream]:
        return [stream for stream in self.streams if not stream.closed]

    def stream(self, request: GenerationRequest) -> OutputStream:
        stream = OutputStream(self, request)
        self.streams.append(stream)
        if self.answer is not None:
            self.answer(stream)
        return stream

    def drop(self, stream: OutputStream) -> None:
        self.dropped.append(stream)

    async def stats(self) -> list[dict[str, Any]]:
        return []


def say(stream: OutputStream, text: str, *, end: bool = False, finish: FinishReason = FinishReason.STOP) -> None:
    """The next output of a stream."""
    usage = SequenceUsage(len(stream.request.prompt), len(stream.tokens[0]) + 1, 0, 0, 0, 0.001, 0.002, 0.003)
    ending = SequenceEnd(finish, usage) if end else None
    stream.push(SequenceOutput("", 0, [1], text, ending=ending))


def words(*texts: str, finish: FinishReason = FinishReason.STOP) -> Callable[[OutputStream], None]:
    def answer(stream: OutputStream) -> None:
        for place, text in enumerate(texts):
            say(stream, text, end=place == len(texts) - 1, finish=finish)

    return answer


def fails(error: Exception, *texts: str) -> Callable[[OutputStream], None]:
    """Says the texts, and then ends with an error."""

    def answer(stream: OutputStream) -> None:
        for text in texts:
            say(stream, text)
        stream.end(error)

    return answer


class FakeFleet(Fleet):
    def __init__(self, engine: FakeEngine) -> None:
        served = ServedVariant(name="mini", engine=engine, tokenizer=tokenizer(), context=2048, fingerprint="fp_1")
        super().__init__({"mini": served}, {}, "mini")
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.closed = False

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        await self.loaded.wait()

    async def close(self) -> None:
        self.closed = True


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        blocks = self.body.decode().split("\n\n")[:-1]
        return [json.loads(block.removeprefix("data: ")) for block in blocks if block != "data: [DONE]"]

    @property
    def text(self) -> str:
        return "".join(
            event["choices"][0]["delta"].get("content") or ""
            for event in self.events
            if "error" not in event and event["choices"]
        )


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Each in a packet of its own, as far as one can tell."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.001)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:-2])
        return int(lines[0].split(" ")[1]), headers

    async def answer(self, *, to_head: bool = False) -> Answer:
        status, headers = await self.head()
        if to_head or status in (100, 204, 304):
            return Answer(status, headers, b"")
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while chunk := await self.chunk():
                body += chunk
        else:
            body = await self.reader.read(-1)
        return Answer(status, headers, body)

    async def chunk(self) -> bytes:
        """Of a chunked body; empty at its end."""
        length = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(length + 2))[:-2]

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        await self.send(request(method, path, body, **headers))
        return await self.answer()

    async def chat(self, **changes: Any) -> Answer:
        return await self.ask("POST", "/v1/chat/completions", CHAT | changes)

    async def ended(self) -> bytes:
        """What still comes until the server closes the connection."""
        try:
            return await self.reader.read(-1)
        except ConnectionResetError:
            return b""

    def leave(self) -> None:
        self.writer.transport.abort()


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines.append(f"content-length: {len(data)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@dataclass
class Running:
    server: Server
    engine: FakeEngine
    fleet: FakeFleet
    task: asyncio.Task[None]
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        port = self.server.listening.getsockname()[1] if self.server.listening.fileno() >= 0 else 0
        client = Client(*await asyncio.open_connection("127.0.0.1", port, limit=1024 * 1024))
        self.clients.append(client)
        return client

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """On a connection of its own."""
        client = await self.client()
        answer = await client.ask(method, path, body, **headers)
        client.leave()
        return answer

    async def streaming(self, **changes: Any) -> tuple[Client, OutputStream]:
        """A client whose answer has begun, and the stream that a test goes on with."""
        client = await self.client()
        before = len(self.engine.streams)
        await client.send(request("POST", "/v1/chat/completions", CHAT | {"stream": True} | changes))
        await until(lambda: len(self.engine.streams) > before)
        say(self.engine.streams[before], "one ")
        assert (await client.head())[0] == 200
        assert b"one " in await client.chunk()
        return client, self.engine.streams[before]

    def idle(self) -> bool:
        return not self.server.context.running and not self.server.edge.tasks and not self.engine.open

    async def settled(self) -> None:
        """Nothing is left of any request."""
        await until(self.idle)


def config_of(folder: Path, **server: Any) -> Config:
    named = {"models", "keys", "limits", "log", "routing"}
    others = {name: server.pop(name) for name in list(server) if name in named}
    storage = server.pop("storage", {})
    return Config(
        server=ServerConfig(port=0, **server),
        storage=StorageConfig(folder=str(folder), **storage),
        **({"log": LogConfig()} | others),
    )


Runs = TypeVar("Runs", bound=Running)


@contextlib.asynccontextmanager
async def living(
    made: Server, running_of: Callable[[asyncio.Task[None]], Runs], *, loaded: bool = True
) -> AsyncIterator[Runs]:
    """Runs a server in this loop and ends it; then nothing of it may be left. `running_of`: by its task."""
    others = asyncio.all_tasks()
    began = asyncio.Event()  # all of its tasks run, so another server's begin and end tells them from its own
    task = asyncio.create_task(made.run(signals=False, ready=lambda _url: began.set()))
    running = running_of(task)
    try:
        await until(lambda: began.is_set() or not loaded or task.done())
        yield running
        if not task.done():
            await running.settled()
    finally:
        for client in running.clients:
            client.leave()
        made.end()
        await task
    await asyncio.sleep(0)
    left = {each for each in asyncio.all_tasks() if each not in others and not each.done()}
    assert not left, left


@contextlib.asynccontextmanager
async def serving(*, loaded: bool = True, config: Config | None = None, **server: Any) -> AsyncIterator[Running]:
    """A server in this loop. At the end, nothing of it may be left."""
    with tempfile.TemporaryDirectory() as folder:
        engine = FakeEngine()
        fleet = FakeFleet(engine)
        if not loaded:
            fleet.loaded.clear()
        made = Server(config or config_of(Path(folder), **server), fleet=fleet)
        async with living(made, lambda task: Running(made, engine, fleet, task), loaded=loaded) as running:
            yield running
        assert not made.edge.connections
        assert fleet.closed


def count(metric: Any, *labels: str) -> float:
    return metric.labels(*labels)._value.get()


def ended(how: str, tenant: str = "-") -> float:
    """Requests for text that have ended so."""
    return count(metrics.answers, "mini", tenant, how)


def main() -> None:
    """A server in a process of its own, for tests with signals.

    Its answers are a word each `pace` seconds; with `held`, the last word waits until the file `finish` is in the
    folder; with `loading`, its models are never there. It prints its URL.
    """
    options = json.loads(sys.argv[1])
    finish = Path(options["folder"]) / "finish"
    engine = FakeEngine()

    async def talk(stream: OutputStream) -> None:
        for number in range(options["words"]):
            await asyncio.sleep(options["pace"])
            while options.get("held") and number == options["words"] - 1 and not finish.exists():
                await asyncio.sleep(0.01)
            if stream.closed:
                return
            say(stream, f"{number} ", end=number == options["words"] - 1)

    talking: set[asyncio.Task[None]] = set()
    engine.answer = lambda stream: talking.add(asyncio.create_task(talk(stream)))

    async def serve() -> None:
        fleet = FakeFleet(engine)
        if options.get("loading"):
            fleet.loaded.clear()
        config = config_of(Path(options["folder"]), **options.get("server", {}))
        configure_log(config.log)
        server = Server(config, fleet=fleet)
        if options.get("stuck"):  # engines that do not end

            async def never() -> None:
                await asyncio.Event().wait()

            fleet.close = never
        print(server.url, flush=True)
        await server.run()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
