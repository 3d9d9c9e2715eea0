"""EngineAnswering: generates the answer of an exchange by our own engine, from messages to tokens to deltas.

Limits, caches, routing and the ledger are the flow's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from headrace.engine.interface.grammar_spec import GrammarLimits, grammar_source
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sampling import SampledToken
from headrace.engine.process.output_stream import OutputStream
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError, as_api_error, invalid_request
from headrace.gateway.output.choice_reader import ChoiceReader
from headrace.gateway.requests.text_request import ChoiceDelta, TokenUsage, Tool, combine_usages
from headrace.gateway.serving.exchange import Exchange, Prompt
from headrace.gateway.serving.fleet import ServedVariant

_LONG_TEXT: Final = 16 * 1024  # characters; a longer text is rendered and tokenised in a thread
_GRAMMAR_LIMITS: Final = GrammarLimits()


class EngineAnswering:
    """One generation: `begin`, then `run` until it returns True, then `settle`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.gone = False  # the client has left
        self.prompts: list[tuple[int, ...]] = []
        self._streams: list[OutputStream] = []
        self._readers: dict[tuple[int, int], ChoiceReader] = {}
        self._open = 0
        self._usages: dict[int, TokenUsage] = {}  # by the choice
        self._settled = False

    async def begin(self) -> None:
        """Tokenise, and submit to the engine. ApiError for a request that is rejected before that."""
        exchange = self.exchange
        try:
            texts = await prompts_of(exchange)
            self.prompts = [prompt.tokens for prompt in texts]
            self._make_readers([prompt.tail for prompt in texts])
            requests = [_request(exchange, prompt) for prompt in self.prompts]
        except (HeadraceError, ApiError) as error:
            raise self._told(error) from None
        self._streams = [exchange.served.engine.stream(request) for request in requests]
        self._open = len(requests) * exchange.asked.n

    def _make_readers(self, tails: Sequence[str]) -> None:
        asked, served = self.exchange.asked, self.exchange.served
        calls = served.tools if asked.tools and asked.choosing != "none" else None
        for place, (prompt, tail) in enumerate(zip(self.prompts, tails, strict=True)):
            measured: list[SampledToken] = []
            for index in range(asked.n):
                reasons = served.reasoning is not None and asked.messages is not None
                self._readers[place, index] = ChoiceReader(
                    place * asked.n + index,
                    served.tokenizer,
                    splitter=served.reasoning.splitter(tail) if reasons and served.reasoning is not None else None,
                    calls=None if calls is None else calls.parser(parallel=asked.parallel_calls),
                    named=asked.only_tool is not None,
                    logprobs=asked.sampling.logprobs is not None,
                    echo=prompt if asked.echo else None,
                    measured=measured,
                )

    async def run(self, take: Callable[[ChoiceDelta], bool]) -> bool:
        """Hand every delta to `take`, in the same iteration of the event loop in which it comes.

        Return True once every choice has ended, and False as soon as `take` does: call this again then. ApiError if
        the engine rejects the request or fails.
        """
        over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        exchange, readers = self.exchange, self._readers

        def hand_over(place: int) -> None:
            if over.done():
                return
            stream = self._streams[place]
            try:
                while (output := stream.take()) is not None:
                    piece = readers[place, output.index].read(output)
                    exchange.last_at = time.monotonic()
                    if not exchange.first_at:
                        exchange.first_at = exchange.last_at
                    if piece.finish is not None:
                        self._ended(piece)
                    if not take(piece):
                        over.set_result(False)
                        return
                if stream.closed and all(each.closed for each in self._streams):
                    over.set_result(True)
            except Exception as error:
                over.set_exception(error)

        for place, stream in enumerate(self._streams):
            stream.listen(partial(hand_over, place))
        try:
            for place in range(len(self._streams)):
                hand_over(place)  # outputs that came before
            ended = await over
        except HeadraceError as error:
            raise self._told(error) from None
        finally:
            for stream in self._streams:
                stream.listen(None)
        if ended and self._open and not self.gone:
            raise ApiError(
                "The generation ended before the answer was complete.", kind="server_error", code="generation_failed"
            )
        return ended

    def _told(self, error: Exception) -> ApiError:
        """Return the error with the API's name of the parameter in place of the engine's."""
        told, asked = as_api_error(error), self.exchange.asked
        names = {"grammar": asked.grammar_of, "deadline": "deadline_ms"}
        if asked.messages is not None:
            names["prompt"] = "messages"
        told.parameter = names.get(told.parameter or "", told.parameter)
        return told

    def _ended(self, piece: ChoiceDelta) -> None:
        """A choice's last piece has come."""
        exchange = self.exchange
        self._open -= 1
        self._usages[piece.index] = piece.usage or TokenUsage()
        exchange.usage = combine_usages([self._usages[index] for index in sorted(self._usages)], exchange.asked.n)
        exchange.finish = piece.finish or ""

    def cancel(self) -> None:
        """Stop generating by the engine's next step: the client has left."""
        self.gone = True
        for stream in self._streams:
            stream.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        """Stop what still runs, and set the exchange's usage. Every call after the first does nothing."""
        if self._settled:
            return
        self._settled = True
        for stream in self._streams:
            stream.cancel()
        exchange = self.exchange
        if self._open:
            exchange.usage = self._spent()

    def _spent(self) -> TokenUsage:
        """Return what was computed of an incomplete answer."""
        begun = [stream for stream in self._streams if any(stream.tokens)]
        return TokenUsage(
            prompt_tokens=sum(len(stream.request.prompt) for stream in begun),
            output_tokens=sum(len(tokens) for stream in begun for tokens in stream.tokens),
        )


