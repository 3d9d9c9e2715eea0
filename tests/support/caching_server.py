"""A server with caches of answers, engines that a test controls, and what its metrics have counted since it began."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from headrace.config import Config, KeyConfig, ModelConfig, ServerConfig, StorageConfig
from headrace.config.cache_section import CacheConfig, ExactConfig, SemanticConfig
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.observe import metrics
from headrace.server.server import Server
from tests.support.running_server import Answer, FakeEngine, FakeFleet, Running, living, request, say, until

RED = {"authorization": "Bearer red-secret"}
BLUE = {"authorization": "Bearer blue-secret"}
BOSS = {"authorization": "Bearer boss-secret"}
KEYS = (
    KeyConfig(name="red", key="red-secret"),
    KeyConfig(name="blue", key="blue-secret"),
    KeyConfig(name="boss", key="boss-secret", admin="write"),
)
PATH = "/v1/chat/completions"


def question(text: str = "Hello", **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **changes}


@dataclass
class Caching(Running):
    """What runs, and how it is asked."""

    before: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=lambda: _samples())

    def counted(self, metric: str, *labels: str) -> float:
        """Since the server began. The labels' values, in the order of their names."""
        return _samples().get((metric, labels), 0.0) - self.before.get((metric, labels), 0.0)

    def exact(self, outcome: str) -> float:
        return self.counted("headrace_cache_total", "exact", outcome)

    def semantic(self, table: str, name: str) -> float:
        return self.counted("headrace_semantic_cache_total", name, table)

    async def chat(self, text: str = "Hello", /, *, key: Mapping[str, str] | None = None, **changes: Any) -> Answer:
        """On a connection of its own; returns when all that follows from it is done."""
        answer = await self.ask("POST", PATH, question(text, **changes), **(key or {}))
        await self.quiet()
        return answer

    async def quiet(self) -> None:
        """Nothing generates, and what was to be kept is kept."""
        services = self.server.services
        await until(
            lambda: not (services.exact is not None and services.exact.flights) and not services.background._tasks
        )

    async def begun(self, text: str = "Hello", /, *, key: Mapping[str, str] | None = None, **changes: Any) -> Any:
        """A client whose streamed request is under way, and the engine's new stream; None where the request joined
        another's generation."""
        client = await self.client()
        before, joined = len(self.engine.streams), self.exact("joined")
        await client.send(request("POST", PATH, question(text, stream=True, **changes), **(key or {})))
        await until(lambda: len(self.engine.streams) > before or self.exact("joined") > joined)
        return client, self.engine.streams[before] if len(self.engine.streams) > before else None

    async def usage(self, **filters: str) -> list[dict[str, Any]]:
        query = "&".join(f"{name}={value}" for name, value in {"by": "tenant", "format": "json", **filters}.items())
        answer = await self.ask("GET", f"/admin/v1/usage?{query}", **BOSS)
        assert answer.status == 200, answer.body
        return [row for row in answer.json["rows"]]


def _samples() -> dict[tuple[str, tuple[str, ...]], float]:
    found: list[Sample] = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {(each.name, tuple(each.labels[name] for name in sorted(each.labels))): each.value for each in found}


def heard(chunks: bytes) -> str:
    """The text of server-sent events of a chat."""
    return Answer(200, {}, chunks).text


async def told(client: Any) -> bytes:
    """The next chunk of a stream."""
    return await asyncio.wait_for(client.chunk(), 20.0)


async def rest(client: Any) -> bytes:
    """All chunks that are still to come."""
    found = b""
    while chunk := await told(client):
        found += chunk
    return found


class ManyFleet(FakeFleet):
    """The bundled tokenizer's `mini` with an engine of the test's, and other variants."""

    def __init__(self, engine: FakeEngine, others: Mapping[str, ServedVariant]) -> None:
        super().__init__(engine)
        Fleet.__init__(self, {**self.served, **others}, {}, "mini")


@contextlib.asynccontextmanager
async def caching(
    folder: Path,
    *,
    exact: ExactConfig | None = None,
    semantic: SemanticConfig | None = None,
    others: Mapping[str, ServedVariant] | None = None,
    **sections: Any,
) -> AsyncGenerator[Caching]:
    """At the end nothing of it is left. The exact cache is on unless `exact` says otherwise."""
    config = Config(
        server=ServerConfig(port=0),
        storage=StorageConfig(folder=str(folder)),
        models=sections.pop("models", {"mini": ModelConfig()}),
        keys=sections.pop("keys", KEYS),
        cache=CacheConfig(exact=exact or ExactConfig(mode="on"), semantic=semantic or SemanticConfig()),
        **sections,
    )
    engine = FakeEngine()
    fleet = ManyFleet(engine, others or {})
    made = Server(config, fleet=fleet)
    async with living(made, lambda task: Caching(made, engine, fleet, task)) as running:
        yield running


def finish(stream: OutputStream, text: str = "") -> None:
    say(stream, text, end=True)
