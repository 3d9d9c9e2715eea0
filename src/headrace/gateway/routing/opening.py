"""Openings: a small model begins the answer at once, and a large one takes over and continues its text.

While the small model writes, the large one computes the prompt. It then continues after the text that was sent, with
that text in its prompt. If either model fails, the other one carries on. Both are charged for what they computed; of
the small model only the text that was sent counts. Does not choose which requests are opened: the router does.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from msgspec.structs import replace

from headrace.config.routing_section import OpeningConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, TakeDelta, TextRequest, TokenUsage
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    CompositeAnswerer,
    RoutingDecision,
    SettledCallback,
    VariantCharge,
    charges_for,
    has_output,
    sum_usage,
)
from headrace.gateway.sentences import split_sentences
from headrace.gateway.serving.exchange import Exchange

ROLE: Final = "opening"  # of the small model's charge
_READ_BACK: Final = 600  # characters in which the end of a sentence is looked for


def why_not_opened(text_request: TextRequest) -> str | None:
    """Return why the large model must answer a request alone; None if a small one may open it."""
    if not text_request.stream:
        return "the answer is not streamed"
    if text_request.grammar is not None:
        return "the answer has a grammar"
    if text_request.tools and text_request.choosing != "none":
        return "the model may call tools"
    if text_request.n != 1 or len(text_request.prompts or (None,)) != 1:
        return "there are several answers"
    if text_request.echo or text_request.prompt_logprobs is not None or text_request.sampling.logprobs is not None:
        return "log-probabilities are requested"
    if text_request.ignore_eos or text_request.max_tokens == 0:
        return "the answer has a fixed length"
    if text_request.degrade is not None:
        return "the request restricts degradation"
    return None


class OpeningAnswerer(CompositeAnswerer):
    def __init__(
        self,
        exchange: Exchange,
        small: AnswererFactory,
        large: AnswererFactory,
        config: OpeningConfig,
        *,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(exchange, settled=settled, clock=clock)
        self.config = config
        self._make_small = small
        self._make_large = large
        self._small: Answerer | None = None
        self._large: Answerer | None = None  # that continues the text
        self._ahead: Answerer | None = None  # computes the large model's prompt
        self._readiness: asyncio.Task[ApiError | None] | None = None
        self._text = ""  # of the small model, as sent
        self._tokens = 0  # of it
        self._has_taken_over = False
        self._small_error: ApiError | None = None
        self._small_over = False  # the client has all of the small model's answer
        self._why = ""  # the end of the opening
        limit = exchange.text_request.max_tokens
        self._most = config.tokens if limit is None else min(config.tokens, max(1, limit // 2))
        self._began = time.monotonic()

    # Work and charges

    @property
    def charges(self) -> list[VariantCharge]:
        small, ahead, large = self._small, self._ahead, self._large
        opens = small is None or self._serving is not small
        charges: list[VariantCharge] = []
        if small is not None:
            role = ROLE if opens else "answer"
            charges.append(VariantCharge(small.exchange.served.name, self._opening_usage(), role, bool(self._tokens)))
        if large is not None and self._has_taken_over:
            answers = charges_for(large, "answer")
            if answers:
                answers[-1] = replace(answers[-1], usage=self._with_prompt(answers[-1].usage))
            charges += answers
        else:  # the small model's answer is all that the client has
            for part in (ahead, large):
                if part is not None:
                    charges += charges_for(part, "broken", charged=False)
        return charges

    def _opening_usage(self) -> TokenUsage:
        """Return what the small model computed of the text that was sent."""
        assert self._small is not None
        if not self._tokens:
            return TokenUsage()
        exchange = self._small.exchange
        prompt_tokens = exchange.usage.prompt_tokens or exchange.prompt_tokens
        return replace(exchange.usage, prompt_tokens=prompt_tokens, output_tokens=self._tokens)

    def _with_prompt(self, answer: TokenUsage) -> TokenUsage:
        """Return the usage of the prompt computed ahead and the answer after it, as of one request."""
        if self._ahead is None or not self._ahead.exchange.usage.prompt_tokens:
            return answer
        ahead = self._ahead.exchange.usage
        return replace(
            answer,
            cached_tokens=min(answer.cached_tokens, ahead.cached_tokens),
            queue_s=ahead.queue_s + answer.queue_s,
            prefill_s=ahead.prefill_s + answer.prefill_s,
            prefill_steps=ahead.prefill_steps + answer.prefill_steps,
        )

    def _sum_up(self) -> None:
        super()._sum_up()
        exchange, small, large = self.exchange, self._small, self._large
        if self._ahead is not None and self._ahead.exchange.prompt_tokens:
            exchange.prompt_tokens = self._ahead.exchange.prompt_tokens
        if small is None or large is None or self._serving is not large or not self._tokens:
            return
        if large.exchange.first_at:
            wait = max(0.0, large.exchange.first_at - small.exchange.last_at)
            exchange.gaps = [*small.exchange.gaps, wait, *large.exchange.gaps]
        exchange.reading_s = small.exchange.reading_s + large.exchange.reading_s

    # The answer

    async def begin(self) -> None:
        asked = self.exchange.text_request
        small = self._small = self._start(self._make_small(asked))
        try:
            await small.begin()
        except ApiError as error:
            self._small_error = error
            self._why = f"the small model rejected the request ({error.code or error.kind})"
            await self._continue()
            return
        self.exchange.shaped_at = small.exchange.shaped_at
        # A request without output leaves the prompt in the large model's prefix cache.
        alone = asked.but(max_tokens=0, min_tokens=0, stop=(), stop_ids=frozenset[int]())
        ahead = self._ahead = self._start(self._make_large(alone))
        try:
            await ahead.begin()
        except ApiError as error:
            self._readiness = asyncio.ensure_future(_return(error))
        else:
            self.exchange.prompt_tokens = ahead.exchange.prompt_tokens
            self._readiness = asyncio.ensure_future(_run_ahead(ahead))

    async def run(self, take: TakeDelta) -> bool:
        counting = self._counting(take)
        if self._serving is None and not await self._write_opening(counting):
            return False
        if not self.gone and self._serving is not self._small and not await self._run_large(counting):
            return False
        if not self.gone and self._serving is self._small and not await self._run_small(counting):
            return False
        self._sum_up()
        return True

    def cancel(self) -> None:
        super().cancel()
        if self._readiness is not None:
            self._readiness.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        if self._readiness is not None:
            self._readiness.cancel()
        super().settle(error)

    async def _write_opening(self, take: TakeDelta) -> bool:
        """Send the small model's text until another part serves. Return False if the client asked for a pause."""
        small, readiness = self._small, self._readiness
        assert small is not None
        assert readiness is not None
        if self._held:  # the client paused where the opening ended
            await self._take_over()
            return True
        running = asyncio.ensure_future(small.run(lambda piece: self._send(take, piece)))
        try:
            await asyncio.wait((running, readiness), return_when=asyncio.FIRST_COMPLETED)
            timeout = None
            if _is_ready(readiness):
                # An opening that has not begun gains nothing, and a small model that hangs is not waited for.
                timeout = self.config.within_s if self._tokens else 0.0
            await asyncio.wait((running,), timeout=timeout)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        if self.gone:
            return True
        if running.cancelled():
            self._why = "because the small model was late" if self._tokens else "because it was first"
        elif isinstance(error := running.exception(), ApiError):
            self._small_error = error
            self._why = f"because the small model failed ({error.code or error.kind})"
        elif error is not None:
            raise error
        elif self._small_over:
            self._keep_small(self._why)
            return True
        elif not self._held:
            return False
        await self._take_over()
        return True

    def _send(self, take: TakeDelta, piece: ChoiceDelta) -> bool:
        """Send a delta of the small model, or hold it where the opening ends. Return False to pause."""
        readiness = self._readiness
        assert readiness is not None
        if piece.finish is not None:
            if piece.finish != "stop" or piece.stop is not None or _has_failed(readiness):
                ended = f"the answer ended ({piece.finish})"
                self._why = _failure(_error_of(readiness)) if _has_failed(readiness) else ended
                return self._pass(take, piece)
            # Its text is sent, and its end is held: the large model may have more to say.
            self._held.append(replace(piece, content="", tokens=0))
            self._why = "after the small model's answer"
            if piece.content or piece.tokens:
                self._pass(take, replace(piece, finish=None, usage=None))
            return False
        if _has_failed(readiness):
            return self._pass(take, piece)
        why = self._why_here(piece, _is_ready(readiness))
        if not why:
            return self._pass(take, piece)
        self._why = why
        self._held.append(piece)
        return False

    def _why_here(self, piece: ChoiceDelta, is_ready: bool) -> str:
        """Return why the opening ends before a delta; nothing if it does not."""
        config = self.config
        if self._tokens >= self._most:
            return f"after {self._tokens} tokens"
        if not is_ready or config.takeover == "tokens":
            return ""
        if not self._tokens:
            return "because it was first"
        if config.takeover == "ready":
            return "once it was ready"
        return "at the end of a sentence" if _ends_sentence(self._text, piece.content) else ""

    def _pass(self, take: TakeDelta, piece: ChoiceDelta) -> bool:
        if not self.exchange.first_at and has_output(piece):
            self.exchange.first_at = self._clock()
        self._tokens += piece.tokens
        self._text += piece.content
        if piece.finish is not None:
            self._small_over = True
            if piece.usage is not None:
                piece.usage = self._opening_usage()
        return take(piece)

    async def _take_over(self) -> None:
        """Let the large model continue, or the small one if that fails."""
        readiness = self._readiness
        assert readiness is not None
        await asyncio.wait((readiness,))
        if self.gone:
            return
        error = None if _is_ready(readiness) else _error_of(readiness)
        if error is None:
            try:
                await self._continue()
            except ApiError as caught:
                error = caught
        if error is not None:
            self._give_back(error)

    async def _continue(self) -> None:
        """Start the large model after the text that was sent."""
        asked, tokens = self.exchange.text_request, self._tokens
        if self._text:
            left = None if asked.max_tokens is None else max(1, asked.max_tokens - tokens)
            asked = asked.but(begun=self._text, max_tokens=left, min_tokens=max(0, asked.min_tokens - tokens))
        large = self._large = self._start(self._make_large(asked))
        self._serve(large)
        await large.begin()
        if self.gone:
            large.cancel()
        if self._ahead is None:
            self.exchange.prompt_tokens = large.exchange.prompt_tokens

    async def _run_large(self, take: TakeDelta) -> bool:
        """Run the large model. If it fails before it has said anything, the small one serves."""
        large = self._large
        assert large is not None

        def passed(piece: ChoiceDelta) -> bool:
            self._note_takeover()
            if piece.usage is not None:
                usages = [self._with_prompt(piece.usage)]
                if self._tokens:
                    usages.append(self._opening_usage())
                piece.usage = sum_usage(usages)
            return take(piece)

        try:
            return await large.run(passed)
        except ApiError as error:
            if self._has_taken_over:
                raise
            self._give_back(error)
            return True

    async def _run_small(self, take: TakeDelta) -> bool:
        assert self._small is not None
        while self._held:
            if not self._pass(take, self._held.popleft()):
                return False
        return self._small_over or await self._small.run(lambda piece: self._pass(take, piece))

    def _give_back(self, error: ApiError) -> None:
        """Have the small model answer to its end, because the large one has failed."""
        if self._small_error is not None:
            raise error
        self._keep_small(_failure(error))

    def _keep_small(self, why: str) -> None:
        assert self._small is not None
        self._serve(self._small)
        name = self._small.exchange.served.name
        self.decisions.append(RoutingDecision(ROLE, name, f"answers alone: {why}"))
        self._note(name, None, why)

    def _note_takeover(self) -> None:
        if self._has_taken_over:
            return
        assert self._large is not None
        assert self._small is not None
        self._has_taken_over = True
        self._held.clear()
        self._settle(self._small)
        name = self._large.exchange.served.name
        if self._tokens:
            small = self._small.exchange.served.name
            self.decisions.append(RoutingDecision(ROLE, name, f"took over from {small} {self._why}"))
            self._note(small, name, self._why)
        else:
            self.decisions.append(RoutingDecision(ROLE, name, f"answers alone: {self._why}"))

    def _note(self, small: str, large: str | None, why: str) -> None:
        """Mark the answer: in the response, the log and the trace."""
        exchange = self.exchange
        exchange.notes["opening"] = {"variant": small, "tokens": self._tokens, "continued_by": large, "why": why}
        exchange.log_fields["opened_by"] = small
        exchange.timeline.part("generate", "opening", self._began, variant=small, tokens=self._tokens, why=why)


