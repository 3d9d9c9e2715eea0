"""An exchange that an upstream answers, with the interface of the engine's: begin, run to the end, settle.

Builds the upstream's request and notes times and usage. attempts.py fetches the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.requests.event_writer import EventWriter
from headrace.gateway.requests.text_request import ChoiceDelta, RestartDelta, TokenUsage, combine_usages
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers import upstream_usage as usage
from headrace.gateway.serving.upstream_answers.attempts import AttemptReader, Attempts
from headrace.gateway.serving.upstream_answers.relay import RelayReader, can_relay
from headrace.gateway.serving.upstream_answers.upstream_answer_reader import UpstreamAnswerReader
from headrace.gateway.serving.upstream_answers.upstream_request import UpstreamRequest, build_upstream_request
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import UpstreamError


async def count_prompt_tokens(exchange: Exchange, upstream: Upstream) -> list[int]:
    """Of each prompt: counted where the upstream's configuration names a tokenizer, else estimated as one sum.
    ApiError for a prompt that the context has no room for."""
    asked = exchange.asked
    length = usage.prompt_bytes(asked)
    if upstream.tokenizer is None:
        return [usage.estimate_prompt_tokens(length, len(asked.messages or ()))]
    count = partial(usage.count_prompts, asked, upstream.tokenizer)
    try:
        found = await asyncio.to_thread(count) if length > usage.LONG_TEXT else count()
    except HeadraceError as error:
        raise as_api_error(error) from None
    context = upstream.config.context
    if context is not None and max(found) >= context:
        parameter = "prompt" if asked.messages is None else "messages"
        raise ApiError(
            f"'{parameter}' has {max(found)} tokens. The context of '{exchange.served.name}' is {context} tokens.",
            parameter=parameter,
            code="context_length_exceeded",
        )
    return found


class UpstreamGeneration:
    """An exchange under way. All of it belongs to one event loop."""

    def __init__(self, exchange: Exchange, upstream: Upstream, *, anew: bool = False) -> None:
        """`anew`: whoever runs it bears a Restart, so that an answer that breaks off is asked for once more."""
        self.exchange = exchange
        self._anew = anew
        self.upstream = upstream
        self.gone = False  # the client has left
        self.counted: usage.AnswerUsage | None = None  # the usage with its source, once it is known
        self._request: UpstreamRequest | None = None
        self._bytes = 0  # of the prompts
        self._pieces: Attempts[ChoiceDelta] | None = None
        self._relayed: Attempts[bytes] | None = None
        self._usages: dict[int, TokenUsage] = {}  # by the choice
        self._settled = False

    @property
    def model(self) -> str:
        """The variant's name there."""
        return self.upstream.config.model or self.exchange.served.name

    async def begin(self) -> None:
        """Everything that can be refused before the upstream knows of it; ApiError where it is."""
        exchange, upstream = self.exchange, self.upstream
        counts = await count_prompt_tokens(exchange, upstream)
        self._bytes = usage.prompt_bytes(exchange.asked)
        self._request = build_upstream_request(
            exchange,
            upstream.config,
            upstream.takes,
            model=self.model,
            prompt_tokens=max(counts) if upstream.tokenizer is not None else None,
            secret=upstream.secret,
        )
        exchange.prompt_tokens = sum(counts)
        exchange.shaped_at = upstream.clock()

    # Pieces

    async def run(self, take: Callable[[ChoiceDelta], bool]) -> bool:
        """Hands every piece to `take` as it comes.

        True once every choice has ended; False as soon as `take` says that it wants no more for now, and then this is
        to be called again; until then nothing more is read from the upstream. ApiError where it refuses or fails, and
        BrokenStreamError where it does so after the first piece.
        """
        if self._pieces is None:
            self._pieces = self._attempts(self._reader)
        return await self._pieces.run(partial(self._hand, take), again=self._again if self._anew else None)

    def _again(self, error: UpstreamError) -> list[ChoiceDelta]:
        """What was handed on does not count."""
        self._usages.clear()
        name, why = self.exchange.served.name, error.code or error.kind
        return [RestartDelta(index, variant=name, why=why) for index in range(self._built_request().choices)]

    def _hand(self, take: Callable[[ChoiceDelta], bool], piece: ChoiceDelta) -> bool:
        if isinstance(piece, RestartDelta):
            return take(piece)
        self._note_time()
        if piece.finish is not None:
            exchange = self.exchange
            self._usages[piece.index] = piece.usage = self._timed(piece.usage or TokenUsage())
            exchange.usage = combine_usages([self._usages[index] for index in sorted(self._usages)], exchange.asked.n)
            exchange.finish = piece.finish
        return take(piece)

    def _reader(self) -> UpstreamAnswerReader:
        exchange, upstream = self.exchange, self.upstream
        return UpstreamAnswerReader(
            self._built_request(),
            name=exchange.served.name,
            n=exchange.asked.n,
            prompt_tokens=exchange.prompt_tokens,
            prompt_bytes=self._bytes,
            tokenizer=upstream.tokenizer,
            hidden=upstream.client.hidden,
        )

    @property
    def output_tokens(self) -> int:
        """Of all choices, as far as they came: estimated until the usage is known. Also while bytes are relayed."""
        attempts = self._running()
        return 0 if attempts is None else attempts.reader.output_tokens

    # Bytes

    def can_relay(self) -> bool:
        """Whether the upstream's own bytes can be handed on; for a caller whose client speaks the same dialect, and who
        wants to see no piece."""
        return self._pieces is None and can_relay(self.exchange, self._built_request(), self.upstream.takes)

    async def relay(
        self, write: Callable[[bytes], bool], own: Callable[[Exchange], EventWriter], *, rename: bool = True
    ) -> bool:
        """As `run`, with the bytes of server-sent events, from the first to `[DONE]`. `rename`: the model's name and
        the id become ours."""
        if self._relayed is None:

            def reader() -> AttemptReader[bytes]:
                exchange = self.exchange
                return RelayReader(exchange, self._built_request(), self._reader(), own(exchange), rename=rename)

            self._relayed = self._attempts(reader)

        def hand(data: bytes) -> bool:
            self._note_time()
            return write(data)

        over = await self._relayed.run(hand)
        counted = self._relayed.reader.counted
        if over and counted is not None:
            exchange = self.exchange
            self._usages = {place: self._timed(used) for place, used in enumerate(counted.usages)}
            exchange.usage = combine_usages(list(self._usages.values()), exchange.asked.n)
            exchange.finish = self._relayed.reader.delivered()[0][0].finish
        return over

    # The end

    def cancel(self) -> None:
        """The client is gone: the connection is closed, by which the upstream learns of it."""
        self.gone = True
        attempts = self._running()
        if attempts is not None:
            attempts.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        """Once, however it ended: nothing is held any more, and the exchange knows what was computed."""
        if self._settled:
            return
        self._settled = True
        exchange, attempts = self.exchange, self._running()
        if attempts is None:
            return
        attempts.close()
        self.counted = attempts.reader.counted
        if not attempts.reader.over and attempts.reader.started:
            self.counted = attempts.reader.spent()
            exchange.usage = combine_usages(self.counted.usages, exchange.asked.n)
        if self.counted is not None:
            self._count(self.counted)
        exchange.log_fields |= self.noted()

    def noted(self) -> dict[str, Any]:
        """For the log."""
        attempts = self._running()
        found: dict[str, Any] = {"attempts": 0 if attempts is None else attempts.made}
        if self.counted is not None:
            found["usage_from"] = self.counted.source
            if self.counted.wrong:
                found["usage_wrong"] = True
        return found

    def _count(self, counted: usage.AnswerUsage) -> None:
        if counted.wrong:
            self.upstream.count("usage_wrong")
        elif counted.source == "counted":
            self.upstream.count("usage_counted")
        elif counted.source == "estimated":
            self.upstream.count("usage_estimated")

    # What they have in common

    def _built_request(self) -> UpstreamRequest:
        if self._request is None:
            raise RuntimeError("begin() must be called first")
        return self._request

    def _running(self) -> Attempts[ChoiceDelta] | Attempts[bytes] | None:
        return self._relayed if self._pieces is None else self._pieces

    def _attempts(self, reader: Callable[[], AttemptReader[Any]]) -> Attempts[Any]:
        exchange, upstream = self.exchange, self.upstream
        attempts: Attempts[Any] = Attempts(
            upstream,
            self._built_request(),
            reader,
            arrival=exchange.arrival,
            deadline=exchange.deadline,
            priority=exchange.asked.priority,
        )
        if self.gone:
            attempts.cancel()
        return attempts

    def _note_time(self) -> None:
        exchange = self.exchange
        exchange.last_at = self.upstream.clock()
        if not exchange.first_at:
            exchange.first_at = exchange.last_at

    def _timed(self, used: TokenUsage) -> TokenUsage:
        """With the times as they look from here: the upstream's own queue is a part of its prefill."""
        exchange, attempts = self.exchange, self._running()
        if attempts is not None and attempts.sent is not None and exchange.first_at:
            used.queue_s = attempts.queued_s
            used.prefill_s = max(0.0, exchange.first_at - attempts.sent)
            used.decode_s = max(0.0, exchange.last_at - exchange.first_at)
        return used
