"""LocalGateway: the models, collections and pipelines of a configuration in this process, without a socket.

What a program does here takes the same way as a request of a client: limits, budgets, caches, deadlines. The storage
folder belongs to one gateway or server at a time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec

from headrace.config import Config
from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.fleet import Fleet
from headrace.pipelines.collections.collection import SearchMode, SearchOptions
from headrace.pipelines.collections.document_intake import GivenDocument
from headrace.pipelines.collections.document_source import document_files
from headrace.pipelines.collections.hits import Filters, Hit
from headrace.pipelines.collections.records import CollectionStats
from headrace.server.api.pipelines.pipeline_endpoints import pipeline_dialect
from headrace.server.api.pipelines.pipeline_parameters import read_pipeline_request
from headrace.server.api.text_endpoint import answer_in_full, answer_into
from headrace.server.assemble import assemble
from headrace.server.config_checks import load_config
from headrace.server.durable_state import DurableState
from headrace.server.endpoint_context import EndpointContext
from headrace.server.process_settings import prepare_threads

T = TypeVar("T")

_BATCH: Final = 64  # documents added together
_EMBED_S: Final = 600.0  # seconds that `add` waits for embeddings, by default


class PipelineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    finish: str  # stop, length, deadline
    sources: list[dict[str, Any]]  # by number: the first is [1]
    citations: list[dict[str, Any]]  # their places in the text, and the support of each
    followups: list[str]
    usage: dict[str, Any]
    report: dict[str, Any]  # outcome and time of each stage, and `skipped`


class PipelineEvent(msgspec.Struct, frozen=True):
    name: str  # started, progress, sources, text, citation, sentence, followups, done
    data: Any


class LocalGateway:
    """A gateway of this program. Its methods may be called from any thread; they wait for their results.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, config: Path | str | Mapping[str, Any] | None = None, *, key: str | None = None, **settings: Any
    ) -> None:
        """`config`: a headrace.toml, by default the one that a server would read, or its tables as a mapping.
        `key`: the API key that calls are made with, if the configuration has keys. `settings`: keys of the
        configuration that replace it, such as `storage={"folder": "data"}`. ConfigError for mistakes."""
        tables = config if isinstance(config, Mapping) else None
        file = None if config is None or isinstance(config, Mapping) else Path(config)
        self.config: Config = load_config(file, environ=os.environ, flags=settings, tables=tables)
        self._key = key
        prepare_threads()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-gateway", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self.call(self._start())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> LocalGateway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engines and close the storage. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._wait(self._stop())
        finally:
            self._end_loop()

    def collection(self, name: str, **create: Any) -> LocalCollection:
        """Return a collection, which is created if it does not exist: `mode`, `model`, `chunk_tokens`,
        `overlap_tokens`, `recall` and `metadata` say how."""

        async def find() -> None:
            try:
                await self.state.collections.find(self.caller.tenant, name)
            except ApiError as error:
                if error.code != "collection_not_found":
                    raise
                await self.state.collections.create(self.caller, name, **create)

        self.call(find())
        return LocalCollection(self, name)

    def pipeline(self, name: str) -> LocalPipeline:
        """Return a declared pipeline. ApiError if there is none of this name."""

        async def find() -> None:
            pipelines = self.context.services.pipelines
            if pipelines is None:
                raise ApiError("The configuration declares no pipeline.", kind="not_found_error")
            pipelines.find(self.caller, name)

        self.call(find())
        return LocalPipeline(self, name)

    @property
    def caller(self) -> IdentifiedCaller:
        headers = {} if self._key is None else {"x-api-key": self._key}
        return self.context.services.accounts.directory.identify(headers)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the gateway's event loop and return its result."""
        self._check_open(work)
        return self._wait(work)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Callable[[], None]:
        """Begin work on the gateway's event loop. Return a function that cancels it."""
        self._check_open(work)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)

        def cancel() -> None:
            future.cancel()

        return cancel

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            work.close()
            raise RuntimeError("The gateway is closed.")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C ends the work too
            raise

    def _end_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # On the event loop

    async def _start(self) -> None:
        config = self.config
        fleet = Fleet.of(config, early=True)
        try:
            self._database = Database(config.storage.path)
            self.context = EndpointContext(config, assemble(config, fleet, self._database, os.environ))
            self.state = DurableState(self.context, self._database)
            await fleet.start()
            await self.context.services.start()
            await self.state.start()
        except BaseException:
            fleet.abandon()
            raise
        self.context.is_ready = True

    async def _stop(self) -> None:
        self.context.is_draining = True
        await self.state.close()
        await self.context.services.close()
        await self.context.services.fleet.close()
        await self._database.close()


