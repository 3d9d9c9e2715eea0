"""Golden fallback: an answer that fails an online check is answered by the golden variant instead.

An answer that is not streamed is held until its end and checked whole. Of a stream only the beginning is held, because
what the client has cannot be taken back: its confidence, and whether it can still become JSON. The tenant is charged
for the answer that it gets. Does not know the checks of whole answers: they are passed in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from headrace.config.routing_section import GoldenConfig
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, RestartDelta, TakeDelta
from headrace.gateway.routing.cascade import with_logprobs, without_extra_logprobs
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    DecidingAnswerer,
    RoutingDecision,
    VariantCharge,
    charges_for,
    choice_count,
)
from headrace.gateway.routing.confidence import Confidence
from headrace.gateway.routing.rewrite import drop_rewrite
from headrace.gateway.serving.exchange import Exchange

STAGE: Final = "golden"
_MOST_HELD: Final = 65_536  # deltas of an answer; a longer one is passed on

# Returns the check that a whole answer fails; empty or None if it passes.
AnswerCheck = Callable[[Sequence[Choice], Exchange], str | None]


class GoldenAnswerer(DecidingAnswerer):
    holds_back = True

    def __init__(
        self,
        exchange: Exchange,
        first: AnswererFactory,
        golden: AnswererFactory,
        config: GoldenConfig,
        check: AnswerCheck | None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(exchange, clock=clock)
        self.config = config
        self._make_first = first
        self._make_golden = golden
        self._first: Answerer | None = None
        self._check = check
        self._choices = [Choice(index) for index in range(choice_count(exchange.text_request))]
        self._confidences = [Confidence() for _ in self._choices]
        self._ended: set[int] = set()
        self._measures = "confidence" in config.checks

    @property
    def charges(self) -> list[VariantCharge]:
        charges: list[VariantCharge] = []
        for part in self._parts:
            serves = part is self._serving or self._serving is None
            charges += charges_for(part, "answer" if serves else "first try", charged=serves)
        return charges

    async def begin(self) -> None:
        text_request = self.exchange.text_request
        first = self._first = self._start(
            self._make_first(with_logprobs(text_request) if self._measures else text_request)
        )
        await first.begin()
        self.exchange.prompt_tokens, self.exchange.shaped_at = first.exchange.prompt_tokens, first.exchange.shaped_at

    async def _run_serving(self, serving: Answerer, take: TakeDelta) -> bool:
        return await serving.run(self._hide_logprobs(take) if serving is self._first else take)

    async def _decide(self) -> bool:
        """Hold the first answer, check it, and choose the one that is served; False if the client left first."""
        first = self._first
        assert first is not None
        failed = ""
        try:
            async with asyncio.timeout(self.config.within_s):
                await first.run(self._hold)
            failed = self._failed_check()
        except TimeoutError:
            pass  # what came so far is served, and the rest as it comes
        if self.gone:
            return False
        if failed:
            await self._escalate(failed)
        else:
            self._serve(first)
            wanted = self.exchange.text_request.sampling.logprobs
            if self._measures:
                held = [without_extra_logprobs(piece, wanted) for piece in self._held]
                self._held.clear()
                self._held.extend(held)
        return not self.gone

    def _hold(self, piece: ChoiceDelta) -> bool:
        self._held.append(piece)
        index = piece.index
        if isinstance(piece, RestartDelta):
            self._choices[index], self._confidences[index] = Choice(index), Confidence()
            self._ended.discard(index)
            return True
        self._choices[index].add(piece)
        for token in piece.logprobs or ():
            if token.logprob is not None:
                self._confidences[index].add(token.logprob)
        if piece.finish is not None:
            self._ended.add(index)
        if len(self._held) >= _MOST_HELD:
            return False
        return not (self.exchange.text_request.stream and self._has_begun())

    def _has_begun(self) -> bool:
        """Return whether enough of a stream is held to decide."""
        return all(
            index in self._ended or max(confidence.tokens, choice.content.count(" ")) >= self.config.stream_tokens
            for index, (confidence, choice) in enumerate(zip(self._confidences, self._choices, strict=True))
        )

    def _failed_check(self) -> str:
        checks, is_whole = self.config.checks, len(self._ended) == len(self._choices)
        if self._measures:
            for confidence in self._confidences:
                if confidence.tokens and confidence.value("mean") < self.config.confidence:
                    return "confidence"
        if is_whole and self._check is not None:
            failed = self._check(self._choices, self.exchange) or ""
            return failed if failed in checks else ""
        if "json" in checks and self._wants_json() and any(map(_cannot_be_json, self._choices)):
            return "json"
        return ""

    def _wants_json(self) -> bool:
        grammar = self.exchange.text_request.grammar
        return grammar is not None and grammar.kind in ("json_object", "json_schema")

    async def _escalate(self, failed: str) -> None:
        assert self._first is not None
        self._held.clear()
        self._settle(self._first)
        instead_of = self._first.exchange.served.name
        golden = self._start(self._make_golden(self.exchange.text_request))
        self.decisions.append(RoutingDecision(STAGE, golden.exchange.served.name, f"{instead_of}: {failed}"))
        drop_rewrite(self.exchange)
        self._serve(golden)
        await golden.begin()
        if self.gone:
            golden.cancel()
        self.exchange.prompt_tokens = golden.exchange.prompt_tokens

    def _hide_logprobs(self, take: TakeDelta) -> TakeDelta:
        if not self._measures:
            return take
        wanted = self.exchange.text_request.sampling.logprobs
        return lambda piece: take(without_extra_logprobs(piece, wanted))


def failed_golden_check(decisions: Sequence[RoutingDecision]) -> tuple[str, str, str] | None:
    """Return the check that failed, the variant that failed it and the one that answered; None if all is well."""
    for decision in decisions:
        if decision.stage == STAGE:
            instead_of, _, check = decision.why.rpartition(": ")
            return check, instead_of, decision.chosen
    return None


def _cannot_be_json(choice: Choice) -> bool:
    begun = choice.content.lstrip()
    return bool(begun) and begun[0] not in '{["-0123456789tfn'
