"""Before anything is reserved: identify, route, degrade, shape.

Owns what a request becomes before it is let in: whose it is and on which surface, the variant that is to answer, and
the prompt that it will see.
"""

from __future__ import annotations

import time

from headrace.gateway.accounts.access import allows_model, choose_surface
from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.semantic.semantic_entry import with_example
from headrace.gateway.degradation.ladder import ladder_steps as ladder
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.fast_profile import apply_fast_profile, cap_max_tokens
from headrace.gateway.degradation.shaping.message_fitting import fit_request, number_sources
from headrace.gateway.flow.course import Course
from headrace.gateway.flow.recall import exact, look_up_similar
from headrace.gateway.flow.summariser import ModelSummariser
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.routing.router import RoutePlan
from headrace.gateway.serving.engine_answering import prompts_of
from headrace.gateway.serving.prompt_length import prompt_tokens


def identify(course: Course) -> None:
    exchange, services = course.exchange, course.services
    asked = exchange.asked
    surface = choose_surface(exchange.caller, asked.surface, exchange.served.surface)
    exchange.surface = surface
    if asked.surface != surface:
        exchange.asked = asked = asked.but(surface=surface)
    if asked.profile == "fast":
        exchange.asked, shaped = apply_fast_profile(
            asked, services.fast, can_reason=exchange.served.reasoning is not None
        )
        course.shaped += shaped
    switch = services.accounts.switches.fast(exchange.caller.tenant, exchange.served.name)
    if switch is None:
        return
    exchange.headers["x-headrace-fast"] = "on"
    if switch.variant is not None:
        exchange.served = services.fleet.served[switch.variant]
    asked = exchange.asked
    if switch.slow_tools and asked.tools and asked.choosing == "auto":
        left = tuple(tool for tool in asked.tools if tool.name not in switch.slow_tools)
        if len(left) < len(asked.tools):
            course.shaped.append(ShapingChange("tools", len(asked.tools), len(left)))
            exchange.asked = asked.but(tools=left)
    if switch.max_tokens is not None:  # after the tools: an answer that may be a call is not cut
        exchange.asked, shaped = cap_max_tokens(exchange.asked, switch.max_tokens)
        course.shaped += shaped
    course.most_prompt = switch.prompt_tokens


def route(course: Course) -> None:
    exchange, services = course.exchange, course.services
    course.plan = services.dispatcher.route(exchange)
    exchange.served = services.fleet.served[course.plan.variant]
    if exchange.served.kind != "decoder":
        raise ApiError(f"'{exchange.served.name}' makes embeddings, not text", parameter="model")


def degrade(course: Course) -> None:
    exchange, services = course.exchange, course.services
    if not services.ladder.has_steps(exchange.surface):
        return
    asked, served, tenant = exchange.asked, exchange.served, exchange.caller.tenant
    settings = settings_of(exchange.caller)
    course.signals = services.pressure.signals(
        served.name,
        tenant,
        surface=exchange.surface,
        deadline_s=None if exchange.deadline is None else exchange.deadline - time.monotonic(),
        max_tokens=asked.max_tokens,
        budget_left=None if services.ledger is None else services.ledger.budget_left(tenant, exchange.endpoint),
    )
    course.standing = f"{served.name}\n{tenant}"
    level = services.ladder.decide(exchange.surface, course.signals, scope=course.standing)
    if not level.number:
        return
    allowed = ladder.AllowedSteps.of(asked.degrade, None if settings.ladder else "off")
    course.degraded = degraded = ladder.plan_degradation(level, asked, allowed)
    course.whole = derive_exchange(exchange, served, asked)
    smaller = ladder.find_smaller_variant(served.name, degraded.variants, services.fleet.served)
    if smaller is not None and not allows_model(exchange.caller, smaller):
        smaller = None
    if smaller is not None and not course.plan.steps and course.plan.cascade is None:
        exchange.served = services.fleet.served[smaller]
        course.plan = RoutePlan(smaller, decisions=course.plan.decisions)
        course.telling.add("variant", ShapingChange("variant", served.name, smaller))
    exchange.asked, shaped = ladder.cap_answer(asked, degraded)
    course.telling.add("max_tokens", *shaped)


async def shape(course: Course) -> None:
    exchange, services = course.exchange, course.services
    asked, degraded = exchange.asked, course.degraded
    if asked.messages is not None:
        most = None if degraded is None else degraded.sources_tokens
        exchange.asked, course.selected = number_sources(asked, exchange.served, services.shaping, most)
        shaped = () if course.selected is None else course.selected.changes
        budget, history = course.most_prompt, None if degraded is None else degraded.history_tokens
        if history is not None:
            own = history + (0 if course.selected is None else course.selected.tokens)
            budget = own if budget is None else min(budget, own)
        # Under pressure nobody is asked for a summary.
        summarises = degraded is None and "summarise" in (services.shaping.overflow, exchange.asked.overflow)
        summariser = ModelSummariser(services, exchange) if summarises else None
        changed = await fit_request(exchange.asked, exchange.served, services.shaping, budget, summariser)
        exchange.asked = changed.asked
        if history is not None:
            course.telling.add("trim", *(each for each in shaped if each.name == "sources"), *changed.changes)
            course.shaped += (each for each in shaped if each.name != "sources")
        else:
            course.shaped += (*shaped, *changed.changes)
    await measure(course)


async def measure(course: Course) -> None:
    """How long the prompt is."""
    exchange, services = course.exchange, course.services
    if exchange.served.upstream is not None:
        exchange.prompt_tokens = await prompt_tokens(exchange)
        return
    exact = services.exact
    if exact is None or not exact.modes.uses(exchange.caller.tenant, wish=exchange.asked.cache).looks:
        await prompts_of(exchange)
        return
    name = exact.prompts.name(exchange)  # what is answered at once is not to be rendered first
    if name is not None and (known := exact.prompts.find(name)) is not None:
        exchange.prompts[exchange.served.name] = known
    found = await prompts_of(exchange)
    if name is not None:
        exact.prompts.keep(name, found)


async def prime(course: Course) -> None:
    """An example is a part of the prompt: it is looked for before the prompt is paid for, where the exact cache has
    no answer, and left out where there is no room for it."""
    exchange, services = course.exchange, course.services
    if services.semantic is None or services.semantic.options.serve != "prime" or course.degraded is not None:
        return
    uses = services.semantic.modes.uses(exchange.caller.tenant, wish=exchange.asked.cache)
    if uses.looks and await exact(course, stale=False) is None:
        recall = course.recall = await look_up_similar(course)
        if recall.entry is None or recall.outcome != "hit":
            return
        asked, prompts, length = exchange.asked, exchange.prompts, exchange.prompt_tokens
        exchange.asked, exchange.prompts = with_example(asked, recall.entry), {}
        try:
            await measure(course)
        except ApiError:
            exchange.asked, exchange.prompts, exchange.prompt_tokens = asked, prompts, length
            return
        course.looked = None  # what is answered now is neither kept as the answer to this very request nor shared
        exchange.headers["x-headrace-cache"] = exchange.notes["cache"] = "primed"
