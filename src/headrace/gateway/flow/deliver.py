"""Deliver: hands deltas over as they come, as far as limits and budgets allow."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.in_flight import FlightReader
from headrace.gateway.degradation.ladder.ladder_steps import overload_error
from headrace.gateway.degradation.shaping.sources import find_citations
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.flow.recall import citation_notes, count_refusal, replace_error
from headrace.gateway.flow.settle import settle
from headrace.gateway.requests.text_request import ChoiceDelta, RestartDelta, TakeDelta, TokenUsage, combine_usages
from headrace.gateway.routing.composite_answerer import choice_count, sum_usage


async def deliver(state: FlowState, take: TakeDelta) -> bool:
    """Hand every delta to `take` as it comes. Return True once every choice has ended, and settle before that; return
    False as soon as `take` does, which asks for a pause: call this again then. ApiError where the answer fails."""
    assert state.answer is not None
    try:
        if state.ended_by is not None:
            ended = True
        elif state.wait is not None:
            ended = await _deliver_in_time(state, take)
        elif state.delivery.is_inspected:
            ended = await _deliver_inspected(state, take)
        else:
            ended = await state.answer.run(take)
    except ApiError as error:
        if state.exchange.first_at or state.is_stopped or not replace_error(state, error):
            raise
        ended = await _deliver_inspected(state, take)
    if state.ended_by is not None and not state.is_client_gone:
        raise state.ended_by
    if ended and not state.is_client_gone:
        sources = state.shaping.sources
        if sources is not None and sources.sources:
            text = "".join(delta.content for delta in state.delivery.first_choice)
            state.exchange.notes["citations"] = citation_notes(find_citations(text, sources))
        settle(state)  # before the client receives the end: its charge is in the journal by then
    return ended


async def _deliver_in_time(state: FlowState, take: TakeDelta) -> bool:
    """Deliver, but stop waiting for the first token after the surface's patience while its ladder is active.

    A request's waiting time is predicted when it arrives, and the prediction may be wrong."""
    exchange, services, delivery = state.exchange, state.services, state.delivery
    loop = asyncio.get_running_loop()
    left_s = services.ladder.patience_s(exchange.surface) - (time.monotonic() - exchange.arrival)
    level = services.ladder.bottom(exchange.surface)
    timer = None
    try:
        async with asyncio.timeout(None) as timeout:
            delivery.timeout = timeout

            def expire() -> None:
                if state.wait is not None and services.ladder.number(exchange.surface, state.degradation.scope):
                    timeout.reschedule(loop.time())

            if level.name == "refuse" and left_s < math.inf:
                timer = loop.call_later(max(0.0, left_s), expire)
            return await _deliver_inspected(state, take)
    except TimeoutError:
        if state.wait is None:
            raise
        if state.is_stopped:
            return True
        state.degradation.signals = services.pressure.signals(exchange.served.variant, exchange.caller.tenant)
    finally:
        delivery.timeout = None
        if timer is not None:
            timer.cancel()
    error = overload_error(level, state.degradation.signals)
    if replace_error(state, error):
        return await _deliver_inspected(state, take)
    if state.answer is not None:
        state.answer.cancel()
    count_refusal(state)
    raise error


async def _deliver_inspected(state: FlowState, take: TakeDelta) -> bool:
    delivery = state.delivery
    while True:
        if delivery.held is not None and not await _wait_for_limits(state, take):
            return True
        if delivery.held is not None:
            delta, delivery.held = delivery.held, None
            if not take(delta):
                return False
        assert state.answer is not None
        ended = await state.answer.run(partial(_inspect, state, take))
        if delivery.held is None:
            return ended


def _inspect(state: FlowState, take: TakeDelta, delta: ChoiceDelta) -> bool:
    exchange, delivery = state.exchange, state.delivery
    if state.wait is not None and delivery.timeout is not None:
        if delivery.timeout.expired():
            return False  # the wait is given up in this same turn of the event loop
        delivery.timeout.reschedule(None)
    if delivery.sets_timestamps:
        now = time.monotonic()
        if exchange.first_at:
            exchange.gaps.append(now - exchange.last_at)
        else:
            exchange.first_at = now
        exchange.last_at = now
    if state.wait is not None:
        state.wait.start()
        state.wait = None
    if (state.shaping.sources is not None or state.lookups.semantic is not None) and delta.index == 0:
        if isinstance(delta, RestartDelta):
            delivery.first_choice.clear()
        delivery.first_choice.append(delta)
    if state.observed is not None:
        state.observed.add(exchange, delta)
    if (shared := state.shared_generation) is not None:
        exchange.served = shared.exchange.served  # a fallback may have taken over
    if delta.tokens:
        count = delivery.tokens + delta.tokens
        _note_sent(state)
        if _is_paying(state) and not _is_correction(state, delta) and not _is_allowed(state, count):
            delivery.held = delta
            return False
        _count_tokens(state, delta)
    if delta.finish is not None:
        _end_choice(state, delta)
    return take(delta)


