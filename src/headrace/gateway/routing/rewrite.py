"""Rewrites: a sampled answer is a draft, and a second pass rewrites it at temperature 0 before it is cached or served.

The rewriter reads the conversation, the draft and an instruction; with the same variant, all but the instruction is in
its prefix cache. The draft is served where it must not or cannot be rewritten: it was cut, the deadline is too near,
the rewriter fails, or the rewrite loses a number or a citation. Such an answer is not cached. Both passes are charged.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.config.routing_section import RewriteConfig
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, RestartDelta, TakeDelta, TextRequest
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    DecidingAnswerer,
    RoutingDecision,
    SettledCallback,
    VariantCharge,
    charges_for,
    sum_usage,
)
from headrace.gateway.serving.exchange import Exchange

STAGE: Final = "rewrite"
ROLE: Final = "draft"  # of the charge for what was rewritten
NO_REWRITE: Final = "none"  # with which a request declines
_MOST_HELD: Final = 65_536  # deltas of an answer; a longer draft is passed on
_ROOM: Final = 64  # tokens that a rewrite may have beyond twice the draft's
_CITATION: Final = re.compile(r"\[\d{1,4}\]")
_NUMBER: Final = re.compile(r"\d+(?:[.,:/]\d+)*")


def choose_rewrite(rewrites: Mapping[str, RewriteConfig], exchange: Exchange) -> tuple[str, RewriteConfig] | None:
    """Return the rewrite of a request by its name; None if it has none, or is not sampled above its temperature."""
    text_request = exchange.text_request
    named = text_request.rewrite
    if named == NO_REWRITE or (named is None and not rewrites):
        return None
    if named is not None and named not in rewrites:
        known = ", ".join([*rewrites, NO_REWRITE])
        raise invalid_request(f"Unknown rewrite '{named}'. Expected one of: {known}.", "rewrite")
    if named is None:
        surface = exchange.surface
        named = next((name for name, config in rewrites.items() if surface in config.surfaces), None)
    if named is None or text_request.sampling.temperature <= rewrites[named].above:
        return None
    return named, rewrites[named]


def why_not_rewritten(text_request: TextRequest) -> str | None:
    """Return why an answer must be served as it was sampled; None if it may be rewritten."""
    if not text_request.messages:
        return "the prompt is not a chat"
    if text_request.messages[-1].get("role") == "assistant" or text_request.begun:
        return "the answer continues a text"
    if text_request.grammar is not None:
        return "the answer has a grammar"
    if text_request.tools and text_request.choosing != "none":
        return "the model may call tools"
    if text_request.n != 1:
        return "there are several answers"
    if text_request.echo or text_request.prompt_logprobs is not None or text_request.sampling.logprobs is not None:
        return "log-probabilities are requested"
    if text_request.ignore_eos or text_request.max_tokens == 0:
        return "the answer has a fixed length"
    return None


def with_draft_seed(text_request: TextRequest) -> TextRequest:
    """Seed the draft by what the request asks for, so that the same request always gets the same answer."""
    if text_request.seeded:
        return text_request
    sampling = replace(text_request.sampling, seed=0)
    asked = [text_request.model, text_request.messages, text_request.sources, text_request.max_tokens, sampling]
    try:
        digest = hashlib.sha256(msgspec.msgpack.encode(asked, order="deterministic")).digest()
    except (TypeError, ValueError, OverflowError, RecursionError):  # no cache has a key for it either
        return text_request
    seed = int.from_bytes(digest[:8], "little") >> 1
    return text_request.but(sampling=replace(sampling, seed=seed), seeded=True)


def rewrite_request(text_request: TextRequest, draft: Choice, config: RewriteConfig) -> TextRequest:
    """Return the request for the rewrite of a draft: deterministic, and not much longer than it."""
    messages: list[dict[str, Any]] = [
        *(text_request.messages or ()),
        {"role": "assistant", "content": draft.content},
        {"role": "user", "content": config.instruction},
    ]
    most = 2 * draft.usage.output_tokens + _ROOM
    asked = text_request.sampling
    sampling = SamplingParams(temperature=0.0, logit_bias=asked.logit_bias, logprobs=asked.logprobs)
    return text_request.but(
        messages=messages,
        sampling=sampling,
        max_tokens=most if text_request.max_tokens is None else min(most, text_request.max_tokens),
        min_tokens=0,
        think=False,
        prediction=draft.content,
    )


def lost_in_rewriting(draft: str, rewrite: str, config: RewriteConfig) -> str | None:
    """Return what a rewrite changed that it must keep; None if it may be served."""
    if not rewrite.strip():
        return "the rewrite is empty"
    if "citations" in config.keep and set(_CITATION.findall(draft)) != set(_CITATION.findall(rewrite)):
        return "the rewrite changes citations"
    if "numbers" in config.keep and _numbers(draft) != _numbers(rewrite):
        return "the rewrite changes numbers"
    return None


def _numbers(text: str) -> set[str]:
    return set(_NUMBER.findall(_CITATION.sub(" ", text)))


def was_rewritten(exchange: Exchange) -> bool:
    """True if the answer is a rewrite, and neither a draft nor another answer by the rewriter's variant."""
    return "draft_variant" in exchange.notes.get(STAGE, {})


def drop_rewrite(exchange: Exchange) -> None:
    """Note that another answer is served instead of what was rewritten, or kept as a draft."""
    exchange.notes.pop(STAGE, None)
    exchange.log_fields.pop("rewritten_by", None)


