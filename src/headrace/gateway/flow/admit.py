"""Admit: limits and budgets, reserved before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.flow.course import Course
from headrace.gateway.flow.prepare import measure
from headrace.gateway.ledger.budgets import BudgetRefusal, FallbackVariant
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.limits.limit_scopes import LimitScope
from headrace.gateway.routing.composite_answerer import choice_count
from headrace.gateway.routing.router import RoutePlan


async def admit(course: Course) -> None:
    """Limits first: a budget is not held for what is refused anyway."""
    exchange, services = course.exchange, course.services
    caller = exchange.caller
    scopes = services.limit_scopes.scopes(caller, exchange.served.name, exchange.surface)
    if not scopes and services.ledger is None:
        return
    most = await _limit(course, scopes)
    if services.ledger is not None:
        await _budget(course, most, scopes)


async def _limit(course: Course, scopes: Sequence[LimitScope]) -> int:
    """How many tokens all answers together may have, once the limits have let it in."""
    exchange, services = course.exchange, course.services
    caller = exchange.caller
    count = choice_count(exchange.asked)
    most = _most_tokens(course) * count
    if not scopes:
        return most
    course.reservation = await services.limiter.reserve(
        scopes,
        input_tokens=exchange.prompt_tokens,
        most_output=most,
        tenant=caller.tenant,
        surface=exchange.surface,
        closed=settings_of(caller).fail == "closed",
    )
    exchange.headers |= course.reservation.headers()
    if course.reservation.most_output < most:
        most = max(count, course.reservation.most_output)
        exchange.asked = exchange.asked.but(max_tokens=most // count)
    return most


def _most_tokens(course: Course) -> int:
    """Of one answer."""
    exchange = course.exchange
    prompts = exchange.prompts.get(exchange.served.name)
    longest = max(len(prompt.tokens) for prompt in prompts) if prompts else exchange.prompt_tokens
    room = max(1, exchange.served.context - longest)
    asked = exchange.asked.max_tokens
    most = asked if asked is not None else exchange.served.max_tokens
    return room if most is None else min(most, room)


async def _budget(course: Course, most: int, scopes: Sequence[LimitScope]) -> None:
    """`scopes`: of the limits that have let it in."""
    exchange, services = course.exchange, course.services
    assert services.ledger is not None
    caller = exchange.caller
    likely = services.limiter.estimates.tokens(caller.tenant, exchange.surface, most)
    verdict = await services.ledger.reserve(entry_of(course), output_tokens=likely, most_tokens=most)
    if isinstance(verdict, FallbackVariant):
        course.shaped.append(ShapingChange("budget", exchange.served.name, verdict.variant))
        exchange.served = services.fleet.served[verdict.variant]
        course.plan = RoutePlan(verdict.variant, decisions=course.plan.decisions)
        course.looked = course.recall = None  # they were of the other variant
        await measure(course)
        others = services.limit_scopes.scopes(caller, exchange.served.name, exchange.surface)
        if others != scopes:  # the other variant has limits of its own
            if course.reservation is not None:
                course.reservation.release_soon()
                course.reservation = None
            most = await _limit(course, others)
        else:
            most = min(most, _most_tokens(course) * choice_count(exchange.asked))
        entry = entry_of(course)
        verdict = await services.ledger.reserve(entry, output_tokens=likely, most_tokens=most, falls=False)
    if isinstance(verdict, BudgetRefusal):
        raise verdict.error()
    course.charged = True


def entry_of(course: Course, *, id: str = "", variant: str = "", counted: bool = True) -> LedgerEntry:
    exchange, caller = course.exchange, course.exchange.caller
    return LedgerEntry(
        id=id or exchange.id,
        tenant=caller.tenant,
        endpoint=exchange.endpoint or "-",
        model=exchange.asked.model or course.named,
        variant=variant or exchange.served.name,
        key=caller.key,
        surface=exchange.surface,
        prompt_tokens=exchange.prompt_tokens,
        counted=counted,
    )
