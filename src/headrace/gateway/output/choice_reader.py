"""Turns the engine's outputs of one sequence into the deltas of one choice.

Splits off reasoning and tool calls, and returns log-probabilities together with the text of their tokens. Does not know
endpoints or the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from headrace.engine.interface.grammar_spec import NOT_FOLLOWED
from headrace.engine.interface.output_text import token_bytes
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.request import FinishReason
from headrace.engine.interface.sampling import SampledToken
from headrace.errors import RequestError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.output.reasoning import ReasoningSplitter
from headrace.gateway.output.tool_formats import ToolCallParser
from headrace.gateway.requests import text_request
from headrace.gateway.requests.text_request import ChoiceDelta, TokenLogprob, TokenUsage
from headrace.models.text.detokenizer import Detokenizer
from headrace.models.text.tokenizer import Tokenizer

_LEAST: Final = -9999.0  # JSON has no minus infinity; the service's own floor is this
_FINISH: dict[FinishReason, text_request.FinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "deadline",
}


class ChoiceReader:
    """One choice. `calls`: where the answer may call tools; `named`: it had to call just this one."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        splitter: ReasoningSplitter | None = None,
        calls: ToolCallParser | None = None,
        named: bool = False,
        logprobs: bool = False,
        echo: Sequence[int] | None = None,
        only_prompt: bool = False,
        measured: list[SampledToken] | None = None,
    ) -> None:
        """`echo`: the prompt, if its text comes before the answer's. `only_prompt`: nothing is generated, which counts
        as reaching the length. `measured`: a list that the readers of one prompt share, because the engine returns the
        prompt's log-probabilities with the first of its choices alone."""
        self.index = index
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._calls = calls
        self._named = named
        self._shown = _TokenTexts(tokenizer) if logprobs else None
        self._whole = echo is not None  # every token is reported, those without a text too: this is for measuring
        self._reasoning_tokens = 0
        self._echo = echo
        self._only_prompt = only_prompt
        self._plain = splitter is None and calls is None and not logprobs and echo is None  # a text, and no more
        # The prompt's tokens from the second on, where they are to be echoed.
        self._measured: list[SampledToken] = [] if measured is None else measured

    def read(self, output: SequenceOutput) -> ChoiceDelta:
        if self._plain and output.ending is None:
            # Nearly every token of nearly every answer.
            return ChoiceDelta(self.index, output.text, tokens=len(output.tokens))
        piece = ChoiceDelta(self.index, tokens=len(output.tokens))
        text = output.text
        if self._echo is not None:
            self._measured += output.prompt or ()
            if output.tokens or output.ending is not None:
                self._begin(piece, self._echo)
        if self._splitter is not None:
            if self._splitter.is_open:
                self._reasoning_tokens += len(output.tokens)
            piece.reasoning, text = self._splitter.push(text)
        self._take(piece, text)
        if self._shown is not None:
            self._measure(piece, self._shown, output)
        if output.ending is not None:
            self._end(piece, output.ending)
        return piece

    def _begin(self, piece: ChoiceDelta, prompt: Sequence[int]) -> None:
        piece.content = self._tokenizer.decode(prompt)
        if self._shown is not None:
            stream = Detokenizer(self._tokenizer)
            texts = [stream.push(token) for token in prompt]
            texts[-1] += stream.finish()
            # Nothing foretells the very first token.
            measured = [SampledToken(prompt[0]), *self._measured]
            measured += map(SampledToken, prompt[len(measured) :])  # not measured before the deadline
            piece.logprobs = [
                token_logprob(self._tokenizer, each, text) for each, text in zip(measured, texts, strict=True)
            ]
        self._echo = None

    def _measure(self, piece: ChoiceDelta, shown: _TokenTexts, output: SequenceOutput) -> None:
        ending = output.ending
        found = shown.push(output.chosen or (), output.text, last=ending is not None)
        whole = self._whole and (ending is None or ending.stop is None)
        said = [
            token_logprob(self._tokenizer, chosen, part or "", cut=cut)
            for chosen, part, cut in found
            if whole or part is not None
        ]
        if said or ending is not None:
            piece.logprobs = [*(piece.logprobs or ()), *said]

    def _take(self, piece: ChoiceDelta, text: str) -> None:
        if self._calls is None:
            piece.content += text
            return
        content, calls = self._calls.push(text)
        piece.content += content
        piece.calls += calls

    def _end(self, piece: ChoiceDelta, ending: SequenceEnd) -> None:
        if ending.finish is FinishReason.FAILED and ending.why.startswith(NOT_FOLLOWED):
            # The request's own fault: as an error of the server it would count against the variant's health.
            raise RequestError(ending.why, parameter="grammar")
        if ending.finish is FinishReason.FAILED or ending.finish is FinishReason.CANCELLED:
            raise ApiError(ending.why or "The request was cancelled.", kind="server_error", code="generation_failed")
        if self._splitter is not None:
            reasoning, text = self._splitter.finish()
            piece.reasoning += reasoning
            self._take(piece, text)
        if self._calls is not None:
            cut = ending.finish is not FinishReason.STOP or ending.stop is not None
            content, calls = self._calls.finish(cut=cut)
            piece.content += content
            piece.calls += calls
        piece.finish = _FINISH[ending.finish]
        if self._only_prompt and piece.finish == "stop":
            piece.finish = "length"
        if self._calls is not None:
            piece.half_call = self._calls.is_half
            if self._calls.complete and not self._named and piece.finish == "stop":
                piece.finish = "tool_calls"
        piece.stop = ending.stop
        used = ending.usage
        piece.usage = TokenUsage(
            prompt_tokens=used.prompt_tokens,
            output_tokens=used.output_tokens,
            cached_tokens=used.cached_tokens,
            reasoning_tokens=self._reasoning_tokens,
            drafted=used.drafted,
            accepted=used.accepted,
            queue_s=used.queue_s,
            prefill_s=used.prefill_s,
            decode_s=used.decode_s,
            prefill_steps=used.prefill_steps,
            decode_steps=used.decode_steps,
        )