class RewriteAnswerer(DecidingAnswerer):
    holds_back = True

    def __init__(
        self,
        exchange: Exchange,
        draft: AnswererFactory,
        rewriter: AnswererFactory,
        config: RewriteConfig,
        *,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(exchange, settled=settled, clock=clock)
        self.config = config
        self._make_draft = draft
        self._make_rewriter = rewriter
        self._draft: Answerer | None = None
        self._rewriter: Answerer | None = None
        self._choice = Choice(0)  # the draft, as far as it came
        self._is_whole = False  # all of the answer that is served is held
        self._began = 0.0

    @property
    def charges(self) -> list[VariantCharge]:
        draft, rewriter = self._draft, self._rewriter
        if draft is None:
            return []
        if rewriter is None:
            return charges_for(draft, "answer")
        if self._serving is rewriter:
            return [replace(each, role=ROLE) for each in charges_for(draft, ROLE)] + charges_for(rewriter, "answer")
        return charges_for(draft, "answer") + charges_for(rewriter, "broken", charged=False)

    async def begin(self) -> None:
        self._began = self._clock()
        draft = self._draft = self._start(self._make_draft(self.exchange.text_request))
        await draft.begin()
        self.exchange.prompt_tokens, self.exchange.shaped_at = draft.exchange.prompt_tokens, draft.exchange.shaped_at

    async def _run_serving(self, serving: Answerer, take: TakeDelta) -> bool:
        return self._is_whole or await serving.run(take)

    async def _decide(self) -> bool:
        """Hold the draft, rewrite it, and choose the answer that is served; False if the client left first."""
        draft = self._draft
        assert draft is not None
        why = None
        try:
            if self._rewriter is None:
                async with asyncio.timeout(self._left_s()):
                    await draft.run(self._hold_draft)
        except TimeoutError:
            why = f"the draft took more than {self.config.within_s:g} s"
        if self.gone:
            return False
        why = why or self._why_kept()
        if why is None:
            why = await self._rewrite()
            if self.gone:
                return False
        if why is not None:
            self._keep_draft(why)
        return True

    def _hold_draft(self, piece: ChoiceDelta) -> bool:
        if isinstance(piece, RestartDelta):
            self._held.clear()
            self._choice, self._is_whole = Choice(0), False
            return True
        self._held.append(piece)
        self._choice.add(piece)
        if piece.finish is not None:
            self._is_whole = True
        return len(self._held) < _MOST_HELD

    def _left_s(self) -> float:
        """Return the seconds that are left for both passes."""
        now, ends = self._clock(), self._began + self.config.within_s
        return max(0.0, ends - now)

    def _why_kept(self) -> str | None:
        """Return why the draft is not rewritten; None if it is."""
        if self._rewriter is not None:  # whoever held the answer lost patience and runs this again
            self._rewriter.cancel()
            return "the rewrite was interrupted"
        if not self._is_whole:
            return "the draft is too long"
        if self._choice.finish != "stop":
            return f"the draft ended early ({self._choice.finish})"
        if not self._choice.content.strip():
            return "the draft is empty"
        # The second pass writes about as much as the first, whose time is all that is known about it.
        now, deadline = self._clock(), self.exchange.deadline
        if deadline is not None and now + (now - self._began) > deadline:
            return "the deadline is too near"
        return None

    async def _rewrite(self) -> str | None:
        """Rewrite the draft and serve that. Return why the draft must be served instead, None if it need not."""
        text_request, config = self.exchange.text_request, self.config
        began = time.monotonic()
        part = self._rewriter = self._start(self._make_rewriter(rewrite_request(text_request, self._choice, config)))
        name, rewritten = part.exchange.served.name, Choice(0)
        pieces: deque[ChoiceDelta] = deque()

        def hold(piece: ChoiceDelta) -> bool:
            nonlocal rewritten
            if isinstance(piece, RestartDelta):
                pieces.clear()
                rewritten = Choice(0)
                return True
            pieces.append(piece)
            rewritten.add(piece)
            return len(pieces) < _MOST_HELD

        why = None
        try:
            async with asyncio.timeout(self._left_s()):
                await part.begin()
                if self.gone:
                    part.cancel()
                await part.run(hold)
        except TimeoutError:
            why = f"the rewrite was not there after {config.within_s:g} s"
        except ApiError as error:
            why = f"the rewriter failed ({error.code or error.kind})"
        if self.gone:
            return None
        if why is None and (not pieces or pieces[-1].finish != "stop"):
            why = f"the rewrite ended early ({rewritten.finish if pieces else 'empty'})"
        why = why or lost_in_rewriting(self._choice.content, rewritten.content, config)
        self.exchange.timeline.part("generate", STAGE, began, variant=name, outcome=why or "served")
        if why is not None:
            part.cancel()
            return why
        self._serve(part)
        assert self._draft is not None
        drafted = self._draft.exchange
        last = pieces[-1]
        last.usage = sum_usage((drafted.usage, last.usage or part.exchange.usage))
        self._held = pieces
        tokens = self._choice.usage.output_tokens
        self.decisions.append(RoutingDecision(STAGE, name, f"rewrote {tokens} tokens of {drafted.served.name}"))
        self.exchange.notes[STAGE] = {
            "variant": name,
            "draft_variant": drafted.served.name,
            "draft_tokens": tokens,
            "draft_temperature": text_request.sampling.temperature,
        }
        self.exchange.log_fields["rewritten_by"] = name
        return None

    def _keep_draft(self, why: str) -> None:
        assert self._draft is not None
        self._serve(self._draft)
        name = self._draft.exchange.served.name
        self.decisions.append(RoutingDecision(STAGE, name, f"kept the draft: {why}"))
        self.exchange.notes[STAGE] = {"kept_draft": why}
