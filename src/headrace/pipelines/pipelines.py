"""Pipelines: the declared pipelines, what they share, and their runs in progress."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from headrace.config import Config
from headrace.config.pipeline_section import PipelineConfig
from headrace.gateway.accounts.access import choose_surface
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX
from headrace.gateway.flow.services import Services
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.pipelines.budget_plan import fitted, plan
from headrace.pipelines.model_access import ModelAccess
from headrace.pipelines.pipeline_run import PipelineRun, stage_needs
from headrace.pipelines.prefetch import Prefetcher
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import StageClock
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.tools.tool_sources import tool_sources
from headrace.pipelines.tools.toolbox import Toolbox
from headrace.pipelines.warm_passages import WarmPassages


class Pipelines:
    """A PipelineHost. All of it belongs to one event loop."""

    def __init__(self, configs: Mapping[str, PipelineConfig], services: StageServices, default_model: str) -> None:
        self._configs = dict(configs)
        self.services = services
        self._default_model = default_model
        self._prefetcher = Prefetcher(services)
        self._runs: dict[str, PipelineRun] = {}  # in progress, by the exchange's id; bounded by limits.requests

    @classmethod
    def from_config(cls, config: Config, services: Services, environ: Mapping[str, str]) -> Pipelines | None:
        """Return None if the configuration declares no pipeline."""
        if not config.pipelines:
            return None
        clock = StageClock()
        results = services.results
        assert results is not None  # it is built wherever pipelines are declared
        models, run = ModelAccess(services), services.background.run
        in_system, accounts = config.shaping.sources_place == "system", services.accounts
        warm = WarmPassages(models, clock.now, run, in_system=in_system, is_tenant=accounts.directory.exists)
        accounts.shared.listen(warm.follow)
        stage_services = StageServices(
            models=models,
            toolbox=Toolbox(tool_sources(config.tools, environ), results, clock),
            retriever=None,
            results=results,
            warm=warm,
            clock=clock,
            shaping=config.shaping,
            run_background=run,
        )
        return cls(config.pipelines, stage_services, services.fleet.default)

    async def start(self) -> None:
        """Prepare what runs need."""

    def passages_removed(self, ids: Collection[str]) -> None:
        """Show passages no more: their documents have changed or are gone."""
        self.services.warm.passages_removed(ids)

    def collection_removed(self, tenant: str, name: str) -> None:
        self.services.warm.collection_removed(tenant, name)
        self.services.run_background(self.services.results.invalidate(tenant=tenant))

    async def close(self) -> None:
        """Close what the tools have opened."""
        await self.services.toolbox.close()

    def names(self, caller: Caller) -> list[str]:
        """Return the pipelines that the caller may use: those whose models it may all use."""
        return [name for name in self._configs if self._is_allowed(caller, name)]

    def find(self, caller: Caller, name: str) -> ServedVariant:
        """Return the variant that answers, under the pipeline's name."""
        if name not in self._configs or not self._is_allowed(caller, name):
            known = ", ".join(f"{PIPELINE_PREFIX}{each}" for each in self.names(caller)) or "none for this API key"
            raise ApiError(
                f"Unknown pipeline '{name[:200]}'. Available: {known}.",
                kind="not_found_error",
                parameter="model",
                code="model_not_found",
            )
        served = self.services.models.find(caller, self._answer_model(name))
        return replace(served, name=f"{PIPELINE_PREFIX}{name}")

    def open(self, exchange: Exchange) -> PipelineRun:
        name = exchange.served.name.removeprefix(PIPELINE_PREFIX)
        config, request = self._configs[name], exchange.text_request
        question = _check_request(name, config, exchange)
        began = exchange.arrival
        most_s = config.deadline_ms / 1e3
        state = RunState(
            name=name,
            model=self._answer_model(name),
            config=config,
            exchange=exchange,
            question=question,
            began=began,
            deadline=began + (most_s if request.deadline_s is None else min(request.deadline_s, most_s)),
            surface=choose_surface(exchange.caller, request.surface, exchange.served.surface),
        )
        exchange.surface = state.surface
        run = PipelineRun(state, self.services, self._prefetcher, ended=self._forget)
        self._runs[exchange.id] = run
        return run

    def interrupt(self, caller: Caller, id: str, spoken: int | None) -> dict[str, Any]:
        """End the caller's run, and return what its user has heard: the first `spoken` sentences, default all."""
        run = self._runs.get(id)
        if run is None or run.exchange.caller.tenant != caller.tenant or run.exchange.caller.key != caller.key:
            raise ApiError(
                f"No run '{id[:100]}' is in progress.", kind="not_found_error", parameter="run", code="run_not_found"
            )
        state = run.state
        run.interrupt()
        heard = state.text if spoken is None and not state.sentences else " ".join(state.sentences[:spoken])
        return {"object": "pipeline.run", "id": id, "status": "interrupted", "heard": heard}

    def described(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the entries of `GET /v1/pipelines`."""
        return [self._described(name, caller.tenant) for name in self.names(caller)]

    def model_entries(self, caller: Caller) -> list[dict[str, Any]]:
        return [
            {**self.find(caller, name).described(), "kind": "pipeline", "served_by": "pipeline"}
            for name in self.names(caller)
        ]

    def _described(self, name: str, tenant: str) -> dict[str, Any]:
        config = self._configs[name]
        needs = fitted(stage_needs(config), config.deadline_ms / 1e3)
        budgets = plan(needs, config.deadline_ms / 1e3)
        entry: dict[str, Any] = {
            "id": name,
            "object": "pipeline",
            "model": f"{PIPELINE_PREFIX}{name}",
            "description": config.description,
            "mode": config.mode,
            "deadline_ms": config.deadline_ms,
            "stages": [
                {"stage": need.name, "budget_ms": round(budget * 1e3, 3), "late": getattr(config, need.name).late}
                for need, budget in zip(needs, budgets, strict=True)
            ],
        }
        if config.prefetch:
            entry["prefetch"] = self._prefetcher.described(name, tenant)
        if config.assemble.warm:
            entry["warm"] = self.services.warm.described(name, tenant)
        return entry

    def _answer_model(self, name: str) -> str:
        config = self._configs[name]
        return config.generate.model or config.model or self._default_model

    def _is_allowed(self, caller: Caller, name: str) -> bool:
        try:
            for model in models_of(self._configs[name], self._answer_model(name)):
                self.services.models.find(caller, model)
        except ApiError:
            return False
        return True

    def _forget(self, run: PipelineRun) -> None:
        self._runs.pop(run.exchange.id, None)


def models_of(config: PipelineConfig, answers: str) -> list[str]:
    """Return the models that a pipeline uses. `answers`: the one that writes its answer."""
    used: list[str | None] = [answers]
    if "rerank" in config.stages:
        used.append(config.rerank.model)
    if "tools" in config.stages:
        used.append(config.tools.model)
    if "small" in config.generate.order:
        used.append(config.generate.small)
    return list(dict.fromkeys(name for name in used if name is not None))


def _check_request(name: str, config: PipelineConfig, exchange: Exchange) -> str:
    """Return the question: the last user message. ApiError for what a pipeline does not take."""
    request = exchange.text_request
    if request.messages is None:
        raise invalid_request(f"'{PIPELINE_PREFIX}{name}' answers chats. Use /v1/chat/completions.", "model")
    if request.n != 1:
        raise invalid_request("'n' must be 1 for pipelines.", "n")
    if request.tools:
        raise invalid_request(
            "'tools' are not for pipelines, which run tools of their own. Use the model itself.", "tools"
        )
    if request.sources:
        raise invalid_request("'sources' are not for pipelines, which find their own. Use the model itself.", "sources")
    if request.pipeline.filters and not config.search.client_filters:
        raise invalid_request(
            f"The pipeline '{name}' takes no filters. Its operator can allow them with search.client_filters.",
            "pipeline.filters",
        )
    last = next((each for each in reversed(request.messages) if each["role"] == "user"), None)
    question = "" if last is None else str(last.get("content") or "").strip()
    if not question:
        raise invalid_request("Expected a user message with the question.", "messages")
    return question
