"""Cascades: a small model answers first, and where it was not sure enough a large one answers instead.

Owns the decision and its accounting. Nothing reaches the client before it is decided: what the small model says is held
until all of it is there, or so many tokens, or the time is over. Both models are charged for what they computed, and
the client's usage is their sum. Whether a confidence is enough is the threshold's to say, and calibration finds that.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest, TokenLogprob
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    CompositeAnswerer,
    RoutingDecision,
    SettledCallback,
    Take,
    VariantCharge,
    charges_for,
    choice_count,
    sum_usage,
)
from headrace.gateway.routing.confidence import TOP, Confidence, Measure
from headrace.gateway.serving.exchange import Exchange


class Cascade(msgspec.Struct, frozen=True, kw_only=True):
    """When the small model's answer is taken."""

    threshold: float
    measure: Measure = "mean"
    tokens: int | None = None  # of each choice, after which it is decided; None: all of them
    most_tokens: int = 4096  # after which it is decided in any case
    within: float = 5.0  # seconds that the small model has until then


class CascadeAnswerer(CompositeAnswerer):
    def __init__(
        self,
        exchange: Exchange,
        small: AnswererFactory,
        large: AnswererFactory,
        cascade: Cascade,
        *,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(exchange, settled=settled, clock=clock)
        self.cascade = cascade
        self.confidence: float | None = None  # once it is decided by one: of the least sure choice
        self._make_small = small
        self._make_large = large
        self._small: Answerer | None = None
        self._after = min(cascade.tokens or cascade.most_tokens, cascade.most_tokens)
        count = choice_count(exchange.asked)
        self._confidences = [Confidence() for _ in range(count)]
        self._undecided = set(range(count))  # choices of which more is to be heard

    @property
    def escalated(self) -> bool:
        return self._serving is not None and self._serving is not self._small

    @property
    def charges(self) -> list[VariantCharge]:
        found: list[VariantCharge] = []
        for part in self._parts:
            role = "first try" if part is self._small and self.escalated else "answer"
            found += charges_for(part, role)
        return found

    async def begin(self) -> None:
        small = self._small = self._start(self._make_small(_measured(self.exchange.asked)))
        try:
            await small.begin()
        except ApiError as error:
            await self._escalate(f"it was refused ({error.code or error.kind})")
        else:
            self.exchange.prompt_tokens = small.exchange.prompt_tokens
            self.exchange.shaped_at = small.exchange.shaped_at

    async def run(self, take: Take) -> bool:
        if self._serving is None and not await self._decide():
            self._sum_up()
            return True  # the client has left
        assert self._serving is not None
        counting = self._counting(take)
        if not self._hand_over(counting):
            return False
        passing = self._adding(counting) if self.escalated else self._trimming(counting)
        ended = await self._serving.run(passing)
        if ended:
            self._sum_up()
        return ended

    # The decision

    async def _decide(self) -> bool:
        """False where the client left before."""
        small = self._small
        assert small is not None
        why = ""
        try:
            async with asyncio.timeout(self.cascade.within):
                await small.run(self._hold)
        except TimeoutError:
            why = f"nothing was decided within {self.cascade.within:g} s"
        except ApiError as error:
            why = f"it failed ({error.code or error.kind})"
        if self.gone:
            return False
        if why:
            await self._escalate(why)
        else:
            await self._weigh(small)
        return not self.gone

    async def _weigh(self, small: Answerer) -> None:
        cascade = self.cascade
        found = self.confidence = min(each.value(cascade.measure) for each in self._confidences)
        if found < cascade.threshold:
            await self._escalate(f"{cascade.measure} {found:.3f} < {cascade.threshold:.3f}")
            return
        self._serve(small)
        held, wanted = list(self._held), self.exchange.asked.sampling.logprobs
        self._held.clear()
        self._held.extend(_trimmed(piece, wanted) for piece in held)
        why = f"{cascade.measure} {found:.3f} >= {cascade.threshold:.3f}"
        self.decisions.append(RoutingDecision("cascade", small.exchange.served.name, why))

    def _hold(self, piece: ChoiceDelta) -> bool:
        self._held.append(piece)
        index = piece.index
        confidence = self._confidences[index]
        for token in piece.logprobs or ():
            if token.logprob is not None and confidence.tokens < self._after:
                confidence.add(token.logprob, [logprob for _, _, logprob in token.top])
        if piece.finish is not None or confidence.tokens >= self._after:
            self._undecided.discard(index)
        # A variant that tells no log-probabilities is not listened to for ever: a piece has a token at least.
        return bool(self._undecided) and len(self._held) <= (self._after + 1) * len(self._confidences)

    async def _escalate(self, why: str) -> None:
        assert self._small is not None
        self._held.clear()
        self._settle(self._small)
        large = self._start(self._make_large(self.exchange.asked))
        name = large.exchange.served.name
        self.decisions.append(RoutingDecision("cascade", name, f"{self._small.exchange.served.name}: {why}"))
        self._serve(large)
        await large.begin()
        if self.gone:
            large.cancel()
        self.exchange.prompt_tokens = large.exchange.prompt_tokens

    # What the client gets

    def _trimming(self, take: Take) -> Take:
        wanted = self.exchange.asked.sampling.logprobs
        return lambda piece: take(_trimmed(piece, wanted))

    def _adding(self, take: Take) -> Take:
        """The usage that is told has what the small model took: of all of it, so with one of the choices."""
        assert self._small is not None
        first_try = self._small.exchange.usage

        def added(piece: ChoiceDelta) -> bool:
            if piece.usage is not None and piece.index == 0:
                piece.usage = sum_usage((first_try, piece.usage))
            return take(piece)

        return added


def _measured(asked: TextRequest) -> TextRequest:
    """The same, with log-probabilities."""
    sampling = asked.sampling
    return asked.but(sampling=msgspec.structs.replace(sampling, logprobs=max(TOP, sampling.logprobs or 0)))


def _trimmed(piece: ChoiceDelta, wanted: int | None) -> ChoiceDelta:
    """As it would be if nobody but the client had asked for log-probabilities."""
    if piece.logprobs is not None:
        piece.logprobs = None if wanted is None else [_fewer(token, wanted) for token in piece.logprobs]
    return piece


def _fewer(token: TokenLogprob, wanted: int) -> TokenLogprob:
    return msgspec.structs.replace(token, top=token.top[:wanted])