def _ends_sentence(sent: str, following: str) -> bool:
    """Return whether a sentence ends where `sent` does, in a text that goes on with `following`."""
    tail = sent[-_READ_BACK:]
    if not tail.strip():
        return False
    ends = [end for _, end in split_sentences(tail + following + " .")[:-1]]
    return any(len(tail.rstrip()) <= end <= len(tail) for end in ends)


def _failure(error: ApiError) -> str:
    return f"the large model failed ({error.code or error.kind})"


async def _run_ahead(ahead: Answerer) -> ApiError | None:
    try:
        await ahead.run(lambda piece: True)
    except ApiError as error:
        return error
    return None


async def _return(error: ApiError) -> ApiError | None:
    return error


def _is_ready(readiness: asyncio.Task[ApiError | None]) -> bool:
    return readiness.done() and _result(readiness) is None


def _has_failed(readiness: asyncio.Task[ApiError | None]) -> bool:
    return readiness.done() and _result(readiness) is not None


def _result(readiness: asyncio.Task[ApiError | None]) -> ApiError | None:
    if not readiness.cancelled() and readiness.exception() is None:
        return readiness.result()
    return ApiError("The large model did not compute the prompt.", kind="server_error", code="generation_failed")


def _error_of(readiness: asyncio.Task[ApiError | None]) -> ApiError:
    error = _result(readiness)
    assert error is not None
    return error
