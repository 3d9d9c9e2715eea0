"""Pipelines whose models, collections and clock a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from headrace.config.pipeline_section import PipelineConfig
from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_modes import CachePolicy
from headrace.gateway.caches.exact.entry_store import GuardedStore
from headrace.gateway.caches.exact.memory import MemoryStore
from headrace.gateway.caches.results.result_cache import ResultCache
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX
from headrace.gateway.ledger.prices import Price
from headrace.gateway.requests.text_request import (
    ChoiceDelta,
    NoteDelta,
    PipelineOptions,
    TakeDelta,
    TextRequest,
    TokenUsage,
    ToolCallDelta,
)
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.pipelines.collections.hits import Hit, Passages, QueryVector
from headrace.pipelines.pipeline_run import PipelineRun
from headrace.pipelines.pipelines import Pipelines
from headrace.pipelines.stage_clock import StageClock
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.tools.approvals import Approvals
from headrace.pipelines.tools.tool import ToolSource
from headrace.pipelines.tools.toolbox import Toolbox
from headrace.pipelines.warm_passages import WarmPassages
from tests.support.clock import Clock
from tests.support.dialect_exchanges import NoEngine, tokenizer

FOREVER = 1e6  # seconds
QUESTION = "What is the port of the server?"


def served(name: str = "mini") -> ServedVariant:
    return ServedVariant(name=name, engine=NoEngine(), tokenizer=tokenizer(), context=2048, fingerprint="fp_1")


def hit(number: int, text: str, **fields: Any) -> Hit:
    return Hit(text=text, source=f"page-{number}.md", score=1.0 - number / 100, id=f"c{number}", document="d", **fields)


HITS = [
    hit(1, "The server listens on port 8000 by default."),
    hit(2, "Tenants have limits and budgets of their own."),
    hit(3, "The ledger keeps every charge in sqlite."),
]


@dataclass
class Call:
    """What a fake model says: texts, pauses in seconds, errors; and calls of tools, at its end."""

    steps: Sequence[str | float | Exception] = ()
    calls: Sequence[tuple[str, str]] = ()  # tool and JSON arguments
    finish: Any = "stop"
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(prompt_tokens=10, output_tokens=5))
    micros: int | None = None  # its price


Script = Callable[[TextRequest], Call]


def says(*steps: str | float | Exception, **more: Any) -> Script:
    return lambda request: Call(steps, **more)


class FakeFlow:
    """A model call with a script, as an AnswerFlow."""

    def __init__(self, exchange: Exchange, call: Call, clock: Clock) -> None:
        self.exchange = exchange
        self.is_client_gone = False
        self.is_charged = True
        self.settled = 0
        self._call = call
        self._steps = list(call.steps)
        self._clock = clock
        self._ended = False

    async def begin(self) -> None:
        self.exchange.prompt_tokens = self._call.usage.prompt_tokens

    async def run(self, take: TakeDelta) -> bool:
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await self._clock.sleep(step)
            else:
                self.exchange.first_at = self.exchange.first_at or 1.0
                if not take(ChoiceDelta(0, content=step, tokens=1)):
                    return False
        if not self._ended:
            self._ended = True
            self.exchange.usage = self._call.usage
            self.exchange.finish = self._call.finish
            calls = [ToolCallDelta(n, f"call_{n}", name, given) for n, (name, given) in enumerate(self._call.calls)]
            finish = "tool_calls" if calls else self._call.finish
            if not take(ChoiceDelta(0, calls=calls, finish=finish, usage=self._call.usage)):
                return False
        return True

    def relayed(self) -> None:
        return None

    def headers(self) -> dict[str, str]:
        return {}

    def cancel(self) -> None:
        self.is_client_gone = True

    def settle(self, error: ApiError | None = None) -> None:
        self.settled += 1
        self.exchange.cost_micros = self._call.micros


class FakeModels:
    def __init__(self, clock: Clock, script: Script, **scripts: Script) -> None:
        """`scripts`: of particular models, by name."""
        self.requests: list[TextRequest] = []
        self.flows: list[FakeFlow] = []
        self.ranked: list[list[str]] = []
        self.fingerprint = "fp_1"  # of every model
        self.rank_s = 0.0
        self.prices: dict[str, Price] = {}
        self.owners: set[tuple[str, str, tuple[int, ...]]] = set()  # of prefixes: owner, tenant and tokens
        self.keeping: Exception | None = None  # why they keep none
        self._clock = clock
        self._script = script
        self._scripts = scripts

    def find(self, caller: Caller, name: str) -> ServedVariant:
        if name == "missing":
            raise ApiError("Unknown model 'missing'.", kind="not_found_error")
        return replace(served(name), fingerprint=self.fingerprint)

    def open(self, whole: Exchange, request: TextRequest, *, shares_timeline: bool = False) -> FakeFlow:
        self.requests.append(request)
        call = self._scripts.get(request.model, self._script)(request)
        exchange = Exchange(caller=whole.caller, text_request=request, served=served(request.model))
        self.flows.append(FakeFlow(exchange, call, self._clock))
        return self.flows[-1]

    async def rank(self, whole: Exchange, name: str, query: str, texts: Sequence[str], surface: str) -> list[float]:
        self.ranked.append(list(texts))
        if self.rank_s:
            await self._clock.sleep(self.rank_s)
        return [1.0 / len(text) for text in texts]

    async def shared_tokens(self, caller: Caller, requests: Sequence[TextRequest]) -> tuple[int, ...]:
        """The beginning of a prompt: its system message and its sources, a token for each character."""
        first = requests[0]
        system = "".join(str(each["content"]) for each in first.messages or [] if each["role"] == "system")
        return tuple(map(ord, system + "".join(source.text for source in first.sources)))

    async def keep_prefix(self, caller: Caller, name: str, tokens: Sequence[int], *, keep: bool, owner: str) -> None:
        if self.keeping is not None:
            raise self.keeping
        (self.owners.add if keep else self.owners.remove)((owner, caller.tenant, tuple(tokens)))

    @property
    def prefixes(self) -> set[tuple[str, tuple[int, ...]]]:
        """The prefixes that engines keep: tenant and tokens."""
        return {(tenant, tokens) for _, tenant, tokens in self.owners}

    def token_counter(self, caller: Caller, name: str) -> Callable[[str], int]:
        return lambda text: len(text.split())

    def price(self, name: str) -> Price:
        return self.prices.get(name, Price())


class FakeCollection:
    def __init__(self, clock: Clock, hits: Sequence[Hit] = HITS) -> None:
        self.hits = list(hits)
        self.searches: list[dict[str, Any]] = []
        self.search_s = 0.0
        self.skipped: dict[str, str] = {}
        self.error: Exception | None = None
        self.uid = "collection-1"
        self.gone: set[str] = set()  # passages whose documents have changed or are gone
        self.is_stuck = False  # its database does not answer
        self._clock = clock

    async def has_all(self, ids: Collection[str]) -> bool:
        if self.is_stuck:
            await asyncio.Event().wait()
        return self.gone.isdisjoint(ids)

    async def open(self, caller: Caller, name: str) -> FakeCollection:
        if name != "docs":
            raise ApiError(f"Unknown collection '{name}'.", kind="not_found_error", code="collection_not_found")
        return self

    async def embed_query(self, query: str, caller: Caller) -> QueryVector:
        return QueryVector("encoder", (0.0, 1.0))

    async def search(self, query: str, **given: Any) -> Passages:
        self.searches.append({"query": query, **given})
        if self.search_s:
            await self._clock.sleep(self.search_s)
        if self.error is not None:
            raise self.error
        return Passages(hits=self.hits, skipped=self.skipped)


def memory_results(clock: Clock, **modes: Any) -> ResultCache:
    """A cache of results on the test's clock."""
    store = GuardedStore(MemoryStore(most_bytes=1_000_000, clock=clock), get_s=None)
    return ResultCache(store, CachePolicy(**modes), clock=clock)


