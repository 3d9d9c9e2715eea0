"""The stream of one request's outputs, to iterate over or to be called back by. The client fills it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput
from headrace.engine.interface.request import GenerationRequest, prompt_ids
from headrace.engine.process.replica_choice import prefix_keys


class StreamOwner(Protocol):
    """The client that a stream belongs to."""

    def drop(self, stream: OutputStream) -> None:
        """Forget an abandoned stream and cancel its sequences."""
        ...


class OutputStream:
    """One request's outputs as they come; iterate once. Leaving it before its end cancels the request.

    A consumer that cannot afford a turn of the event loop per output uses `listen` and `ready` instead.
    """

    def __init__(self, source: StreamOwner, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]  # tokens so far, by sequence
        self.endings: list[SequenceEnd | None] = [None] * request.n
        self.attempts = 0  # workers lost since the last output
        self.keys = prefix_keys(prompt_ids(request), request.salt)
        self.closed = False
        self._source = source
        self.ready: deque[SequenceOutput] = deque()  # outputs that nobody has taken
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` whenever an output came or the stream ended; None stops that. The listener must not raise."""
        self._listener = listener

    def take(self) -> SequenceOutput | None:
        """Return the next output, or None if none has come. Raise the error that broke the stream."""
        if self.ready:
            return self.ready.popleft()
        self.check()
        return None

    def check(self) -> None:
        """Raise the error that broke the stream, if one did."""
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        while (output := self.take()) is None:
            if self.closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None
        return output

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End what still runs, by the worker's next step. Nothing more comes."""
        if not self.closed:
            self._source.drop(self)
            self.end()

    def push(self, output: SequenceOutput) -> None:
        self.attempts = 0
        self.tokens[output.index] += output.tokens
        self.endings[output.index] = output.ending
        self.ready.append(output)
        if None not in self.endings:
            self.end()
        else:
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        self.closed = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
