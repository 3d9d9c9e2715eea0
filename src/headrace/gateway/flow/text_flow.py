"""The way of a request for text, from top to bottom.

    identify   whose it is: its surface; fast mode and the fast profile
    route      model → variant: rules, splits, cascades, chains
    degrade    under pressure less is asked for, as declared
    shape      sources, conversations that fit; messages → prompt → tokens
    admit      limits and budgets, reserved before anything is computed
    recall     an answer that is there already: exact, semantic, from the sources
    generate   one of an engine, an upstream, or several of them
    deliver    pieces as they come, as far as the limits let them
    settle     always, once: what was used is counted, charged and kept

Owns the order of the stages. What a stage does is in gateway/stages, how is its own package's, and which of them there
are is Services'. Dialects and the network are the callers': to them a Way is begun, run, cancelled and settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.exact_cache import CacheHit
from headrace.gateway.degradation.shaping.change_record import header_value
from headrace.gateway.flow.admit import admit
from headrace.gateway.flow.course import Course, Take
from headrace.gateway.flow.deliver import run
from headrace.gateway.flow.generation import generate
from headrace.gateway.flow.prepare import degrade, identify, prime, route, shape
from headrace.gateway.flow.recall import instead, recalled
from headrace.gateway.flow.settle import settle
from headrace.gateway.routing.plan_composer import routing_decisions
from headrace.gateway.routing.router import RoutePlan, route_headers
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstreams.upstream_generation import UpstreamGeneration

if TYPE_CHECKING:
    from headrace.gateway.flow.services import Services


class Way:
    """One exchange on its way. All of it belongs to one event loop."""

    def __init__(self, exchange: Exchange, services: Services) -> None:
        self.exchange = exchange
        name = exchange.served.name
        self._course = Course(exchange, services, RoutePlan(name), name)

    @property
    def gone(self) -> bool:
        """The client has left."""
        return self._course.gone

    async def begin(self) -> None:
        """Everything that can be refused before an engine knows of it; ApiError where it is."""
        course = self._course
        identify(course)
        route(course)
        degrade(course)
        await shape(course)
        await prime(course)
        await admit(course)
        if not await recalled(course) and not course.gone:
            try:
                await generate(course)
            except ApiError as error:
                if not instead(course, error):
                    raise
        course.looks = course.follows or course.reservation is not None or course.charged or course.wait is not None
        course.looks = course.looks or course.selected is not None or course.recall is not None
        if isinstance(course.answer, CacheHit) and course.selected is None:
            course.looks = False  # what its pieces would say is known

    async def run(self, take: Take) -> bool:
        """Hands every piece to `take` as it comes. True once every choice has ended; False as soon as `take` wants no
        more for now, and then this is to be called again. ApiError where the answer is refused or fails."""
        return await run(self._course, take)

    def relayed(self) -> UpstreamGeneration | None:
        """An upstream's answer whose bytes can go to a client as they are: nobody here wants to see a piece of it."""
        own = self._course.own
        return own if isinstance(own, UpstreamGeneration) and not self._course.looks and own.can_relay() else None

    def headers(self) -> dict[str, str]:
        """What a client is told of the stages, beside the answer. Final where the answer is whole."""
        course = self._course
        found = {**self.exchange.headers, **course.telling.headers()}
        if course.shaped:
            found["x-headrace-shaped"] = header_value(course.shaped)
        made = course.made
        decisions = (*course.plan.decisions, *(routing_decisions(made) if made is not None else ()))
        if decisions:
            found |= route_headers(decisions)
        return found

    def cancel(self) -> None:
        """The client is gone: what runs for it alone ends by the engine's next step."""
        course = self._course
        course.gone = True
        if course.answer is not None:
            course.answer.cancel()
        if course.waits is not None:
            course.waits.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        """Once, however it ended."""
        settle(self._course, error)
