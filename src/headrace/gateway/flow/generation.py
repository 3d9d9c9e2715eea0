"""Generate: one of an engine, an upstream, or several of them, for one client or for all who ask the same."""

from __future__ import annotations

from headrace.gateway.caches.exact.exact_cache import UncachedAnswer
from headrace.gateway.caches.exact.in_flight import JoinTerms
from headrace.gateway.flow.course import Course
from headrace.gateway.flow.shared_generation import Shared
from headrace.gateway.routing.composite_answerer import derive_exchange


async def generate(course: Course) -> None:
    exchange, services = course.exchange, course.services
    looked = course.looked
    if services.exact is not None and looked is not None and looked.uses.looks:
        shared, plan = derive_exchange(exchange, exchange.served, exchange.asked), course.plan
        # What may begin anew, unheard, is not for those who hear it as it comes.
        whole = (bool(plan.steps) or exchange.served.upstream is not None) and not exchange.asked.stream
        terms = JoinTerms(exchange.deadline, exchange.surface, exchange.asked.priority, whole)
        generation = services.dispatcher.generation
        course.answer = services.exact.generate(looked, terms, lambda: Shared(generation(shared, plan), plan))
        course.follows = True
        if course.answer.role == "joiner":
            exchange.answered_by = "shared"
            exchange.headers["x-headrace-cache"] = exchange.notes["cache"] = "shared"
    else:
        course.own = services.dispatcher.generation(exchange, course.plan)
        await course.own.begin()
        course.answer = UncachedAnswer(course.own)
    if services.ladder.has_steps(exchange.surface):
        course.wait = services.pressure.wait(exchange.served.name, exchange.caller.tenant)