class _TokenTexts:
    """Maps tokens to their parts of a text. The text may arrive later than its tokens.

    Hidden are special tokens, the one that ended the answer, and what a stop text cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, continues=True)
        self._waiting: deque[tuple[SampledToken, str]] = deque()
        self._text = ""  # that came and is no token's yet

    def push(
        self, new: Sequence[SampledToken], text: str, *, last: bool
    ) -> list[tuple[SampledToken, str | None, bool]]:
        """Tokens that are certain, each with its part of the text (None: hidden) and whether that was cut.

        A part of a character has an empty one: the token that completes it has it all.
        """
        self._waiting += ((each, self._detokenizer.push(each.token)) for each in new)
        self._text += text
        if last and self._waiting:
            token, its_text = self._waiting.pop()
            self._waiting.append((token, its_text + self._detokenizer.finish()))
        found: list[tuple[SampledToken, str | None, bool]] = []
        while (count := self._group(last)) and self._text_is_there(*self._waiting[count - 1], last):
            group = [self._waiting.popleft() for _ in range(count)]
            chosen, text = group[-1]
            part = self._take(chosen, text)
            found += [(each, None if part is None else "", False) for each, _ in group[:-1]]
            found.append((chosen, part, part is not None and len(part) < len(text)))
        return found

    def _group(self, last: bool) -> int:
        """Tokens up to the first that has a text; 0 where there is none yet."""
        for place, (_, text) in enumerate(self._waiting):
            if text:
                return place + 1
        return len(self._waiting) if last else 0

    def _text_is_there(self, chosen: SampledToken, text: str, last: bool) -> bool:
        if last:
            return True
        if self._tokenizer.is_special(chosen.token):
            return bool(self._text) and (self._text.startswith(text) or not text.startswith(self._text))
        return len(self._text) >= len(text)

    def _take(self, chosen: SampledToken, text: str) -> str | None:
        if not self._text or (self._tokenizer.is_special(chosen.token) and not self._text.startswith(text)):
            return None
        part, self._text = self._text[: len(text)], self._text[len(text) :]
        return part


def token_logprob(tokenizer: Tokenizer, chosen: SampledToken, shown: str, *, cut: bool = False) -> TokenLogprob:
    """`cut`: a stop text begins in the token, and `shown` is what is left of it."""
    raw = token_bytes(tokenizer, chosen.token)
    text = raw.decode("utf-8", "replace")
    if cut:
        text, raw = shown, shown.encode()
    top: list[tuple[str, bytes, float]] = []
    for token, logprob in chosen.top:
        other = raw if token == chosen.token else token_bytes(tokenizer, token)
        top.append((other.decode("utf-8", "replace"), other, max(logprob, _LEAST)))
    logprob = None if chosen.logprob is None else max(chosen.logprob, _LEAST)
    return TokenLogprob(text, raw, logprob, top, shown)
