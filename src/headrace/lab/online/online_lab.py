"""OnlineLab: everything that proves itself on live traffic, connected to one server's flow."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from headrace.config import Config
from headrace.gateway.flow.answer_observer import AnswerObserver
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.prices import PriceBook
from headrace.lab.comparison.similarity import lexical_overlap
from headrace.lab.online.answer_difference import Similarity
from headrace.lab.online.canaries import Canaries
from headrace.lab.online.canary_operations import CanaryOperations
from headrace.lab.online.lab_store import LabStore
from headrace.lab.online.shadows import RouteQuality, Shadow

Loop = Callable[[], Coroutine[Any, Any, None]]


class OnlineLab:
    """All of it belongs to one event loop."""

    def __init__(self, shadows: Mapping[str, Shadow] | None = None, canaries: Canaries | None = None) -> None:
        """`canaries`: None in a front process, which relays calls about them."""
        self.shadows = shadows or {}
        self.canaries = canaries

    @classmethod
    def from_config(
        cls, config: Config, services: Services, store: LabStore, *, similarity: Similarity = lexical_overlap
    ) -> OnlineLab:
        generate, served = services.dispatcher.generate, services.fleet.served
        shadows = {
            name: Shadow(name, each, served[each.variant], generate, similarity)
            for name, each in config.routing.shadows.items()
        }
        writers = [name for name, each in served.items() if each.kind == "decoder"]
        canaries = Canaries(
            config.canary,
            CanaryOperations(services.accounts.shared, writers),
            store,
            served,
            generate,
            similarity,
            prices=PriceBook.from_config(config.prices),
        )
        return cls(shadows, canaries)

    @property
    def observers(self) -> tuple[AnswerObserver, ...]:
        canaries = () if self.canaries is None else (self.canaries,)
        return (*self.shadows.values(), *canaries)

    @property
    def loops(self) -> tuple[Loop, ...]:
        canaries = () if self.canaries is None else (self.canaries.run, self.canaries.copies.run)
        return (*(shadow.copies.run for shadow in self.shadows.values()), *canaries)

    def route_quality(self) -> list[RouteQuality]:
        """Return the quality of each route that a double-check covers."""
        return [
            RouteQuality(variant, route, shadow.config.variant, summary)
            for shadow in self.shadows.values()
            if shadow.config.judge == "shadow"
            for (variant, route), summary in shadow.by_route.items()
        ]
