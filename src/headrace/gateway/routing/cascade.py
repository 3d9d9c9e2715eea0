"""Cascades: a small model answers first, and a large one answers instead if the small one was not confident enough.

Holds back the small model's output until all of it, enough tokens, or the timeout decides. Both models are charged for
what they computed, and the client's usage is their sum. Does not choose the threshold: calibration does.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from headrace.config.routing_section import CascadeConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, TakeDelta, TextRequest
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    DecidingAnswerer,
    RoutingDecision,
    SettledCallback,
    VariantCharge,
    charges_for,
    choice_count,
    sum_usage,
)
from headrace.gateway.routing.confidence import TOP, Confidence
from headrace.gateway.serving.exchange import Exchange

_MAX_TOKENS: Final = 4096  # of each choice, after which the cascade decides in any case


class CascadeAnswerer(DecidingAnswerer):
    holds_back = True

    def __init__(
        self,
        exchange: Exchange,
        small: AnswererFactory,
        large: AnswererFactory,
        config: CascadeConfig,  # with a threshold
        *,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(exchange, settled=settled, clock=clock)
        self.config = config
        self.confidence: float | None = None  # of the least confident choice, once it has decided
        self._make_small = small
        self._make_large = large
        self._small: Answerer | None = None
        self._decisive_tokens = min(config.tokens or _MAX_TOKENS, _MAX_TOKENS)
        count = choice_count(exchange.text_request)
        self._confidences = [Confidence() for _ in range(count)]
        self._undecided = set(range(count))  # choices that need more output

    @property
    def escalated(self) -> bool:
        return self._serving is not None and self._serving is not self._small

    @property
    def charges(self) -> list[VariantCharge]:
        charges: list[VariantCharge] = []
        for part in self._parts:
            role = "first try" if part is self._small and self.escalated else "answer"
            charges += charges_for(part, role)
        return charges

    async def begin(self) -> None:
        small = self._small = self._start(self._make_small(with_logprobs(self.exchange.text_request)))
        try:
            await small.begin()
        except ApiError as error:
            await self._escalate(f"rejected ({error.code or error.kind})")
        else:
            self.exchange.prompt_tokens = small.exchange.prompt_tokens
            self.exchange.shaped_at = small.exchange.shaped_at

    async def _run_serving(self, serving: Answerer, take: TakeDelta) -> bool:
        return await serving.run(self._add_first_try(take) if self.escalated else self._hide_logprobs(take))

    async def _decide(self) -> bool:
        """Choose the model whose answer is served; False if the client left first."""
        small = self._small
        assert small is not None
        why = ""
        try:
            async with asyncio.timeout(self.config.within_s):
                await small.run(self._hold)
        except TimeoutError:
            why = f"undecided after {self.config.within_s:g} s"
        except ApiError as error:
            why = f"failed ({error.code or error.kind})"
        if self.gone:
            return False
        if why:
            await self._escalate(why)
        else:
            await self._judge_confidence(small)
        return not self.gone

    async def _judge_confidence(self, small: Answerer) -> None:
        measure, threshold = self.config.measure, self.config.threshold
        assert threshold is not None
        value = self.confidence = min(each.value(measure) for each in self._confidences)
        if value < threshold:
            await self._escalate(f"{measure} {value:.3f} < {threshold:.3f}")
            return
        self._serve(small)
        held, wanted = list(self._held), self.exchange.text_request.sampling.logprobs
        self._held.clear()
        self._held.extend(without_extra_logprobs(piece, wanted) for piece in held)
        why = f"{measure} {value:.3f} >= {threshold:.3f}"
        self.decisions.append(RoutingDecision("cascade", small.exchange.served.name, why))

    def _hold(self, piece: ChoiceDelta) -> bool:
        self._held.append(piece)
        index = piece.index
        confidence = self._confidences[index]
        for token in piece.logprobs or ():
            if token.logprob is not None and confidence.tokens < self._decisive_tokens:
                confidence.add(token.logprob, [logprob for _, _, logprob in token.top])
        if piece.finish is not None or confidence.tokens >= self._decisive_tokens:
            self._undecided.discard(index)
        # Bounds a variant that sends no log-probabilities: every delta has at least one token.
        return bool(self._undecided) and len(self._held) <= (self._decisive_tokens + 1) * len(self._confidences)

    async def _escalate(self, why: str) -> None:
        assert self._small is not None
        self._held.clear()
        self._settle(self._small)
        large = self._start(self._make_large(self.exchange.text_request))
        name = large.exchange.served.name
        self.decisions.append(RoutingDecision("cascade", name, f"{self._small.exchange.served.name}: {why}"))
        self._serve(large)
        await large.begin()
        if self.gone:
            large.cancel()
        self.exchange.prompt_tokens = large.exchange.prompt_tokens

    def _hide_logprobs(self, take: TakeDelta) -> TakeDelta:
        wanted = self.exchange.text_request.sampling.logprobs
        return lambda piece: take(without_extra_logprobs(piece, wanted))

    def _add_first_try(self, take: TakeDelta) -> TakeDelta:
        """Add the small model's usage to the reported usage, once for all choices."""
        assert self._small is not None
        first_try = self._small.exchange.usage

        def added(piece: ChoiceDelta) -> bool:
            if piece.usage is not None and piece.index == 0:
                piece.usage = sum_usage((first_try, piece.usage))
            return take(piece)

        return added


def with_logprobs(text_request: TextRequest) -> TextRequest:
    """Ask for the log-probabilities that the confidence needs."""
    sampling = text_request.sampling
    return text_request.but(sampling=msgspec.structs.replace(sampling, logprobs=max(TOP, sampling.logprobs or 0)))


def without_extra_logprobs(piece: ChoiceDelta, wanted: int | None) -> ChoiceDelta:
    """Drop the log-probabilities that the client did not ask for."""
    if piece.logprobs is not None:
        piece.logprobs = (
            None
            if wanted is None
            else [msgspec.structs.replace(token, top=token.top[:wanted]) for token in piece.logprobs]
        )
    return piece
