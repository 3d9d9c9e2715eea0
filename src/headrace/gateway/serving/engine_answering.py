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

import msgspec

from headrace.engine.interface.grammar_spec import Grammar, GrammarLimits, grammar_source
from headrace.engine.interface.image_rows import ImageRows
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sampling import SampledToken, SamplingParams
from headrace.engine.memory.block_manager import LONE
from headrace.engine.process.output_stream import OutputStream
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.api_errors import ApiError, as_api_error, invalid_request
from headrace.gateway.images.image_reader import PromptImage
from headrace.gateway.images.message_images import images_of
from headrace.gateway.output.choice_reader import ChoiceReader
from headrace.gateway.output.reasoning import after_reasoning
from headrace.gateway.requests.text_request import ChoiceDelta, TextRequest, TokenUsage, Tool, combine_usages
from headrace.gateway.serving.exchange import Exchange, Prompt
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.models.text.user_text import UserText, plain

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
            texts = _with_begun(exchange, await prompts_of(exchange))
            self.prompts = [prompt.tokens for prompt in texts]
            self._make_readers([prompt.tail for prompt in texts])
            prediction = await _predicted_tokens(exchange)
            features = [await _image_rows(exchange, prompt) for prompt in texts]
            requests = [
                _request(exchange, prompt, prediction, images) for prompt, images in zip(texts, features, strict=True)
            ]
        except (HeadraceError, ApiError) as error:
            raise self._as_api_error(error) from None
        self._streams = [exchange.served.engine.stream(request) for request in requests]
        self._open = len(requests) * exchange.text_request.n

    def _make_readers(self, tails: Sequence[str]) -> None:
        text_request, served = self.exchange.text_request, self.exchange.served
        calls = served.tools if text_request.tools and text_request.choosing != "none" else None
        for place, (prompt, tail) in enumerate(zip(self.prompts, tails, strict=True)):
            measured: list[SampledToken] = []
            for index in range(text_request.n):
                reasons = served.reasoning is not None and text_request.messages is not None
                self._readers[place, index] = ChoiceReader(
                    place * text_request.n + index,
                    served.tokenizer,
                    splitter=served.reasoning.splitter(tail) if reasons and served.reasoning is not None else None,
                    calls=None if calls is None else calls.parser(parallel=text_request.parallel_calls),
                    named=text_request.only_tool is not None,
                    logprobs=text_request.sampling.logprobs is not None,
                    echo=prompt if text_request.echo else None,
                    only_prompt=text_request.max_tokens == 0,
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
            ready = stream.ready
            try:
                while ready:
                    output = ready.popleft()
                    began = time.monotonic()
                    piece = readers[place, output.index].read(output)
                    now = time.monotonic()
                    exchange.reading_s += now - began
                    if exchange.first_at:
                        exchange.gaps.append(now - exchange.last_at)
                    else:
                        exchange.first_at = now
                    exchange.last_at = now
                    if piece.finish is not None:
                        self._ended(piece)
                    if not take(piece):
                        over.set_result(False)
                        return
                if stream.closed:
                    stream.check()
                    if all([each.closed for each in self._streams]):
                        over.set_result(True)
            except Exception as error:
                over.set_exception(error)

        for place, stream in enumerate(self._streams):
            stream.listen(partial(hand_over, place))
        try:
            for place in range(len(self._streams)):
                hand_over(place)  # outputs that arrived earlier
            ended = await over
        except HeadraceError as error:
            raise self._as_api_error(error) from None
        finally:
            for stream in self._streams:
                stream.listen(None)
        if ended and self._open and not self.gone:
            raise ApiError(
                "The generation ended before the answer was complete.", kind="server_error", code="generation_failed"
            )
        return ended

    def _as_api_error(self, error: Exception) -> ApiError:
        """Return the error with the API's name of the parameter in place of the engine's."""
        api_error, text_request = as_api_error(error), self.exchange.text_request
        names = {"grammar": text_request.grammar_of, "deadline": "deadline_ms"}
        if text_request.messages is not None:
            names["prompt"] = "messages"
        api_error.parameter = names.get(api_error.parameter or "", api_error.parameter)
        return api_error

    def _ended(self, piece: ChoiceDelta) -> None:
        """Record the last delta of a choice."""
        exchange = self.exchange
        self._open -= 1
        self._usages[piece.index] = piece.usage or TokenUsage()
        exchange.usage = combine_usages(
            [self._usages[index] for index in sorted(self._usages)], exchange.text_request.n
        )
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
        """Return the usage of an incomplete answer."""
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
            if told.parameter == "prompt" and exchange.text_request.messages is not None:
                told.parameter = "messages"
            raise told from None
    exchange.prompt_tokens = sum([len(prompt.tokens) for prompt in found])
    if image_tokens := sum([prompt.image_tokens for prompt in found if prompt.images]):
        exchange.notes["image_tokens"] = image_tokens
    exchange.shaped_at = exchange.shaped_at or time.monotonic()
    return found


def _with_begun(exchange: Exchange, prompts: list[Prompt]) -> list[Prompt]:
    """Add the text that the answer has already. Control tokens in it are plain text."""
    text, served = exchange.text_request.begun, exchange.served
    if not text:
        return prompts
    begun = tuple(served.tokenizer.encode(UserText(text), add_special_tokens=False))
    found = [
        prompt._replace(tokens=prompt.tokens + begun, tail=plain((prompt.tail + text)[-256:])) for prompt in prompts
    ]
    longest = max(len(prompt.tokens) for prompt in found)
    if longest >= served.context:
        raise _too_long(served, str(longest), "prompt", answered=True)
    return found


async def _cut(exchange: Exchange) -> list[Prompt]:
    text_request, served = exchange.text_request, exchange.served
    if served.kind != "decoder":
        raise invalid_request(f"'{served.name}' {served.purpose}. Use a model that generates text.", "model")
    if text_request.prompts is not None:
        found: list[Prompt] = []
        began = time.monotonic()
        for prompt in text_request.prompts:
            found.append(Prompt(await tokens_of(served, served.prompt_text(prompt), "prompt"), ""))
            await asyncio.sleep(0)  # let other tasks run
        exchange.timeline.part("shape", "tokenise", began, tokens=sum(len(each.tokens) for each in found))
        return found
    assert text_request.messages is not None
    if text_request.tools and text_request.choosing != "none" and served.tools is None:
        raise invalid_request(f"the chat template of '{served.name}' knows no tools", "tools")
    tools = [_as_template_takes(tool) for tool in text_request.tools] if text_request.choosing != "none" else []
    reader, images = served.images, images_of(text_request.messages)
    if images and reader is None:
        raise reads_no_images(served)
    measured = [] if reader is None or not images else await reader.measured(images)
    messages = text_request.messages if reader is None else reader.template_messages(text_request.messages)
    render = partial(served.tokenizer.apply_template, messages, tools=tools or None, **text_request.template_values)
    long = sum([len(message.get("content") or "") for message in text_request.messages]) > _LONG_TEXT

    def shaped() -> str:
        text = render()
        return text if reader is None or not measured else reader.framed(text)

    began = time.monotonic()
    text = await asyncio.to_thread(shaped) if long else shaped()
    rendered = time.monotonic()
    tokens = await tokens_of(served, text, "messages", chat_of=exchange.caller.tenant)
    placed: tuple[PromptImage, ...] = ()
    if reader is not None and measured:
        tokens, placed = reader.placed(tokens, measured)
        if len(tokens) >= served.context:
            raise _too_long(served, str(len(tokens)), "messages", answered=True)
    timeline = exchange.timeline
    timeline.part("shape", "template", began, rendered)
    timeline.part("shape", "tokenise", rendered, tokens=len(tokens))
    return [Prompt(tokens, plain(text[-256:]), placed)]


def reads_no_images(served: ServedVariant) -> ApiError:
    why = served.no_images or "It reads text only: remove the images, or use a model that reads them."
    return ApiError(f"'{served.name}' does not read images. {why}", parameter="messages", code="unsupported_parameter")


def _as_template_takes(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = dict(tool.parameters) if tool.parameters is not None else {"type": "object"}
    return {"type": "function", "function": function}


async def tokens_of(
    served: ServedVariant,
    text: str | Sequence[int],
    parameter: str,
    *,
    whole: bool = False,
    chat_of: str | None = None,
    answered: bool = True,
) -> tuple[int, ...]:
    """A text's tokens, at least one and at most what the context has room for. `whole`: it has its special tokens.
    `chat_of`: it is a rendered chat, which has them too, of this tenant. Control tokens in a UserText are plain text.
    `answered`: there must be room for one more token."""
    tokenizer = served.tokenizer
    if isinstance(text, str):
        # The longest tokens, as many as there is room for: no text beyond that fits, whatever it says. (They are looked
        # for when the first long text comes: it takes a while.)
        if len(text) > served.context and len(text) > served.context * tokenizer.longest_piece:
            raise _too_long(served, f"more than {served.context}", parameter, answered=answered)
        encode = (
            partial(tokenizer.encode, text, not whole)
            if chat_of is None
            else partial(tokenizer.encode_chat, text, chat_of)
        )
        tokens = tuple(await asyncio.to_thread(encode) if len(text) > _LONG_TEXT else encode())
    else:
        if len(text) > served.context - answered:
            raise _too_long(served, str(len(text)), parameter, answered=answered)
        tokens = tuple(text)
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < tokenizer.vocab_size:
                raise invalid_request(f"'{parameter}': there is no token {token}", parameter)
    if not tokens:
        raise invalid_request(f"'{parameter}' has no tokens", parameter)
    if len(tokens) > served.context - answered:
        raise _too_long(served, str(len(tokens)), parameter, answered=answered)
    return tokens


def _too_long(served: ServedVariant, count: str, parameter: str, *, answered: bool) -> ApiError:
    cure = "" if answered else ". Set 'truncate' to cut it"
    return ApiError(
        f"the context of '{served.name}' is {served.context} tokens, and the {parameter} alone {count}{cure}",
        parameter=parameter,
        code="context_length_exceeded",
    )


# Generate


async def _predicted_tokens(exchange: Exchange) -> tuple[int, ...]:
    """Return the tokens of the text that the answer may repeat: at most as many as the context has room for."""
    text, served = exchange.text_request.prediction, exchange.served
    if len(text) > _LONG_TEXT:
        text = text[: served.context * served.tokenizer.longest_piece]
    if not text:
        return ()
    encode = partial(served.tokenizer.encode, text, False)
    tokens = await asyncio.to_thread(encode) if len(text) > _LONG_TEXT else encode()
    return tuple(tokens[: served.context])


async def _image_rows(exchange: Exchange, prompt: Prompt) -> tuple[ImageRows, ...]:
    """Return the features of a prompt's images."""
    reader = exchange.served.images
    if not prompt.images or reader is None:
        return ()
    began = time.monotonic()
    rows = await reader.rows(exchange.caller.tenant, prompt.images)
    exchange.timeline.part("generate", "images", began, tokens=prompt.image_tokens)
    return rows


def _request(
    exchange: Exchange, prompt: Prompt, prediction: tuple[int, ...], images: tuple[ImageRows, ...]
) -> GenerationRequest:
    text_request, served, caller = exchange.text_request, exchange.served, exchange.caller
    tokenizer = served.tokenizer
    room = served.context - len(prompt.tokens)
    most = text_request.max_tokens if text_request.max_tokens is not None else served.max_tokens
    shown = False
    if text_request.tools and text_request.choosing != "none" and served.tools is not None:
        shown = bool(served.tools.special)
    if text_request.messages is not None and served.reasoning is not None:
        shown = shown or bool(served.reasoning.special)
    text_request.sampling.check(tokenizer.vocab_size)
    kind: dict[str, Any] = {"grammar": _grammar(text_request, served, prompt.tail)}
    if text_request.max_tokens == 0:  # the prompt alone is measured
        top = text_request.prompt_logprobs
        kind = {
            "kind": "score",
            "score_from": 0 if top is not None else len(prompt.tokens),
            "sampling": SamplingParams(logprobs=top or 0),
            "grammar": None,
        }
    return GenerationRequest.of(
        text_request,
        id="",  # the engine's client assigns its own
        prompt=prompt.tokens,
        images=images,
        prediction=prediction,
        eos_ids=tokenizer.eos_ids,
        max_tokens=room if most is None else min(most, room),
        min_tokens=min(text_request.min_tokens, room),
        surface=exchange.effective_surface,
        tenant=caller.tenant,
        weight=caller.weight,
        # A random salt is shared with no other request, so nothing is found in the cache and nothing can be found.
        adapter=served.adapter,
        salt=caller.tenant if text_request.cache == "on" else f"{LONE}{secrets.token_hex(8)}",
        deadline=exchange.deadline,
        arrival=exchange.arrival,
        skip_special_tokens=text_request.skip_special_tokens and not shown,
        **kind,
    )


def _grammar(text_request: TextRequest, served: ServedVariant, prompt_tail: str) -> Grammar | None:
    """Return the grammar of the answer, or of its tool calls. RequestError for mistakes that show without compiling."""
    grammar, tools = text_request.grammar, served.tools
    if text_request.tools and text_request.choosing != "none" and tools is not None:
        if text_request.choosing == "required":
            grammar = tools.grammar(
                text_request.callable_tools, only=text_request.only_tool, parallel=text_request.parallel_calls
            )
        elif grammar is None:
            grammar = tools.auto_grammar(text_request.callable_tools, parallel=text_request.parallel_calls)
            if text_request.allowed_tools is not None:
                grammar = msgspec.structs.replace(grammar, best_effort=False)  # other tools must not be called
            if served.reasoning is not None and text_request.messages is not None:
                grammar = after_reasoning(grammar, served.reasoning, prompt_tail)
    if grammar is not None:
        try:
            grammar_source(grammar, _GRAMMAR_LIMITS)
        except RequestError:
            if not grammar.best_effort:
                raise
            return None
    return grammar
