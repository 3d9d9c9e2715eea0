"""Admit: reserve from limits and budgets before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.shape import tokenise
from headrace.gateway.ledger.budgets import BudgetRefusal, FallbackVariant
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.limits.limit_scopes import LimitScope
from headrace.gateway.routing.composite_answerer import choice_count
from headrace.gateway.routing.router import RoutePlan


async def admit(state: FlowState) -> None:
    """Limits come first, so that a budget is not held for a request that a limit rejects."""
    exchange, services = state.exchange, state.services
    scopes = services.limit_scopes.scopes(exchange.caller, exchange.served.variant, exchange.surface)
    if not scopes and services.ledger is None:
        return
    max_tokens = await _reserve_limits(state, scopes)
    if services.ledger is not None:
        await _reserve_budget(state, max_tokens, scopes)


async def _reserve_limits(state: FlowState, scopes: Sequence[LimitScope]) -> int:
    """Return how many tokens all answers together may have."""
    exchange, admission = state.exchange, state.admission
    count = choice_count(exchange.text_request)
    max_tokens = _max_answer_tokens(state) * count
    if not scopes:
        return max_tokens
    admission.reservation = await state.services.limiter.reserve(
        scopes,
        input_tokens=exchange.prompt_tokens,
        most_output=max_tokens,
        tenant=exchange.caller.tenant,
        surface=exchange.surface,
        closed=settings_of(exchange.caller).fail == "closed",
    )
    exchange.headers |= admission.reservation.headers()
    if admission.reservation.most_output < max_tokens:
        max_tokens = max(count, admission.reservation.most_output)
        exchange.text_request = exchange.text_request.but(max_tokens=max_tokens // count)
    return max_tokens


def _max_answer_tokens(state: FlowState) -> int:
    """Return how many tokens one answer may have."""
    exchange = state.exchange
    prompts = exchange.prompts.get(exchange.served.name)
    longest = max(len(prompt.tokens) for prompt in prompts) if prompts else exchange.prompt_tokens
    room = max(1, exchange.served.context - longest)
    requested = exchange.text_request.max_tokens
    limit = requested if requested is not None else exchange.served.max_tokens
    return room if limit is None else min(limit, room)


async def _reserve_budget(state: FlowState, max_tokens: int, scopes: Sequence[LimitScope]) -> None:
    """`scopes`: the limits that the exchange has reserved from."""
    exchange, services, admission = state.exchange, state.services, state.admission
    assert services.ledger is not None
    caller = exchange.caller
    likely = services.limiter.estimates.tokens(caller.tenant, exchange.surface, max_tokens)
    falls = exchange.served.adapter is None  # no other variant gives the answers of an adapter
    entry = ledger_entry(state)
    verdict = await services.ledger.reserve(entry, output_tokens=likely, most_tokens=max_tokens, falls=falls)
    if isinstance(verdict, FallbackVariant) and _lacks(state, verdict.variant):
        verdict = await services.ledger.reserve(entry, output_tokens=likely, most_tokens=max_tokens, falls=False)
    if isinstance(verdict, FallbackVariant):
        state.shaping.changes.append(ShapingChange("budget", exchange.served.name, verdict.variant))
        exchange.served = services.fleet.served[verdict.variant]
        state.plan = RoutePlan(verdict.variant, decisions=state.plan.decisions)
        state.lookups.exact = state.lookups.semantic = None  # they were for the other variant
        await tokenise(state)
        fallback_scopes = services.limit_scopes.scopes(caller, exchange.served.variant, exchange.surface)
        if fallback_scopes != scopes:
            if admission.reservation is not None:
                admission.reservation.release_soon()
                admission.reservation = None
            max_tokens = await _reserve_limits(state, fallback_scopes)
        else:
            max_tokens = min(max_tokens, _max_answer_tokens(state) * choice_count(exchange.text_request))
        entry = ledger_entry(state)
        verdict = await services.ledger.reserve(entry, output_tokens=likely, most_tokens=max_tokens, falls=False)
    if isinstance(verdict, BudgetRefusal):
        raise verdict.error()
    admission.has_ledger_hold = True


def _lacks(state: FlowState, variant: str) -> bool:
    """True if the request has something that a variant cannot take, such as images."""
    return state.services.fleet.served[variant].why_not_for(state.exchange.text_request) is not None


def ledger_entry(state: FlowState, *, id: str = "", variant: str = "", counted: bool = True) -> LedgerEntry:
    exchange, caller = state.exchange, state.exchange.caller
    return LedgerEntry(
        id=id or exchange.id,
        tenant=caller.tenant,
        endpoint=exchange.endpoint or "-",
        model=exchange.text_request.model or state.requested,
        variant=variant or exchange.served.name,
        key=caller.key,
        surface=exchange.surface,
        prompt_tokens=exchange.prompt_tokens,
        counted=counted,
    )
