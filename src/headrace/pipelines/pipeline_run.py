"""PipelineRun: one request through the stages of a pipeline, as an AnswerFlow for any dialect.

Each stage gets the deadline minus what later stages need. The configuration says what happens to a stage that is late
or fails: it is skipped, or uses what is ready or an earlier result, or ends the pipeline. The answer says which. Model
calls go through the gateway's flow, one each, which reserves and settles them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec
import structlog

from headrace.config.pipeline_section import PipelineConfig, StageName
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.caches.results.result_cache import ResultLookup
from headrace.gateway.requests.text_request import ChoiceDelta, NoteDelta, TakeDelta
from headrace.gateway.routing.composite_answerer import sum_usage
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.observe import metrics
from headrace.pipelines.answer_cache import RunAnswerCache, StoredPipelineAnswer
from headrace.pipelines.answer_delivery import AnswerDelivery
from headrace.pipelines.budget_plan import StageNeed, fitted, stage_end
from headrace.pipelines.followups import suggest_followups
from headrace.pipelines.kept_passages import are_passages_kept, collection_uid
from headrace.pipelines.prefetch import Prefetcher
from headrace.pipelines.run_state import STALE_S, RunState, StageReport
from headrace.pipelines.stage_clock import ClientGoneError, StageLateError
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.assemble import Assemble, as_source
from headrace.pipelines.stages.check import Check
from headrace.pipelines.stages.embed import Embed
from headrace.pipelines.stages.generate import generate, may_stand_in, rescue
from headrace.pipelines.stages.rerank import Rerank
from headrace.pipelines.stages.search import Search
from headrace.pipelines.stages.stage import PipelineStage
from headrace.pipelines.stages.tools import offered_tools, run_tools
from headrace.pipelines.tools.tool import ToolSpec

log: Final = structlog.stdlib.get_logger("headrace.pipelines")

_STAGES: Final[Mapping[str, PipelineStage]] = {
    "embed": Embed(),
    "search": Search(),
    "rerank": Rerank(),
    "assemble": Assemble(),
    "check": Check(),
}


class PipelineRun:
    """All of it belongs to one event loop."""

    def __init__(
        self, state: RunState, services: StageServices, prefetcher: Prefetcher, *, ended: Callable[[PipelineRun], None]
    ) -> None:
        """`ended` is called once, when the run is settled."""
        self.exchange: Exchange = state.exchange
        self.state = state
        self._services = services
        self._answers = RunAnswerCache(services, state)
        self._prefetcher = prefetcher
        self._on_ended = ended
        self._needs = fitted(stage_needs(state.config), state.deadline - state.began)
        self._deltas: AsyncGenerator[ChoiceDelta] | None = None
        self._held: deque[ChoiceDelta] = deque()
        self._is_complete = False
        self._is_interrupted = False
        self._is_settled = False

    @property
    def is_client_gone(self) -> bool:
        return self.state.gone.is_set() and not self._is_interrupted

    @property
    def is_charged(self) -> bool:
        return self.state.is_charged

    def relayed(self) -> UpstreamGeneration | None:
        """Return None: a pipeline looks at every delta."""
        return None

    def headers(self) -> dict[str, str]:
        headers = {**self.exchange.headers, "x-headrace-run": self.exchange.id}
        if skipped := self.state.skipped:
            headers["x-headrace-skipped"] = ", ".join(skipped)
        return headers

    def cancel(self) -> None:
        """Note that the client has left."""
        self.state.gone.set()

    def interrupt(self) -> None:
        """End the answer here, with what was delivered: the user speaks."""
        if not self._is_complete:
            self._is_interrupted = True
            self.state.gone.set()

    async def begin(self) -> None:
        """Prepare the run. Nothing has been computed yet."""
        self._deltas = self._produce()

    async def run(self, take: TakeDelta) -> bool:
        """Deliver deltas as they come. Return False where `take` asked for a pause: call this again then."""
        assert self._deltas is not None
        while True:
            while self._held:
                if not take(self._held.popleft()):
                    return False
            if self._is_complete:
                return True
            try:
                self._held.append(await anext(self._deltas))
            except StopAsyncIteration:
                self._is_complete = True
            except ClientGoneError:
                self._is_complete = True
                if self._is_interrupted:
                    self._held.extend(self._interrupted())

    def settle(self, error: ApiError | None = None) -> None:
        """Call at the end, however the run ended. Has an effect only once."""
        if self._is_settled:
            return
        self._is_settled = True
        state = self.state
        for flow in list(state.open_flows):  # the client left while a delta waited for it
            flow.cancel()
            flow.settle(error)
        if self._deltas is not None and not self._is_complete:
            state.gone.set()
            self._services.run_background(self._deltas.aclose())
        self._sum_up()
        for report in state.reports:
            metrics.of(metrics.pipeline_stages, state.name, report.stage, report.outcome).inc()
        self._on_ended(self)

    def _sum_up(self) -> None:
        """Complete the exchange for the log, traces and the answer's usage."""
        exchange, answer = self.exchange, self.state.answer_exchange
        exchange.usage = sum_usage(self.state.usages)
        exchange.finish = self.state.finish
        exchange.surface = self.state.surface
        exchange.route = "pipeline"
        exchange.prompt_tokens = exchange.usage.prompt_tokens
        if answer is not None:
            exchange.first_at, exchange.last_at, exchange.gaps = answer.first_at, answer.last_at, answer.gaps
            exchange.answered_by, exchange.headers = answer.answered_by, answer.headers
            exchange.usage.queue_s, exchange.usage.prefill_s = answer.usage.queue_s, answer.usage.prefill_s
            for name in ("degraded", "restart", "cache"):
                if name in answer.notes:
                    exchange.notes[name] = answer.notes[name]
        exchange.log_fields["pipeline"] = self.state.name
        if skipped := self.state.skipped:
            exchange.log_fields["skipped"] = ",".join(skipped)

    def _interrupted(self) -> list[ChoiceDelta]:
        self.state.finish = "stop"
        return [
            NoteDelta(0, event="interrupted", data={"sentences": len(self.state.sentences)}),
            self._last_delta(),
        ]

    def _last_delta(self) -> ChoiceDelta:
        self._sum_up()
        state = self.state
        if state.source_entries:
            self.exchange.notes["sources"] = state.source_entries
        if state.citations is not None:
            least = state.config.check.least_support
            self.exchange.notes["citations"] = [each.described(least) for each in state.citations.citations]
        if state.is_extracted:
            self.exchange.notes["extracted"] = True
        if state.is_unanswered:
            self.exchange.notes["unanswered"] = True
        if state.followups:
            self.exchange.notes["followups"] = state.followups
        self.exchange.notes["pipeline"] = state.report(self._services.clock.now())
        return ChoiceDelta(0, finish=state.finish, usage=self.exchange.usage)

    # Stages

    async def _produce(self) -> AsyncGenerator[ChoiceDelta]:
        state, services = self.state, self._services
        if (stored := await self._answers.find()) is not None:
            async for delta in self._replay(stored):
                yield delta
            return
        delivery: AnswerDelivery | None = None
        shown = False
        for place, name in enumerate(state.config.stages):
            end = stage_end(self._needs, place, services.clock.now(), state.deadline)
            yield NoteDelta(0, event="progress", data={"stage": name, "left_ms": self._left_ms()})
            if name == "generate":
                if state.hits and not state.sources:  # there is no assemble stage, or it failed
                    state.show_sources([as_source(hit) for hit in state.hits])
                if state.sources and not shown:
                    shown = True
                    yield NoteDelta(0, event="sources", data=state.source_entries)
                delivery = AnswerDelivery(state)
                async with aclosing(self._generate(delivery, end)) as deltas:
                    async for delta in deltas:
                        yield delta
            elif name == "tools":
                async with aclosing(self._use_tools(end)) as deltas:
                    async for delta in deltas:
                        yield delta
            else:
                await self._run_stage(name, _STAGES[name], end)
            if name == "assemble" and state.sources and "tools" not in state.config.stages:
                shown = True  # the tools' results would change the numbers
                yield NoteDelta(0, event="sources", data=state.source_entries)
        if state.broken is not None:
            raise state.broken
        if state.config.followups and state.text and state.finish != "deadline":
            state.exchange.timeline.enter("followups")
            state.followups = await suggest_followups(services, state)
            if state.followups:
                yield NoteDelta(0, event="followups", data=state.followups)
        await self._answers.store()
        self._prefetcher.prefetch(state)
        yield self._last_delta()

    async def _replay(self, stored: StoredPipelineAnswer) -> AsyncGenerator[ChoiceDelta]:
        """Deliver an earlier answer to the same question."""
        state = self.state
        state.answered_by = "cache"
        state.exchange.timeline.enter("recall")
        state.exchange.answered_by = "pipeline"
        state.source_entries = stored.sources
        if stored.sources:
            yield NoteDelta(0, event="sources", data=stored.sources)
        delivery = AnswerDelivery(state)
        for delta in delivery.take(ChoiceDelta(0, content=stored.text)):
            yield delta
        for delta in delivery.finish():
            yield delta
        if stored.citations:
            state.exchange.notes["citations"] = stored.citations
        state.followups = stored.followups
        if stored.followups:
            yield NoteDelta(0, event="followups", data=stored.followups)
        yield self._last_delta()

    async def _run_stage(self, name: StageName, stage: PipelineStage, end: float) -> None:
        """Run a stage that ends with one result. ApiError if it must not be passed over."""
        services, state = self._services, self.state
        config = getattr(state.config, name)
        began = services.clock.now()
        state.exchange.timeline.enter(name)

        def report(outcome: str, why: str = "", details: Mapping[str, Any] | None = None) -> None:
            ms = (services.clock.now() - began) * 1e3
            state.reports.append(StageReport(name, outcome, ms, (end - began) * 1e3, why, details or {}))

        if stage.missing_input(state):
            report("skipped", "no_input")
            return
        if name == "search" and (found := await self._prefetcher.find(state)) is not None:
            report("done", details={**stage.apply(state, found), "cache": "prefetch"})
            return
        lookup = await self._look(name, stage, config)
        if lookup.data is not None and await self._may_show(name, known := msgspec.json.decode(lookup.data)):
            report("done", details={**stage.apply(state, known), "cache": "hit"})
            return
        why, error = "late", None
        try:
            result = await services.clock.within(stage.compute(services, state, end), end, state.gone)
            details = stage.apply(state, result)
        except StageLateError:
            pass
        except ClientGoneError:
            raise
        except Exception as caught:
            error = as_api_error(caught)
            why = error.code or "error"
            if error.status >= 500 and not isinstance(caught, ApiError):
                log.error("a pipeline's stage failed", pipeline=state.name, stage=name, exc_info=caught)
        else:
            parts: Mapping[str, str] = details.get("skipped", {})
            if lookup.key is not None and not parts:
                cache_s: float = config.cache_s
                kept_s = max(cache_s, STALE_S) if config.late == "cached" else cache_s
                await services.results.keep(lookup, msgspec.json.encode(result), ttl_s=kept_s)
            report("fewer" if parts else "done", next(iter(parts.values()), ""), details)
            return
        if config.late == "stop":
            report("stopped", why)
            raise error or late_error(state, name)
        if config.late == "cached" and lookup.old is not None:
            old = msgspec.json.decode(lookup.old)
            if await self._may_show(name, old):
                report("cached", why, stage.apply(state, old))
                return
        if config.late == "fewer" and (partial := stage.use_partial(state)) is not None:
            report("fewer", why, partial)
            return
        report("skipped", why)

    async def _may_show(self, name: StageName, result: Any) -> bool:
        """False if an earlier result of a search has a passage whose document has changed or is gone."""
        ids = (hit["id"] for hit in result["hits"]) if name == "search" else ()
        return await are_passages_kept(self._services, self.state, ids)

    async def _look(self, name: StageName, stage: PipelineStage, config: Any) -> ResultLookup:
        """Look for an earlier result of a stage, if it keeps any."""
        state = self.state
        cache_s: float = getattr(config, "cache_s", 0.0)
        if cache_s <= 0 and config.late != "cached":
            return ResultLookup()
        parts = stage.cache_parts(self._services, state)
        if parts is None or (uid := await collection_uid(self._services, state)) is None:
            return ResultLookup()
        return await self._services.results.look(
            "stage",
            self.exchange.caller.tenant,
            [state.name, name, uid, *parts],
            tags=state.config.tags,
            requested=self.exchange.text_request.cache,
            declared=True,
            fresh_s=cache_s,
        )

    async def _use_tools(self, end: float) -> AsyncGenerator[ChoiceDelta]:
        """Run the tools' loop. ApiError if it must not be passed over and a budget ended it."""
        services, state = self._services, self.state
        began = services.clock.now()
        state.exchange.timeline.enter("tools")
        outcome, why, specs = "skipped", "not_allowed", list[ToolSpec]()
        try:
            specs = await services.clock.within(offered_tools(services, state, end), end, state.gone)
        except StageLateError:
            why = "late"
        if specs:
            async with aclosing(run_tools(services, state, specs, end)) as deltas:
                async for delta in deltas:
                    yield delta
            outcome, why = ("done", "") if state.conclusion == "answered" else ("fewer", state.conclusion)
        late = state.config.tools.late
        stopped = late == "stop" and outcome != "done"
        if late == "skip" and outcome == "fewer":
            outcome, state.draft = "skipped", ""
            state.show_sources([each for each in state.sources if not each.id.startswith("tool:")])
        ms, budget_ms = (services.clock.now() - began) * 1e3, (end - began) * 1e3
        state.reports.append(StageReport("tools", "stopped" if stopped else outcome, ms, budget_ms, why))
        if stopped:
            raise late_error(state, "tools")

    async def _generate(self, delivery: AnswerDelivery, end: float) -> AsyncGenerator[ChoiceDelta]:
        """Deliver the answer, or what is known where no model can give one in time."""
        services, state = self._services, self.state
        config = state.config.generate
        began = services.clock.now()
        first_s: float | None = None
        why, error = "", None
        try:
            async with aclosing(generate(services, state, end)) as deltas:
                async for delta in deltas:
                    if first_s is None and delta.content:
                        first_s = services.clock.now() - began
                    for each in delivery.take(delta):
                        yield each
        except StageLateError:
            why = "late"
        except ClientGoneError:
            raise
        except ApiError as caught:
            if caught.status < 500 and caught.kind != "overloaded_error":
                raise  # the request is at fault: no other answer would be right
            why, error = caught.code or "error", caught
        model = state.answer_exchange
        if first_s is not None and model is not None and not model.answered_by:  # a model has read the prompt
            services.warm.note(state, first_s)
        outcome = "fewer" if why or state.finish == "deadline" else "done"
        why = why or ("late" if state.finish == "deadline" else "")
        ms, budget_ms = (services.clock.now() - began) * 1e3, (end - began) * 1e3
        if why and not state.text:
            text, says = None, config.late != "stop" and may_stand_in(state)
            if config.late == "cached" and (old := await self._answers.find(stale=True)) is not None:
                outcome, text = "cached", old.text
            elif says:
                text = rescue(state)
            state.finish = "stop"
            if text is None and says and config.no_answer and why in ("late", "overloaded"):
                text, state.finish, state.is_unanswered = config.no_answer, "deadline", True
            if text is None:
                state.reports.append(StageReport("generate", "stopped", ms, budget_ms, why))
                raise error or late_error(state, "generate")
            for each in delivery.take(ChoiceDelta(0, content=text)):
                yield each
        for each in delivery.finish():
            yield each
        details = {} if first_s is None else {"first_text_ms": round(first_s * 1e3, 3)}
        state.reports.append(StageReport("generate", outcome, ms, budget_ms, why, details))

    def _left_ms(self) -> float:
        return round((self.state.deadline - self._services.clock.now()) * 1e3, 3)


def stage_needs(config: PipelineConfig) -> list[StageNeed]:
    return [
        StageNeed(
            name,
            None if (budget := getattr(config, name).budget_ms) is None else budget / 1e3,
            takes_rest=name == "generate",
            yields=name == "generate" and config.generate.late != "stop",
            waits=name not in ("assemble", "check"),
        )
        for name in config.stages
    ]


def late_error(state: RunState, stage: str) -> ApiError:
    return ApiError(
        f"The stage '{stage}' of the pipeline '{state.name}' did not end within its budget.",
        kind="overloaded_error",
        code="stage_late",
        status=504,
    )
