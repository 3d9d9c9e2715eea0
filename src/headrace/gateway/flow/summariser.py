"""Summaries of conversations that do not fit, written by a served model.

A summary is work of the caller beside the answer: it is reserved from limits and budgets before it is computed, charged
under an id of its own, and ended where the client leaves. Whatever fails, turns can still be dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.accounts.access import allows_served
from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.api_errors import ApiError
from headrace.gateway.degradation.shaping.conversation import ChatMessage
from headrace.gateway.flow.flow_state import FlowState
from headrace.gateway.ledger.budgets import BudgetRefusal
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.limits.rate_limiter import Reservation
from headrace.gateway.requests.text_request import Choice, TextRequest
from headrace.gateway.routing.composite_answerer import VariantCharge, derive_exchange
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.prompt_length import prompt_tokens

_INSTRUCTION: Final = (
    "Summarise the conversation below in a few short sentences. Keep names, numbers, decisions and open questions."
)


class ModelSummariser:
    """Uses the configured summary model if the caller may, by default the exchange's own variant."""

    def __init__(self, state: FlowState) -> None:
        self._state = state

    async def summarise(self, messages: Sequence[ChatMessage], *, tokens: int) -> str:
        services, exchange = self._state.services, self._state.exchange
        name = services.shaping.summary_model
        served = services.fleet.find(name) if name else exchange.served
        if not allows_served(exchange.caller, served):
            served = exchange.served
        turns = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
        text_request = TextRequest(
            model=served.name,
            messages=[{"role": "user", "content": f"{_INSTRUCTION}\n\n{turns}"}],
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            surface=exchange.surface,
            deadline_s=_deadline_s(exchange),
        )
        part = derive_exchange(exchange, served, text_request)
        part.prompts = {}
        length = await prompt_tokens(part)
        reservation = await services.limiter.reserve(
            services.limit_scopes.scopes(exchange.caller, served.variant, exchange.surface),
            input_tokens=length,
            most_output=tokens,
            tenant=exchange.caller.tenant,
            surface=exchange.surface,
            closed=settings_of(exchange.caller).fail == "closed",
            runs=False,
        )
        is_held = False
        try:
            is_held = await self._reserve_budget(part, length, tokens)
            return (await self._generate(part))[0].content
        finally:
            self._settle(part, reservation, is_held)

    async def _reserve_budget(self, part: Exchange, length: int, tokens: int) -> bool:
        """Return whether the ledger waits for a charge. ApiError if a budget has no room."""
        ledger, caller = self._state.services.ledger, part.caller
        if ledger is None:
            return False
        entry = LedgerEntry(
            id=_charge_id(part),
            tenant=caller.tenant,
            endpoint=part.endpoint or "-",
            model=part.served.name,
            variant=part.served.name,
            key=caller.key,
            surface=part.surface,
            prompt_tokens=length,
            counted=False,
        )
        verdict = await ledger.reserve(entry, output_tokens=tokens, most_tokens=tokens, falls=False)
        if isinstance(verdict, BudgetRefusal):
            raise verdict.error()
        return True

    async def _generate(self, part: Exchange) -> list[Choice]:
        state = self._state
        running = state.running = asyncio.ensure_future(state.services.dispatcher.generate(part))
        try:
            return await running
        except asyncio.CancelledError:
            if state.is_only_work_cancelled(running):
                raise ApiError("The request was ended.") from None
            raise
        finally:
            state.running = None

    def _settle(self, part: Exchange, reservation: Reservation, is_held: bool) -> None:
        usage, ledger = part.usage, self._state.services.ledger
        is_used = bool(usage.prompt_tokens or usage.output_tokens)
        if is_used:
            self._state.shaping.charges.append(VariantCharge(part.served.name, usage, "summary"))
            reservation.settle_soon(usage.prompt_tokens, usage.output_tokens, whole=False)
        else:
            reservation.release_soon()
        if is_held and ledger is not None:
            if is_used:
                ledger.charge(_charge_id(part), usage, ended="finished" if part.finish else "gone")
            else:
                ledger.release(_charge_id(part))


def _deadline_s(exchange: Exchange) -> float | None:
    """Return the seconds from the request's arrival until the summary is to end: half of the time that is left."""
    if exchange.deadline is None:
        return None
    return (time.monotonic() + exchange.deadline) / 2 - exchange.arrival


def _charge_id(part: Exchange) -> str:
    return f"{part.id}.summary"
