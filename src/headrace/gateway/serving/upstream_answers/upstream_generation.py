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
    """Return the tokens of each prompt if the upstream has a tokenizer configured, else one estimated sum.

    Raises ApiError if a prompt exceeds the context."""
    request = exchange.text_request
    length = usage.prompt_bytes(request)
    if upstream.tokenizer is None:
        return [usage.estimate_prompt_tokens(length, len(request.messages or ()))]
    count = partial(usage.count_prompts, request, upstream.tokenizer)
    try:
        found = await asyncio.to_thread(count) if length > usage.LONG_TEXT else count()
    except HeadraceError as error:
        raise as_api_error(error) from None
    context = upstream.config.context
    if context is not None and max(found) >= context:
        parameter = "prompt" if request.messages is None else "messages"
        raise ApiError(
            f"'{parameter}' has {max(found)} tokens. The context of '{exchange.served.name}' is {context} tokens.",
            parameter=parameter,
            code="context_length_exceeded",
        )
    return found


class UpstreamGeneration:
    """An exchange in progress. Not thread-safe: use it from one event loop."""

    def __init__(self, exchange: Exchange, upstream: Upstream, *, can_restart: bool = False) -> None:
        """`can_restart`: the caller handles RestartDelta, so an answer that breaks off may be requested again."""
        self.exchange = exchange
        self._can_restart = can_restart
        self.upstream = upstream
        self.gone = False  # the client has left
        self.counted: usage.AnswerUsage | None = None  # the usage and its source, once known
        self._request: UpstreamRequest | None = None
        self._prompt_bytes = 0
        self._deltas: Attempts[ChoiceDelta] | None = None
        self._relayed: Attempts[bytes] | None = None
        self._usages: dict[int, TokenUsage] = {}  # by the choice
        self._settled = False

    @property
    def model(self) -> str:
        """The model's name on the upstream."""
        return self.upstream.config.model or self.exchange.served.name

    async def begin(self) -> None:
        """Check and build the request. Raises ApiError before anything is sent."""
        exchange, upstream = self.exchange, self.upstream
        counts = await count_prompt_tokens(exchange, upstream)
        self._prompt_bytes = usage.prompt_bytes(exchange.text_request)
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

    # Deltas

    async def run(self, take: Callable[[ChoiceDelta], bool]) -> bool:
        """Pass every delta to `take` as it arrives.

        Return True once every choice has ended. Return False as soon as `take` returns False: call this again to go
        on; until then nothing more is read from the upstream. Raises ApiError if the upstream rejects or fails the
        request, BrokenStreamError if it fails after the first delta.
        """
        if self._deltas is None:
            self._deltas = self._attempts(self._reader)
        return await self._deltas.run(
            partial(self._deliver, take), restart=self._restart if self._can_restart else None
        )

    def _restart(self, error: UpstreamError) -> list[ChoiceDelta]:
        """Return the deltas that tell the client to discard what it has."""
        self._usages.clear()
        name, why = self.exchange.served.name, error.code or error.kind
        return [RestartDelta(index, variant=name, why=why) for index in range(self._built_request().choices)]

    def _deliver(self, take: Callable[[ChoiceDelta], bool], piece: ChoiceDelta) -> bool:
        if isinstance(piece, RestartDelta):
            return take(piece)
        self._note_time()
        if piece.finish is not None:
            exchange = self.exchange
            self._usages[piece.index] = piece.usage = self._with_times(piece.usage or TokenUsage())
            exchange.usage = combine_usages(
                [self._usages[index] for index in sorted(self._usages)], exchange.text_request.n
            )
            exchange.finish = piece.finish
        return take(piece)

    def _reader(self) -> UpstreamAnswerReader:
        exchange, upstream = self.exchange, self.upstream
        return UpstreamAnswerReader(
            self._built_request(),
            name=exchange.served.name,
            n=exchange.text_request.n,
            prompt_tokens=exchange.prompt_tokens,
            prompt_bytes=self._prompt_bytes,
            tokenizer=upstream.tokenizer,
            hidden=upstream.client.hidden,
        )

    @property
    def output_tokens(self) -> int:
        """Tokens received so far over all choices, also while bytes are relayed; estimated until the usage is known."""
        attempts = self._running()
        return 0 if attempts is None else attempts.reader.output_tokens

    # Bytes

    def can_relay(self) -> bool:
        """Return whether the upstream's bytes can go unchanged to a client of the same dialect."""
        return self._deltas is None and can_relay(self.exchange, self._built_request(), self.upstream.takes)

    async def relay(
        self, write: Callable[[bytes], bool], own: Callable[[Exchange], EventWriter], *, rename: bool = True
    ) -> bool:
        """Like `run`, but pass on the bytes of the server-sent events up to `[DONE]`.

        `rename`: replace the model's name and the id with ours.
        """
        if self._relayed is None:

            def reader() -> AttemptReader[bytes]:
                exchange = self.exchange
                return RelayReader(exchange, self._built_request(), self._reader(), own(exchange), rename=rename)

            self._relayed = self._attempts(reader)

        def deliver(data: bytes) -> bool:
            self._note_time()
            return write(data)

        over = await self._relayed.run(deliver)
        counted = self._relayed.reader.counted
        if over and counted is not None:
            exchange = self.exchange
            self._usages = {place: self._with_times(used) for place, used in enumerate(counted.usages)}
            exchange.usage = combine_usages(list(self._usages.values()), exchange.text_request.n)
            exchange.finish = self._relayed.reader.delivered()[0][0].finish
        return over

    # The end

    def cancel(self) -> None:
        """Close the connection because the client left, so that the upstream stops generating."""
        self.gone = True
        attempts = self._running()
        if attempts is not None:
            attempts.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        """Release everything and record the usage in the exchange. Later calls do nothing."""
        if self._settled:
            return
        self._settled = True
        exchange, attempts = self.exchange, self._running()
        if attempts is None:
            return
        attempts.close()
        self.counted = attempts.reader.counted
        if not attempts.reader.over and attempts.reader.started:
            self.counted = attempts.reader.usage_so_far()
            exchange.usage = combine_usages(self.counted.usages, exchange.text_request.n)
        if self.counted is not None:
            self._count(self.counted)
        exchange.log_fields |= self.log_fields()

    def log_fields(self) -> dict[str, Any]:
        attempts = self._running()
        found: dict[str, Any] = {"attempts": 0 if attempts is None else attempts.count}
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

    # Shared by deltas and bytes

    def _built_request(self) -> UpstreamRequest:
        if self._request is None:
            raise RuntimeError("begin() must be called first")
        return self._request

    def _running(self) -> Attempts[ChoiceDelta] | Attempts[bytes] | None:
        return self._relayed if self._deltas is None else self._deltas

    def _attempts(self, reader: Callable[[], AttemptReader[Any]]) -> Attempts[Any]:
        exchange, upstream = self.exchange, self.upstream
        attempts: Attempts[Any] = Attempts(
            upstream,
            self._built_request(),
            reader,
            arrival=exchange.arrival,
            deadline=exchange.deadline,
            priority=exchange.text_request.priority,
            timeline=exchange.timeline,
        )
        if self.gone:
            attempts.cancel()
        return attempts

    def _note_time(self) -> None:
        exchange, now = self.exchange, self.upstream.clock()
        if exchange.first_at:
            exchange.gaps.append(now - exchange.last_at)
        else:
            exchange.first_at = now
        exchange.last_at = now

    def _with_times(self, used: TokenUsage) -> TokenUsage:
        """Fill in the times as seen from here: prefill includes the upstream's own queue."""
        exchange, attempts = self.exchange, self._running()
        if attempts is not None and attempts.sent is not None and exchange.first_at:
            used.queue_s = attempts.queued_s
            used.prefill_s = max(0.0, exchange.first_at - attempts.sent)
            used.decode_s = max(0.0, exchange.last_at - exchange.first_at)
        return used