class LocalCollection:
    """Documents to add to and to search. See `/v1/collections` for what the arguments mean."""

    def __init__(self, gateway: LocalGateway, name: str) -> None:
        self._gateway = gateway
        self.name = name

    def add(
        self,
        paths: Sequence[str | Path] = (),
        *,
        texts: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_s: float | None = _EMBED_S,
    ) -> CollectionStats:
        """Add files and folders, and `texts` by the source that hits name. What has not changed costs nothing.

        Waits until all is embedded; TimeoutError after `wait_s`. None: does not wait.
        """
        extra = dict(metadata or {})
        given = [
            GivenDocument(content=file.read_bytes(), source=file.as_posix(), metadata=extra)
            for file in document_files(map(str, paths))
        ]
        given += [GivenDocument(text=text, source=source, metadata=extra) for source, text in (texts or {}).items()]

        async def add() -> CollectionStats:
            collections, caller = self._gateway.state.collections, self._gateway.caller
            for start in range(0, len(given), _BATCH):
                await collections.add(caller, self.name, given[start : start + _BATCH])
            if wait_s is not None and given:
                await asyncio.wait_for(collections.indexer.idle.wait(), wait_s)
            return await self._stats()

        return self._gateway.call(add())

    def search(
        self,
        query: str,
        *,
        k: int = 10,
        filters: Filters | None = None,
        mode: SearchMode = "hybrid",
        deadline_s: float | None = None,
    ) -> list[Hit]:
        """Return the best chunks, best first. Stages that would miss the deadline are left out."""
        options = SearchOptions(k=k, filters=filters, mode=mode, deadline_s=deadline_s)

        async def search() -> list[Hit]:
            opened = await self._gateway.state.collections.open(self._gateway.caller, self.name)
            return (await opened.find(query, options)).hits

        return self._gateway.call(search())

    def stats(self) -> CollectionStats:
        return self._gateway.call(self._stats())

    def delete(self) -> None:
        self._gateway.call(self._gateway.state.collections.delete(self._gateway.caller.tenant, self.name))

    async def _stats(self) -> CollectionStats:
        collections = self._gateway.state.collections
        return await collections.stats(await collections.find(self._gateway.caller.tenant, self.name))


class LocalPipeline:
    """A declared pipeline. The parameters of a run are those of `/v1/pipelines/NAME`."""

    def __init__(self, gateway: LocalGateway, name: str) -> None:
        self._gateway = gateway
        self.name = name

    def run(self, question: str, **parameters: Any) -> PipelineAnswer:
        """Return the whole answer. ApiError if it fails."""
        exchange = self._exchange(question, parameters)
        body = self._gateway.call(self._whole(exchange))
        report: dict[str, Any] = body["headrace"]
        return PipelineAnswer(
            text=body["answer"],
            finish=body["finish_reason"],
            sources=body["sources"],
            citations=body["citations"],
            followups=body["followups"],
            usage=body["usage"],
            report=report.get("pipeline", {}),
        )

    def stream(self, question: str, **parameters: Any) -> Iterator[PipelineEvent]:
        """Yield the events of an answer as they come: sources first, then text. ApiError if it fails. A caller that
        stops early ends the run."""
        exchange = self._exchange(question, {**parameters, "stream": True})
        events: SimpleQueue[PipelineEvent | BaseException | None] = SimpleQueue()

        async def work() -> None:
            try:
                with self._gateway.context.count_running():
                    await answer_into(
                        exchange,
                        pipeline_dialect(self.name),
                        self._gateway.context.services,
                        lambda data: events.put(_event_of(data)) if data else None,
                        watch=lambda cancel: lambda: None,  # a caller that leaves cancels the task
                    )
                events.put(None)
            except BaseException as error:
                events.put(error)

        cancel = self._gateway.submit(work())
        ended = False
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    ended = True
                    raise event
                if event.name != "error":  # raised with its type right behind
                    yield event
            ended = True
        finally:
            if not ended:
                cancel()

    def _exchange(self, question: str, parameters: Mapping[str, Any]) -> Exchange:
        context = self._gateway.context
        body = msgspec.json.encode({"input": question, **parameters})

        async def make() -> Exchange:
            context.admit()
            request = read_pipeline_request(self.name, body, {}, context.config.limits)
            return context.exchange(self._gateway.caller, request, f"/v1/pipelines/{self.name}")

        return self._gateway.call(make())

    async def _whole(self, exchange: Exchange) -> dict[str, Any]:
        with self._gateway.context.count_running():
            return await answer_in_full(exchange, pipeline_dialect(self.name), self._gateway.context.services)


def _event_of(data: bytes) -> PipelineEvent:
    """Read what PipelineEvents writes: one line with the name, one with the data."""
    name, _, value = data.partition(b"\n")
    return PipelineEvent(name.removeprefix(b"event: ").decode(), msgspec.json.decode(value.removeprefix(b"data: ")))
