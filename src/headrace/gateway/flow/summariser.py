"""Summaries of conversations that do not fit, written by a served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.degradation.shaping.conversation import ChatMessage
from headrace.gateway.flow.services import Services
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.serving.exchange import Exchange

_INSTRUCTION: Final = (
    "Summarise the conversation below in a few short sentences. Keep names, numbers, decisions and open questions."
)


class ModelSummariser:
    """Uses the configured summary model, by default the exchange's own variant."""

    def __init__(self, services: Services, exchange: Exchange) -> None:
        self._services = services
        self._exchange = exchange

    async def summarise(self, messages: Sequence[ChatMessage], *, tokens: int) -> str:
        services, exchange = self._services, self._exchange
        name = services.shaping.summary_model
        served = services.fleet.find(name) if name else exchange.served
        turns = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
        text_request = TextRequest(
            model=served.name,
            messages=[{"role": "user", "content": f"{_INSTRUCTION}\n\n{turns}"}],
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            surface=exchange.surface,
        )
        part = derive_exchange(exchange, served, text_request)
        part.prompts = {}
        return (await services.dispatcher.generate(part))[0].content
