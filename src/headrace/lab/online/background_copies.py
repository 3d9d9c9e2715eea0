"""BackgroundCopies: answers copies of served requests by another variant, within bounds that protect live traffic.

Copies run on the surface `batch`, so that live requests come first, and they are never charged. A full queue, a spent
budget or a slow variant costs a copy and a count, never a wait. Does not compare answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Literal

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, TextRequest
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.lab.online.answer_difference import AnswerText

log: Final = logging.getLogger(__name__)

_DAY_S: Final = 86_400.0
_LOOK_S: Final = 0.02  # between two looks whether the server is idle
SURFACE: Final = "batch"

# Generates the answer of an exchange by its own variant, without the stages of the flow: Dispatcher.generate.
Generate = Callable[[Exchange], Awaitable[list[Choice]]]
Work = Coroutine[Any, Any, None]
When = Literal["always", "idle"]  # when a copy begins: at any time, or while the server runs no request


class CopyBounds(msgspec.Struct, frozen=True, kw_only=True):
    concurrent: int = 1
    queue: int = 32  # copies that wait
    tokens_per_day: int = 1_000_000  # of prompts and answers, per day in UTC
    timeout_s: float = 60.0  # of one copy


class Copy(msgspec.Struct, frozen=True):
    """A request to answer once more."""

    caller: Caller
    text_request: TextRequest
    endpoint: str

    @classmethod
    def of(cls, exchange: Exchange) -> Copy | None:
        """Return None for requests that cannot be copied: those that only measure a prompt."""
        text_request = exchange.text_request
        if text_request.max_tokens == 0 or text_request.echo or text_request.prompt_logprobs is not None:
            return None
        copied = text_request.but(surface=SURFACE, stream=False, deadline_s=None, priority=0)
        return cls(exchange.caller, copied, exchange.endpoint)


class CopyError(Exception):
    """A copy was not answered. `outcome`: failed or timeout."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class BackgroundCopies:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        bounds: CopyBounds,
        generate: Generate,
        *,
        is_idle: Callable[[], bool] = lambda: True,  # copies that wait for an idle server begin only then
        count: Callable[[str], None],  # counts an outcome: queue_full, budget, failed, timeout, copied, asked_again
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.bounds = bounds
        self._generate = generate
        self._is_idle = is_idle
        self._count = count
        self._wall = wall
        self._queue: asyncio.Queue[tuple[Callable[[], Work], bool]] = asyncio.Queue(bounds.queue)
        self._day = 0
        self._tokens = 0  # of copies of this day

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def tokens_today(self) -> int:
        self._turn_day()
        return self._tokens

    def submit(self, work: Callable[[], Work], *, when: When) -> bool:
        """Queue work that calls `answer`. Return False, and count why, if there is no room or budget."""
        self._turn_day()
        if self._tokens >= self.bounds.tokens_per_day:
            self._count("budget")
            return False
        try:
            self._queue.put_nowait((work, when == "idle"))
        except asyncio.QueueFull:
            self._count("queue_full")
            return False
        return True

    async def run(self) -> None:
        """Do the queued work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.bounds.concurrent):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            work, waits = await self._queue.get()
            while waits and not self._is_idle():
                await asyncio.sleep(_LOOK_S)
            try:
                await work()
            except CopyError as failure:
                self._count(failure.outcome)
            except Exception as error:  # a copy that fails is counted, and the next one is answered
                log.error("a copy of a request failed", exc_info=error)
                self._count("failed")

    async def answer(
        self, copy: Copy, served: ServedVariant, *, outcome: str = "copied"
    ) -> tuple[list[Choice], AnswerText]:
        """Answer a copy by a variant, and count the outcome. CopyError if that fails or takes too long."""
        exchange = Exchange(
            caller=copy.caller,
            text_request=copy.text_request.but(model=served.name),
            served=served,
            endpoint=copy.endpoint,
            surface=SURFACE,
        )
        try:
            async with asyncio.timeout(self.bounds.timeout_s):
                choices = await self._generate(exchange)
        except TimeoutError:
            raise CopyError("timeout") from None
        except ApiError:
            raise CopyError("failed") from None
        finally:
            self._spend(exchange)
        self._count(outcome)
        return choices, answer_text(exchange, choices, began=exchange.arrival)

    def _spend(self, exchange: Exchange) -> None:
        self._turn_day()
        self._tokens += (exchange.usage.prompt_tokens or exchange.prompt_tokens) + exchange.usage.output_tokens

    def _turn_day(self) -> None:
        if (day := int(self._wall() // _DAY_S)) != self._day:
            self._day, self._tokens = day, 0


def served_text(exchange: Exchange, choices: list[Choice]) -> AnswerText:
    """Return what is compared of an answer that a client got."""
    return answer_text(exchange, choices, began=exchange.timeline.began)


def answer_text(exchange: Exchange, choices: list[Choice], *, began: float) -> AnswerText:
    upstream = exchange.served.upstream
    comes_at_once = exchange.is_held_back or (upstream is not None and not upstream.takes.stream)
    return AnswerText.of(
        choices,
        tokens=exchange.usage.output_tokens,
        seconds=exchange.last_at - began if exchange.last_at else 0.0,
        first_s=exchange.first_at - began if exchange.first_at and not comes_at_once else 0.0,
    )
