"""OnlineLab: everything that proves itself on live traffic, connected to one server's flow."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from headrace.config import Config
from headrace.gateway.flow.answer_observer import AnswerObserver
from headrace.gateway.flow.services import Services
from headrace.lab.comparison.similarity import lexical_overlap
from headrace.lab.online.answer_difference import Similarity
from headrace.lab.online.shadows import RouteQuality, Shadow

Loop = Callable[[], Coroutine[Any, Any, None]]


class OnlineLab:
    """All of it belongs to one event loop."""

    def __init__(self, shadows: Mapping[str, Shadow] | None = None) -> None:
        self.shadows = shadows or {}

    @classmethod
    def from_config(cls, config: Config, services: Services, *, similarity: Similarity = lexical_overlap) -> OnlineLab:
        generate, served = services.dispatcher.generate, services.fleet.served
        shadows = {
            name: Shadow(name, each, served[each.variant], generate, similarity)
            for name, each in config.routing.shadows.items()
        }
        return cls(shadows)

    @property
    def observers(self) -> tuple[AnswerObserver, ...]:
        return tuple(self.shadows.values())

    @property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(shadow.copies.run for shadow in self.shadows.values())

    def route_quality(self) -> list[RouteQuality]:
        """Return the quality of each route that a double-check covers."""
        return [
            RouteQuality(variant, route, shadow.config.variant, summary)
            for shadow in self.shadows.values()
            if shadow.config.judge == "shadow"
            for (variant, route), summary in shadow.by_route.items()
        ]