class World:
    """One pipeline named docs."""

    def __init__(
        self,
        config: PipelineConfig,
        script: Script | None = None,
        *,
        tools: dict[str, ToolSource] | None = None,
        **scripts: Script,
    ) -> None:
        self.clock = Clock(1000.0)
        self.models = FakeModels(self.clock, script or says("Port ", "8000 ", "[1]."), **scripts)
        self.collection = FakeCollection(self.clock)
        self.background: list[asyncio.Task[Any]] = []
        clock = StageClock(self.clock, self.clock.sleep)
        self.results = memory_results(self.clock)
        self.services = StageServices(
            models=self.models,
            toolbox=Toolbox(tools or {}, self.results, clock, Approvals(b"key", self.clock)),
            retriever=self.collection,
            results=self.results,
            warm=WarmPassages(self.models, self.clock, self._run_background),
            clock=clock,
            shaping=ShapingConfig(),
            run_background=self._run_background,
        )
        self.pipelines = Pipelines({"docs": config}, self.services, "mini")

    def _run_background(self, work: Coroutine[Any, Any, Any]) -> None:
        self.background.append(asyncio.ensure_future(work))

    def open(
        self, text: str = QUESTION, *, name: str = "docs", caller: Caller | None = None, **request: Any
    ) -> PipelineRun:
        options = PipelineOptions(**request.pop("pipeline", {}))
        asked = TextRequest(
            model=f"{PIPELINE_PREFIX}{name}",
            messages=request.pop("messages", [{"role": "user", "content": text}]),
            pipeline=options,
            **request,
        )
        caller = Caller() if caller is None else caller
        exchange = Exchange(
            caller=caller, text_request=asked, served=self.pipelines.find(caller, name), arrival=self.clock.now
        )
        return self.pipelines.open(exchange)

    async def run(self, text: str = QUESTION, **request: Any) -> Outcome:
        return await self.clock.run(self.finish(self.open(text, **request)))

    async def finish(self, run: PipelineRun) -> Outcome:
        deltas: list[ChoiceDelta] = []
        began = self.clock.now
        error: ApiError | None = None
        try:
            await run.begin()

            def take(delta: ChoiceDelta) -> bool:
                deltas.append(delta)
                return len(deltas) % 2 == 0  # a slow client

            while not await run.run(take):
                pass
        except ApiError as caught:
            error = caught
        finally:
            run.settle(error)
        return Outcome(run, deltas, self.clock.now - began, error)


@dataclass
class Outcome:
    run: PipelineRun
    deltas: list[ChoiceDelta]
    seconds: float
    error: ApiError | None

    @property
    def text(self) -> str:
        return "".join(delta.content for delta in self.deltas)

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish if self.deltas else None

    def notes(self, event: str) -> list[Any]:
        return [each.data for each in self.deltas if isinstance(each, NoteDelta) and each.event == event]

    @property
    def order(self) -> list[str]:
        """What came, without repeats in a row."""
        names: list[str] = []
        for delta in self.deltas:
            name = delta.event if isinstance(delta, NoteDelta) else "finish" if delta.finish else "text"
            if not names or names[-1] != name:
                names.append(name)
        return names

    @property
    def report(self) -> dict[str, Any]:
        return self.run.exchange.notes["pipeline"]

    def stage(self, name: str) -> dict[str, Any]:
        return next(each for each in self.report["stages"] if each["stage"] == name)