def _note_sent(state: FlowState) -> None:
    """Record in the journal what the connection has of a stream: all before this delta, once this turn of the event
    loop has written it. Of a whole answer, nothing is sent before its end."""
    delivery, ledger = state.delivery, state.services.ledger
    if (
        ledger is not None
        and state.exchange.text_request.stream
        and delivery.sent < delivery.tokens
        and _is_paying(state)
    ):
        delivery.sent = delivery.tokens
        asyncio.get_running_loop().call_soon(ledger.sent, state.exchange.id, delivery.tokens)


def _is_paying(state: FlowState) -> bool:
    """True if this exchange pays for the generation now. When the first one leaves, another one pays."""
    return state.answer.pays if isinstance(state.answer, FlightReader) else not state.exchange.answered_by


def _is_correction(state: FlowState, delta: ChoiceDelta) -> bool:
    """True if the delta only reports an upstream's token count, after the text or with all of it at once: there is
    nothing left to stop then, and settling counts the tokens."""
    if state.exchange.served.upstream is None or delta.finish is None:
        return False
    return not delta.content or not state.delivery.tokens_by_choice.get(delta.index)


def _count_tokens(state: FlowState, delta: ChoiceDelta) -> None:
    delivery = state.delivery
    delivery.tokens += delta.tokens
    delivery.tokens_by_choice[delta.index] = delivery.tokens_by_choice.get(delta.index, 0) + delta.tokens


def _end_choice(state: FlowState, delta: ChoiceDelta) -> None:
    exchange, usages = state.exchange, state.delivery.usages
    usages[delta.index] = delta.usage or TokenUsage()
    if state.delivery.sets_timestamps:
        exchange.usage = combine_usages([usages[index] for index in sorted(usages)], exchange.text_request.n)
        exchange.finish = delta.finish or ""


def _is_allowed(state: FlowState, count: int) -> bool:
    """True if limits, and then budgets, allow so many tokens."""
    admission = state.admission
    if admission.reservation is not None and not admission.reservation.allow(count):
        return False
    if admission.has_ledger_hold:
        assert state.services.ledger is not None
        return state.services.ledger.progress(state.exchange.id, count)
    return True


async def _wait_for_limits(state: FlowState, take: TakeDelta) -> bool:
    """Wait until the held delta may be delivered. Return False where it never may: the answer is cut, or the client
    has left."""
    exchange, delivery = state.exchange, state.delivery
    delta, reservation, ledger = delivery.held, state.admission.reservation, state.services.ledger
    assert delta is not None
    count = delivery.tokens + delta.tokens
    may_go_on = reservation is None or reservation.allow(count)
    if reservation is not None and not may_go_on:
        may_go_on = await _granted(state, reservation.extend(count)) and reservation.allow(count)
        exchange.cut_by = "" if may_go_on else "limit"
    if state.admission.has_ledger_hold and may_go_on:
        assert ledger is not None
        if not ledger.progress(exchange.id, count) and not await _granted(state, ledger.extend(exchange.id, count)):
            exchange.cut_by = "budget"
    if state.is_stopped:
        delivery.held = None
        return False
    if not exchange.cut_by:
        _count_tokens(state, delta)
        if delta.finish is not None:
            _end_choice(state, delta)
        return True
    delivery.held = None
    _cut(state, take)
    return False


async def _granted(state: FlowState, extension: Coroutine[Any, Any, bool]) -> bool:
    """Wait for an extension of the limits or the budget, unless the client leaves."""
    delivery = state.delivery
    delivery.extension = asyncio.ensure_future(extension)
    try:
        return await delivery.extension
    except asyncio.CancelledError:
        if not state.is_stopped:
            raise
        return False
    finally:
        delivery.extension.cancel()
        delivery.extension = None


def _cut(state: FlowState, take: TakeDelta) -> None:
    """End the choices that have not ended, with what the client has of them."""
    exchange, delivery = state.exchange, state.delivery
    assert state.answer is not None
    state.answer.cancel()
    prompts = exchange.prompts.get(exchange.served.name) or ()
    for index in range(choice_count(exchange.text_request)):
        if index in delivery.usages:
            continue
        place = index // exchange.text_request.n
        # Of an upstream's prompts only the total length is known. The first prompt carries it.
        length = len(prompts[place].tokens) if prompts else exchange.prompt_tokens if place == 0 else 0
        usage = TokenUsage(prompt_tokens=length, output_tokens=delivery.tokens_by_choice.get(index, 0))
        if index == 0:
            usage = sum_usage((*(charge.usage for charge in state.first_tries), usage))
        delivery.usages[index] = usage
        take(ChoiceDelta(index, finish="length", usage=usage))
    exchange.notes["cut"] = exchange.cut_by
