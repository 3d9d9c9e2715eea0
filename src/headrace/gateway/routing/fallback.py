"""Fallback chains: if a variant fails, the next one goes on, and no text reaches a client twice without a mark.

Before anything was delivered, the next step simply answers. After that, the step's `then` decides: `continue` answers
again and passes on only what follows the delivered text, which must match; `restart` marks the choice and begins it
anew; `error` ends it. The engine's client has by then continued what it can (a lost worker's streams, on another
replica): this is for variants and upstreams that are gone as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from headrace.config.routing_section import AfterBreak
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, RestartDelta, TakeDelta, TokenUsage
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    CompositeAnswerer,
    RoutingDecision,
    SettledCallback,
    VariantCharge,
    charges_for,
    choice_count,
    has_output,
    itemise_charges,
)
from headrace.gateway.routing.continuation import Continuation, DeliveredText, DivergedError
from headrace.gateway.serving.exchange import Exchange

_RETRYABLE_KINDS: Final = frozenset({"server_error", "overloaded_error", "rate_limit_error"})
_RETRYABLE_CODES: Final = frozenset({"context_length_exceeded"})  # another variant may have more room


def may_fall_back(error: ApiError) -> bool:
    """True if another variant may succeed: not if the request itself is wrong."""
    return error.kind in _RETRYABLE_KINDS or error.status >= 500 or error.code in _RETRYABLE_CODES


class FallbackStep(msgspec.Struct, frozen=True):
    variant: str
    make: AnswererFactory
    then: AfterBreak = "error"  # how it takes over a stream that broke after its first output


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
        """`patience`: seconds until a step's first output, if another step follows. `whole`: the client sees the answer
        only once it is complete, so a broken answer simply starts again."""
        super().__init__(exchange, settled=settled, clock=clock)
        self._steps = steps
        self._patience = patience
        self._on_divergence = diverged
        self._index = -1  # of the current step
        self._whole = whole
        self._delivered: dict[int, DeliveredText] = {}  # by choice
        self._continuations: dict[int, Continuation] = {}  # choices whose delivered text the step repeats
        self._finished: dict[int, tuple[Answerer, TokenUsage]] = {}  # complete choices and their parts
        self._has_output = False  # of the current step
        self._first_delivered = 0  # index of the first part whose text the client has
        self._error: ApiError | None = None  # raised by handling a delta

    @property
    def charges(self) -> list[VariantCharge]:
        """Charges the parts whose complete choices the client has; after an early end, the part with most output."""
        if self._is_answered():
            paid = list({id(part): part for part, _ in self._finished.values()}.values())
        else:
            candidates = self._parts[self._first_delivered :]
            paid = [max(candidates, key=lambda part: part.exchange.usage.output_tokens)] if candidates else []
        if len(paid) == 1:
            charges = charges_for(paid[0], "answer")
        else:
            by_choice = {index: (part.exchange.served.name, usage) for index, (part, usage) in self._finished.items()}
            charges = itemise_charges(by_choice, self.exchange.text_request.n)
        for part in self._parts:
            if not any(part is each for each in paid):
                charges += charges_for(part, "broken", charged=False)
        return charges

    async def begin(self) -> None:
        await self._next(None)

    async def run(self, take: TakeDelta) -> bool:
        counting = self._counting(take)
        while True:
            if not self._hand_over(counting):
                return False
            part = self._serving
            assert part is not None
            try:
                ended = await self._run(part, counting)
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
            except ApiError as error:
                if not (self.gone or self._is_answered()):
                    await self._take_over(error)
                    if not self.gone:
                        continue
                ended = True
            if not ended and self._held:
                continue  # not the client paused it, but a held delta
            if ended:
                self._sum_up()
            return ended

    async def _run(self, part: Answerer, take: TakeDelta) -> bool:
        if self._has_output or self._is_last():
            return await part.run(lambda piece: self._pass(piece, take))
        try:
            async with asyncio.timeout(self._patience) as bound:

                def passed(piece: ChoiceDelta) -> bool:
                    if not self._has_output and has_output(piece):
                        if bound.expired():
                            return False  # it has just timed out
                        bound.reschedule(None)
                    return self._pass(piece, take)

                return await part.run(passed)
        except TimeoutError:
            raise _timeout_error(self._steps[self._index].variant, self._patience) from None

    def _is_answered(self) -> bool:
        return len(self._finished) == choice_count(self.exchange.text_request)

    def _is_last(self) -> bool:
        return self._index + 1 >= len(self._steps)

    # Steps

    async def _next(self, error: ApiError | None) -> None:
        """Start the next step that can start; raise the last error if there is none."""
        while not self._is_last():
            then = self._steps[self._index + 1].then
            if error is not None and self._has_delivered() and then == "error":
                break
            self._index += 1
            step = self._steps[self._index]
            part = self._start(step.make(self.exchange.text_request))
            self._has_output = False
            self._serve(part)
            try:
                await self._begin(part)
            except ApiError as caught:
                self._settle(part, caught)
                if may_fall_back(caught):
                    error = caught
                elif error is None:
                    raise
                continue  # an earlier variant accepted the request, so the request itself is not wrong
            if error is not None:
                reason = f"the step before failed: {error.code or error.kind}"
                self.decisions.append(RoutingDecision("fallback", step.variant, reason))
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
            raise _timeout_error(self._steps[self._index].variant, self._patience) from None

    async def _take_over(self, error: ApiError) -> None:
        """Continue after a broken answer; raise the error if no step may."""
        part = self._serving
        assert part is not None
        self._settle(part, error)
        if not may_fall_back(error):
            raise error
        self._continuations.clear()
        await self._next(error)
        open_choices = [
            index for index in range(choice_count(self.exchange.text_request)) if index not in self._finished
        ]
        if self._has_delivered() and self._steps[self._index].then == "continue":
            self._continuations = {
                index: Continuation(said)
                for index in open_choices
                if (said := self._delivered.get(index)) and said.is_visible
            }
            return
        self._first_delivered = len(self._parts) - 1
        if self._has_delivered() or self._whole:
            for index in open_choices:
                self._restart(index, error.code or error.kind)
        self._delivered = {index: self._delivered[index] for index in self._finished}

    def _has_delivered(self) -> bool:
        """True if the client has seen output."""
        return not self._whole and any(said.is_visible for said in self._delivered.values())

    def _restart(self, index: int, why: str) -> None:
        self._held.append(RestartDelta(index, variant=self.exchange.served.name, why=why))
        self._delivered.pop(index, None)

    def _pass(self, piece: ChoiceDelta, take: TakeDelta) -> bool:
        index = piece.index
        if isinstance(piece, RestartDelta):  # by the step itself, before the client has seen the answer
            if self._finished.pop(index, None) is not None:
                self._open += 1
            self._delivered.pop(index, None)
            return take(piece)
        if not self._has_output and has_output(piece) and self._serving is not None:
            self._has_output = True
            self.exchange.served = self._serving.exchange.served  # a cascade has decided by now
        if index in self._finished:
            return True  # complete before the break
        continuation = self._continuations.get(index)
        if continuation is not None:
            try:
                rest = continuation.read(piece)
            except DivergedError as error:
                return self._diverge(index, continuation, str(error))
            if rest is None:
                return True
            del self._continuations[index]
            piece = rest
        self._record(piece)
        return take(piece)

    def _record(self, piece: ChoiceDelta) -> None:
        said = self._delivered.get(piece.index)
        if said is None:
            said = self._delivered[piece.index] = DeliveredText()
            self.exchange.first_at = self.exchange.first_at or self._clock()
        said.add(piece)
        if piece.finish is not None:
            assert self._serving is not None
            self._finished[piece.index] = (self._serving, piece.usage or TokenUsage())

    def _diverge(self, index: int, continuation: Continuation, why: str) -> bool:
        """Handle text that does not match. Returns False: held deltas come first, or an error."""
        if self._on_divergence == "error":
            self._error = ApiError(
                "The answer broke off and could not be continued. Send the request again.",
                kind="server_error",
                code="generation_failed",
            )
            self._index = len(self._steps)  # no other step can continue it either
            return False
        del self._continuations[index]
        self._first_delivered = len(self._parts) - 1
        self._restart(index, why)
        again = continuation.whole_answer(index)
        self._record(again)
        self._held.append(again)
        return False


def _timeout_error(variant: str, seconds: float) -> ApiError:
    return ApiError(
        f"Variant '{variant}' sent nothing within {seconds:g} s. Retry later.",
        kind="overloaded_error",
        code="too_late",
        retry_after=1.0,
    )
