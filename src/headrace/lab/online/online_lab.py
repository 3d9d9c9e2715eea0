"""OnlineLab: everything that proves itself on live traffic, connected to one server's flow."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.gateway.flow.answer_observer import AnswerObserver, FinishedAnswer
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.prices import PriceBook
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.lab.comparison.similarity import lexical_overlap
from headrace.lab.online.answer_difference import AnswerText, Similarity
from headrace.lab.online.canaries import Canaries
from headrace.lab.online.canary_operations import CanaryOperations
from headrace.lab.online.drift_watch import DriftWatch
from headrace.lab.online.faster_options import FasterOptions
from headrace.lab.online.hard_cases import HardCases
from headrace.lab.online.judged_requests import JudgedRequests
from headrace.lab.online.lab_store import LabStore
from headrace.lab.online.option_quality import OptionQuality
from headrace.lab.online.shadows import RouteQuality, Shadow
from headrace.lab.recording.redaction import Redactor

if TYPE_CHECKING:
    from headrace.lab.online.semantic_trial import SemanticTrial

Loop = Callable[[], Coroutine[Any, Any, None]]


class OnlineLab:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        shadows: Mapping[str, Shadow] | None = None,
        canaries: Canaries | None = None,
        hard_cases: HardCases | None = None,
        drift: DriftWatch | None = None,
        semantic: SemanticTrial | None = None,
        faster: FasterOptions | None = None,
        pairs: Mapping[str, JudgedRequests] | None = None,
    ) -> None:
        """`canaries`: None in a front process, which relays calls about them. `pairs`: by shadow."""
        self.shadows = shadows or {}
        self.canaries = canaries
        self.hard_cases = hard_cases  # None: none are kept
        self.drift = drift  # None: nothing is watched
        self.semantic = semantic  # None: there is no semantic cache
        self.faster = faster
        self.pairs = pairs or {}

    @classmethod
    def from_config(
        cls,
        config: Config,
        services: Services,
        store: LabStore,
        *,
        similarity: Similarity = lexical_overlap,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> OnlineLab:
        """`is_idle`: whether the server runs no request, for copies that wait for that."""
        generate, served = services.dispatcher.generate, services.fleet.served
        prices, drift = PriceBook.from_config(config.prices, config.models), None
        if config.drift.share:
            encoder = None if config.drift.encoder is None else served[config.drift.encoder]
            drift = DriftWatch(config.drift, store, encoder=encoder, prices=prices)
        redactor, unnamed = Redactor.from_config(config.recording), config.recording.unnamed
        directory = services.accounts.directory

        def is_recorded(tenant: str) -> bool:
            return directory.settings_of(tenant).record

        pairs = {
            name: JudgedRequests(
                redactor,
                most=each.pairs,
                better=each.variant,
                prices=prices,
                is_recorded=is_recorded,
                unnamed=unnamed,
            )
            for name, each in config.routing.shadows.items()
            if each.judge == "shadow" and each.pairs
        }
        for each in pairs.values():
            services.accounts.shared.listen(each.follow)
        shadows = _shadows(config, services, similarity, is_idle, drift, pairs)
        writers = [name for name, each in served.items() if each.kind == "decoder"]
        operations = CanaryOperations(services.accounts.shared, writers, forbidden=_why_no_canary(config))
        canaries = Canaries(
            config.canary,
            operations,
            store,
            served,
            generate,
            similarity,
            prices=prices,
            is_idle=is_idle,
            runs_here=partial(_runs_here, config),
        )
        hard_cases = HardCases.from_config(config, directory)
        if hard_cases is not None:
            services.accounts.shared.listen(hard_cases.follow)
        semantic = None
        if services.semantic is not None:
            from headrace.lab.online.semantic_trial import SemanticTrial  # not without the cache: see server.assemble

            semantic = SemanticTrial(store, delta=services.semantic.config.delta)
            services.semantic.compared = semantic.take
        gates = None if config.safety.gates is None else Path(config.safety.gates).expanduser()
        quality = OptionQuality(gates, canaries, shadows)
        faster = FasterOptions(config, services.observer.latencies, quality)
        services.option_note = faster.note
        return cls(shadows, canaries, hard_cases, drift, semantic, faster, pairs)

    @property
    def observers(self) -> tuple[AnswerObserver, ...]:
        canaries = () if self.canaries is None else (self.canaries,)
        hard_cases = () if self.hard_cases is None else (self.hard_cases,)
        drift = () if self.drift is None else (self.drift,)
        return (*self.shadows.values(), *canaries, *hard_cases, *drift)

    @property
    def loops(self) -> tuple[Loop, ...]:
        canaries = () if self.canaries is None else (self.canaries.run, self.canaries.copies.run)
        drift = () if self.drift is None else (self.drift.run,)
        semantic = () if self.semantic is None else (self.semantic.run,)
        return (*(shadow.copies.run for shadow in self.shadows.values()), *canaries, *drift, *semantic)

    def route_quality(self) -> list[RouteQuality]:
        """Return the quality of each route that a double-check covers."""
        return [
            RouteQuality(variant, route, shadow.config.variant, summary)
            for shadow in self.shadows.values()
            if shadow.config.judge == "shadow"
            for (variant, route), summary in shadow.by_route.items()
        ]


def _shadows(
    config: Config,
    services: Services,
    similarity: Similarity,
    is_idle: Callable[[], bool],
    drift: DriftWatch | None,
    pairs: Mapping[str, JudgedRequests],
) -> dict[str, Shadow]:
    judged = None if drift is None else partial(_note_quality, drift)
    return {
        name: Shadow(
            name,
            each,
            services.fleet.served[each.variant],
            services.dispatcher.generate,
            similarity,
            judged=judged if each.judge == "shadow" else None,
            pairs=pairs.get(name),
            fast=config.profiles.fast,
            is_idle=is_idle,
            is_local=_runs_here(config, services.fleet.served[each.variant]),
        )
        for name, each in config.routing.shadows.items()
    }


def _why_no_canary(config: Config) -> str:
    if config.safety.lossless_only:
        return (
            "A canary sends requests to another variant, which safety.lossless_only does not allow. Copy requests to "
            "a shadow, or set lossless_only = false."
        )
    return ""


def _runs_here(config: Config, served: ServedVariant) -> bool:
    """True if an engine of this machine serves a variant, so that its work takes processors from the others."""
    model = config.models[served.name.partition("@")[0]]
    return served.upstream is None and not model.workers and not model.discover_workers


def _note_quality(
    drift: DriftWatch, shadow: str, finished: FinishedAnswer, served: AnswerText, better: AnswerText, similarity: float
) -> None:
    del shadow, served, better
    drift.note_quality(finished.exchange.served.name, similarity)
