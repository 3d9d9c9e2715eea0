"""Fallback chains: where a variant fails, the next one goes on, and no text reaches a client twice without a mark.

Owns what becomes of an answer that broke. Before anything was delivered, the next step simply answers. After it, the
step says what is to be: `continue` lets it answer again and passes on only what goes beyond the text that was
delivered, which must be the same up to there; `restart` marks the choice and begins it anew; `error` ends it. The
engine's own client has continued what it can by then (a lost worker's streams, on another replica): this is for
variants and upstreams that are gone as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from headrace.config.routing_section import AfterBreak
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, RestartDelta, TokenUsage
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
    has_output,
    itemise_charges,
)
from headrace.gateway.routing.continuation import Continuation, DeliveredText, DivergedError
from headrace.gateway.serving.exchange import Exchange

_KINDS: Final = frozenset({"server_error", "overloaded_error", "rate_limit_error"})
_CODES: Final = frozenset({"context_length_exceeded"})  # another variant may have more room


def may_fall_back(error: ApiError) -> bool:
    """Whether another variant may do better: not where the request itself is wrong."""
    return error.kind in _KINDS or error.status >= 500 or error.code in _CODES


class FallbackStep(msgspec.Struct, frozen=True):
    variant: str
    make: AnswererFactory
    then: AfterBreak = "error"  # with a stream that broke after it had begun


class FallbackAnswerer(CompositeAnswerer):
    def __init__(
        self,
        exchange: Exchange,
        steps: Sequence[FallbackStep],
        *,
        patience: float = 10.0,
        diverged: Literal["restart", "error"] = "error",
        whole: bool = False,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`patience`: seconds that a step has for its first piece, where there is another after it. `whole`: nobody
        hears of the answer before it is whole, so that what breaks is simply begun anew."""
        super().__init__(exchange, settled=settled, clock=clock)
        self._steps = steps
        self._patience = patience
        self._on_divergence = diverged
        self._place = -1  # of the step that answers
        self._whole = whole
        self._said: dict[int, DeliveredText] = {}  # by choice: what was delivered
        self._joining: dict[int, Continuation] = {}  # choices of which the step repeats what was delivered
        self._finished: dict[int, tuple[Answerer, TokenUsage]] = {}  # choices that are whole, by whom
        self._heard = False  # something of this step
        self._since = 0  # the first part whose text the client has
        self._failed: ApiError | None = None  # found while a piece was looked at

    @property
    def charges(self) -> list[VariantCharge]:
        """The parts whose choices the client has, whole; of an answer that ended early, the one that computed most."""
        if self._is_answered():
            paid = list({id(part): part for part, _ in self._finished.values()}.values())
        else:
            candidates = self._parts[self._since :]
            paid = [max(candidates, key=lambda part: part.exchange.usage.output_tokens)] if candidates else []
        if len(paid) == 1:
            charges = charges_for(paid[0], "answer")
        else:
            told = {index: (part.exchange.served.name, usage) for index, (part, usage) in self._finished.items()}
            charges = itemise_charges(told, self.exchange.asked.n)
        for part in self._parts:
            if not any(part is each for each in paid):
                charges += charges_for(part, "broken", charged=False)
        return charges

    async def begin(self) -> None:
        await self._next(None)

    async def run(self, take: Take) -> bool:
        counting = self._counting(take)
        while True:
            if not self._hand_over(counting):
                return False
            part = self._serving
            assert part is not None
            try:
                ended = await self._run(part, counting)
                if self._failed is not None:
                    error, self._failed = self._failed, None
                    raise error
            except ApiError as error:
                if not (self.gone or self._is_answered()):
                    await self._go_on(error)
                    if not self.gone:
                        continue
                ended = True
            if not ended and self._held:
                continue  # it was not the client who wanted no more
            if ended:
                self._sum_up()
            return ended

    async def _run(self, part: Answerer, take: Take) -> bool:
        if self._heard or self._is_last():
            return await part.run(lambda piece: self._pass(piece, take))
        try:
            async with asyncio.timeout(self._patience) as bound:

                def passed(piece: ChoiceDelta) -> bool:
                    if not self._heard and has_output(piece):
                        if bound.expired():
                            return False  # it is given up in this very turn
                        bound.reschedule(None)
                    return self._pass(piece, take)

                return await part.run(passed)
        except TimeoutError:
            raise _too_late(self._steps[self._place].variant, self._patience) from None

    def _is_answered(self) -> bool:
        return len(self._finished) == choice_count(self.exchange.asked)

    def _is_last(self) -> bool:
        return self._place + 1 >= len(self._steps)

    # Steps

    async def _next(self, error: ApiError | None) -> None:
        """Begins the next step that can be begun; raises the last error where there is none."""
        while not self._is_last():
            then = self._steps[self._place + 1].then
            if error is not None and self._delivered() and then == "error":
                break
            self._place += 1
            step = self._steps[self._place]
            part = self._start(step.make(self.exchange.asked))
            self._heard = False
            self._serve(part)
            try:
                await self._begin(part)
            except ApiError as caught:
                self._settle(part, caught)
                if may_fall_back(caught):
                    error = caught
                elif error is None:
                    raise
                continue  # what another variant took is not wrong in itself
            if error is not None:
                told = error.code or error.kind
                self.decisions.append(RoutingDecision("fallback", step.variant, f"the one before: {told}"))
            self.exchange.prompt_tokens = part.exchange.prompt_tokens
            self.exchange.shaped_at = self.exchange.shaped_at or part.exchange.shaped_at
            if self.gone:
                part.cancel()
            return
        assert error is not None
        raise error

    async def _begin(self, part: Answerer) -> None:
        if self._is_last():
            await part.begin()
            return
        try:
            async with asyncio.timeout(self._patience):
                await part.begin()
        except TimeoutError:
            raise _too_late(self._steps[self._place].variant, self._patience) from None

    async def _go_on(self, error: ApiError) -> None:
        """After an answer broke; raises the error where nothing may go on with it."""
        part = self._serving
        assert part is not None
        self._settle(part, error)
        if not may_fall_back(error):
            raise error
        self._joining.clear()
        await self._next(error)
        open_choices = [index for index in range(choice_count(self.exchange.asked)) if index not in self._finished]
        if self._delivered() and self._steps[self._place].then == "continue":
            self._joining = {
                index: Continuation(said) for index in open_choices if (said := self._said.get(index)) and said.anything
            }
            return
        self._since = len(self._parts) - 1
        if self._delivered() or self._whole:
            for index in open_choices:
                self._restart(index, error.code or error.kind)
        self._said = {index: self._said[index] for index in self._finished}

    def _delivered(self) -> bool:
        """Whether a client has heard something of the answer."""
        return not self._whole and any(said.anything for said in self._said.values())

    def _restart(self, index: int, why: str) -> None:
        self._held.append(RestartDelta(index, variant=self.exchange.served.name, why=why))
        self._said.pop(index, None)

    # Pieces

    def _pass(self, piece: ChoiceDelta, take: Take) -> bool:
        index = piece.index
        if isinstance(piece, RestartDelta):  # by the step itself, which only an answer has that nobody has heard yet
            if self._finished.pop(index, None) is not None:
                self._open += 1
            self._said.pop(index, None)
            return take(piece)
        if not self._heard and has_output(piece) and self._serving is not None:
            self._heard = True
            self.exchange.served = self._serving.exchange.served  # a cascade knows by now
        if index in self._finished:
            return True  # that was whole before the break
        joining = self._joining.get(index)
        if joining is not None:
            try:
                joined = joining.read(piece)
            except DivergedError as error:
                return self._diverge(index, joining, str(error))
            if joined is None:
                return True
            del self._joining[index]
            piece = joined
        self._note(piece)
        return take(piece)

    def _note(self, piece: ChoiceDelta) -> None:
        said = self._said.get(piece.index)
        if said is None:
            said = self._said[piece.index] = DeliveredText()
            self.exchange.first_at = self.exchange.first_at or self._clock()
        said.add(piece)
        if piece.finish is not None:
            assert self._serving is not None
            self._finished[piece.index] = (self._serving, piece.usage or TokenUsage())

    def _diverge(self, index: int, joining: Continuation, why: str) -> bool:
        """Always False: what is held comes first, or there is an error to be told."""
        if self._on_divergence == "error":
            self._failed = ApiError(
                "the answer broke off, and could not be continued", kind="server_error", code="generation_failed"
            )
            self._place = len(self._steps)  # nobody else can go on with it either
            return False
        del self._joining[index]
        self._since = len(self._parts) - 1
        self._restart(index, why)
        again = joining.all_of_it(index)
        self._note(again)
        self._held.append(again)
        return False


def _too_late(variant: str, seconds: float) -> ApiError:
    return ApiError(
        f"'{variant}' said nothing within {seconds:g} s", kind="overloaded_error", code="too_late", retry_after=1.0
    )
