"""A server with tenants, limits and prices, whose variants' engines a test controls, and clients that count.

The clock of its limits is set by hand, so that what is refused, let in or made to wait does not hang on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import Config, KeyConfig, LogConfig, ServerConfig, StorageConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.limits.local_limits import LocalLimitStore
from headrace.gateway.limits.rate_limiter import RateLimiter
from headrace.gateway.limits.request_charges import RequestCharges
from headrace.server.server import Server
from tests.support.clock import Clock
from tests.support.running_server import (
    CHAT,
    Answer,
    Client,
    FakeEngine,
    FakeFleet,
    Running,
    living,
    request,
    tokenizer,
)

ADMIN = KeyConfig(name="root", key="key-of-root", tenant="operator", admin="read")
PATH = "/v1/chat/completions"


@functools.cache
def prompt_tokens() -> int:
    """Of edging's CHAT."""
    return len(tokenizer().encode(tokenizer().apply_template(CHAT["messages"]), False))


def key(name: str, tenant: str = "acme", **options: Any) -> KeyConfig:
    return KeyConfig(name=name, key=f"key-of-{name}", tenant=tenant, **options)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


@dataclass
class Serving(Running):
    clock: Clock = field(default_factory=Clock)
    engines: dict[str, FakeEngine] = field(default_factory=dict[str, FakeEngine])
    talks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def ledger(self) -> Any:
        return self.server.services.ledger

    def says(self, count: int, variant: str = "mini", *, at_once: int = 1) -> None:
        """Every choice of a variant's answers is of so many tokens, which come in turns of the event loop."""

        self.engines[variant].answer = lambda stream: self.talk(stream, count, at_once=at_once)

    def talk(self, stream: OutputStream, tokens: int, *, at_once: int = 1) -> None:
        talk = asyncio.create_task(_talk(stream, tokens, at_once))
        self.talks.add(talk)
        talk.add_done_callback(self.talks.discard)

    async def chat_as(self, name: str, **changes: Any) -> Answer:
        return await self.ask("POST", PATH, CHAT | changes, **bearer(name))

    async def begin(self, name: str, **changes: Any) -> Counted:
        """A stream whose head has come."""
        client = await self.client()
        await client.send(request("POST", PATH, CHAT | {"stream": True, **USAGE} | changes, **bearer(name)))
        status, headers = await client.head()
        return Counted(client, status, headers)

    async def counted(self, name: str, **changes: Any) -> Counted:
        """A stream, read to its end."""
        found = await self.begin(name, **changes)
        await found.rest()
        found.client.leave()
        return found

    async def usage(self, by: str = "tenant") -> list[dict[str, Any]]:
        answer = await self.ask("GET", f"/admin/v1/usage?format=json&by={by}", **bearer("root"))
        assert answer.status == 200, answer.body
        return answer.json["rows"]

    def idle(self) -> bool:
        return super().idle() and not any(engine.open for engine in self.engines.values())


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@dataclass
class Counted:
    """One stream, as its client sees it."""

    client: Client
    status: int
    headers: dict[str, str]
    body: bytes = b""

    async def more(self) -> bytes:
        """The next chunk; nothing at the end."""
        chunk = await self.client.chunk()
        self.body += chunk
        return chunk

    async def rest(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            while await self.more():
                pass
        else:
            self.body += await self.client.reader.readexactly(int(self.headers["content-length"]))

    @property
    def answer(self) -> Answer:
        return Answer(self.status, self.headers, self.body)

    @property
    def tokens(self) -> int:
        """Those that were seen: each has a text of its own."""
        return self.body.count(b'"content":"w"')

    @property
    def finish(self) -> str | None:
        found = [choice["finish_reason"] for event in self.answer.events for choice in event["choices"]]
        return next((each for each in found if each), None)

    @property
    def last(self) -> dict[str, Any]:
        """With the usage."""
        return self.answer.events[-1]


async def _talk(stream: OutputStream, tokens: int, at_once: int) -> None:
    for number in range(tokens):
        if number % at_once == 0:
            await asyncio.sleep(0)
        for index in range(stream.request.n):
            if not stream.closed:
                token(stream, index, end=number == tokens - 1)


def token(stream: OutputStream, index: int = 0, *, end: bool = False) -> None:
    """The next one of a choice."""
    usage = SequenceUsage(len(stream.request.prompt), len(stream.tokens[index]) + 1, 0, 0, 0, 0.001, 0.002, 0.003)
    stream.push(SequenceOutput("", index, [1], "w", ending=SequenceEnd(FinishReason.STOP, usage) if end else None))


@contextlib.asynccontextmanager
async def served(
    folder: Path, *variants: str, prepare: Callable[[Server], None] = lambda server: None, **sections: Any
) -> AsyncGenerator[Serving]:
    """`variants`: that there are beside mini. `prepare`: is given the server before it starts."""
    engines = {name: FakeEngine() for name in ("mini", *variants)}
    fleet = FakeFleet(engines["mini"])
    for name, engine in engines.items():
        fleet.served[name] = msgspec.structs.replace(fleet.served["mini"], name=name, engine=engine, fingerprint=name)
    sections["keys"] = (*sections.get("keys", ()), ADMIN)
    config = Config(
        server=ServerConfig(port=0),
        log=LogConfig(requests=False),
        storage=StorageConfig(folder=str(folder)),
        **sections,
    )
    clock = Clock()
    server = Server(config, fleet=fleet)
    if config.limiting.redis_env is None:
        services = server.services
        services.limiter = RateLimiter(
            local=LocalLimitStore(clock=clock), clock=clock, sleep=clock.sleep, note=services.limiter.note
        )
        server.context.charges = RequestCharges(services.limiter, clock=clock)
    prepare(server)
    async with living(
        server, lambda task: Serving(server, engines["mini"], fleet, task, clock=clock, engines=engines)
    ) as running:
        yield running