# Shape


async def prompts_of(exchange: Exchange) -> list[Prompt]:
    """Return the exchange's prompts, tokenised for its variant. They are tokenised once, and parts of a composed
    generation share them. ApiError for prompts that are invalid or do not fit."""
    found = exchange.prompts.get(exchange.served.name)
    if found is None:
        try:
            found = exchange.prompts[exchange.served.name] = await _cut(exchange)
        except HeadraceError as error:
            told = as_api_error(error)
            if told.parameter == "prompt" and exchange.asked.messages is not None:
                told.parameter = "messages"
            raise told from None
    exchange.prompt_tokens = sum(len(prompt.tokens) for prompt in found)
    exchange.shaped_at = exchange.shaped_at or time.monotonic()
    return found


async def _cut(exchange: Exchange) -> list[Prompt]:
    asked, served = exchange.asked, exchange.served
    if served.kind != "decoder":
        raise invalid_request(f"'{served.name}' makes embeddings, not text", "model")
    if asked.prompts is not None:
        found: list[Prompt] = []
        for prompt in asked.prompts:
            found.append(Prompt(await tokens_of(served, prompt, "prompt"), ""))
            await asyncio.sleep(0)  # let other tasks run
        return found
    assert asked.messages is not None
    if asked.tools and asked.choosing != "none" and served.tools is None:
        raise invalid_request(f"the chat template of '{served.name}' knows no tools", "tools")
    template = dict(asked.template)
    if asked.think is not None:
        template.setdefault("enable_thinking", asked.think)
    tools = [_as_template_takes(tool) for tool in asked.tools] if asked.choosing != "none" else []
    render = partial(served.tokenizer.apply_template, asked.messages, tools=tools or None, **template)
    long = sum(len(message.get("content") or "") for message in asked.messages) > _LONG_TEXT
    text = await asyncio.to_thread(render) if long else render()
    return [Prompt(await tokens_of(served, text, "messages", whole=True), text[-256:])]


def _as_template_takes(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = dict(tool.parameters) if tool.parameters is not None else {"type": "object"}
    return {"type": "function", "function": function}


async def tokens_of(
    served: ServedVariant, text: str | Sequence[int], parameter: str, *, whole: bool = False
) -> tuple[int, ...]:
    """A text's tokens, at least one and at most what the context has room for. `whole`: it has its special tokens."""
    tokenizer = served.tokenizer
    if isinstance(text, str):
        # The longest tokens, as many as there is room for: no text beyond that fits, whatever it says. (They are looked
        # for when the first long text comes: it takes a while.)
        if len(text) > served.context and len(text) > served.context * tokenizer.longest_piece:
            raise _too_long(served, f"more than {served.context}", parameter)
        if len(text) > _LONG_TEXT:
            tokens = tuple(await asyncio.to_thread(tokenizer.encode, text, not whole))
        else:
            tokens = tuple(tokenizer.encode(text, not whole))
    else:
        tokens = tuple(text)
        for token in tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise invalid_request(f"'{parameter}': there is no token {token}", parameter)
    if not tokens:
        raise invalid_request(f"'{parameter}' has no tokens", parameter)
    if len(tokens) >= served.context:
        raise _too_long(served, str(len(tokens)), parameter)
    return tokens


def _too_long(served: ServedVariant, count: str, parameter: str) -> ApiError:
    return ApiError(
        f"the context of '{served.name}' is {served.context} tokens, and the {parameter} alone {count}",
        parameter=parameter,
        code="context_length_exceeded",
    )


# Generate


def _request(exchange: Exchange, prompt: tuple[int, ...]) -> GenerationRequest:
    asked, served, caller = exchange.asked, exchange.served, exchange.caller
    tokenizer = served.tokenizer
    room = served.context - len(prompt)
    most = asked.max_tokens if asked.max_tokens is not None else served.max_tokens
    grammar = asked.grammar
    shown = False
    if asked.tools and asked.choosing != "none" and served.tools is not None:
        shown = bool(served.tools.special)
        if asked.choosing == "required":
            grammar = served.tools.grammar(asked.tools, only=asked.only_tool, parallel=asked.parallel_calls)
        elif grammar is None and any(tool.strict for tool in asked.tools):
            grammar = served.tools.auto_grammar(asked.tools, parallel=asked.parallel_calls)
    if asked.messages is not None and served.reasoning is not None:
        shown = shown or bool(served.reasoning.special)
    if grammar is not None:
        grammar_source(grammar, _GRAMMAR_LIMITS)  # reject obvious mistakes before anything is queued
    asked.sampling.check(tokenizer.vocab_size)
    return GenerationRequest.of(
        asked,
        id="",  # the engine's client assigns its own
        prompt=prompt,
        eos_ids=tokenizer.eos_ids,
        max_tokens=room if most is None else min(most, room),
        min_tokens=min(asked.min_tokens, room),
        surface=exchange.effective_surface,
        grammar=grammar,
        tenant=caller.tenant,
        weight=caller.weight,
        # A random salt is shared with no other request, so nothing is found in the cache and nothing can be found.
        salt=caller.tenant if asked.cache == "on" else f"alone {secrets.token_hex(8)}",
        deadline=exchange.deadline,
        arrival=exchange.arrival,
        skip_special_tokens=asked.skip_special_tokens and not shown,
    )
