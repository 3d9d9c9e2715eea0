"""Answers one exchange with several answerers, and attributes the charges.

Owns the Answerer protocol and CompositeAnswerer, the base of cascades, hedges and fallback chains; each is an answerer
itself, so they nest. Every part has its own exchange, so that its usage is its own; the client sees the usage of the
whole. Does not know variants or the network.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    RestartDelta,
    TakeDelta,
    TextRequest,
    TokenUsage,
    combine_usages,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.served_variant import ServedVariant

Clock = Callable[[], float]


class Answerer(Protocol):
    """Answers one exchange: begin once, run until it ends, settle once."""

    exchange: Exchange
    gone: bool

    async def begin(self) -> None:
        """Do everything that can be rejected before output; ApiError if it is."""
        ...

    async def run(self, take: TakeDelta) -> bool:
        """Pass every delta to `take`. True once all choices have ended; False as soon as `take` returns False, and
        then the caller may call this again."""
        ...

    def cancel(self) -> None: ...

    def settle(self, error: ApiError | None = None) -> None: ...


AnswererFactory = Callable[[TextRequest], Answerer]  # does not start it
# Called once when an exchange has ended. The bool: the client left before.
SettledCallback = Callable[[Exchange, ApiError | None, bool], None]


class VariantCharge(msgspec.Struct, frozen=True):
    """The work of one variant for an exchange."""

    variant: str
    usage: TokenUsage
    role: str  # answer, first try, hedge, broken
    charged: bool = True  # False: the tenant does not pay for it


class RoutingDecision(msgspec.Struct, frozen=True):
    """One choice and its reason, for headers and traces."""

    stage: str  # rule, split, cascade, hedge, fallback, health
    chosen: str
    why: str


def derive_exchange(exchange: Exchange, served: ServedVariant, text_request: TextRequest) -> Exchange:
    """Return the exchange of a part: the same request, arrival and deadline, with its own usage."""
    return msgspec.structs.replace(
        exchange,
        served=served,
        text_request=text_request,
        usage=TokenUsage(),
        prompt_tokens=0,
        shaped_at=0.0,
        first_at=0.0,
        last_at=0.0,
        is_held_back=False,
        gaps=[],
        reading_s=0.0,
        finish="",
    )


def choice_count(text_request: TextRequest) -> int:
    """Return the number of choices in the answer."""
    return len(text_request.prompts or (None,)) * text_request.n


_USAGE_FIELDS: Final = tuple(each.name for each in msgspec.structs.fields(TokenUsage))


def sum_usage(usages: Iterable[TokenUsage]) -> TokenUsage:
    """Add up the usage of consecutive runs. (`combine_usages` is for choices that run side by side.)"""
    every = list(usages)
    return TokenUsage(**{name: sum(getattr(each, name) for each in every) for name in _USAGE_FIELDS})


def itemise_charges(ended: Mapping[int, tuple[str, TokenUsage]], n: int) -> list[VariantCharge]:
    """Return the charges of ended choices by variant; their sum is what `combine_usages` returns for all of them."""
    by_variant: dict[str, list[TokenUsage]] = {}
    for position, index in enumerate(sorted(ended)):
        variant, usage = ended[index]
        # A prompt counts once, with the first of its choices.
        counted = usage if position % n == 0 else msgspec.structs.replace(usage, prompt_tokens=0, cached_tokens=0)
        by_variant.setdefault(variant, []).append(counted)
    return [VariantCharge(variant, combine_usages(usages, 1), "answer") for variant, usages in by_variant.items()]


def has_output(piece: ChoiceDelta) -> bool:
    """True if the client sees anything of the delta."""
    return bool(piece.content or piece.reasoning or piece.calls or piece.finish is not None)


class AnswerRun(Protocol):
    """Produces the pieces of an exchange's answer."""

    exchange: Exchange

    async def run(self, take: TakeDelta) -> bool: ...


async def collect_choices(answers: AnswerRun, choices: list[Choice] | None = None) -> list[Choice]:
    """Run an answer to its end and return its choices. The empty list `choices` also has them if the run fails."""
    choices = [] if choices is None else choices
    choices += [Choice(index) for index in range(choice_count(answers.exchange.text_request))]

    def add(piece: ChoiceDelta) -> bool:
        if type(piece) is RestartDelta:
            choices[piece.index] = Choice(piece.index)
        else:
            choices[piece.index].add(piece)
        return True

    await answers.run(add)
    return choices


class CompositeAnswerer(ABC):
    """Combines several answerers into one. Its owner settles it, and it settles its parts."""

    holds_back = False  # whether it keeps a first output that has come, until it knows more of the answer

    def __init__(
        self, exchange: Exchange, *, settled: SettledCallback | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.exchange = exchange
        self.gone = False
        self.decisions: list[RoutingDecision] = []
        self._parts: list[Answerer] = []  # in the order of their start
        self._started_at: list[float] = []  # of each part, for its span
        self._settled_parts: set[int] = set()  # by index
        self._serving: Answerer | None = None  # the part whose answer the client gets
        self._held: deque[ChoiceDelta] = deque()  # goes to the client before any further delta
        self._open = choice_count(exchange.text_request)  # choices that have not ended
        self._clock = clock
        self._on_settled = settled
        self._is_settled = False

    @property
    @abstractmethod
    def charges(self) -> list[VariantCharge]:
        """The work of each variant, and whether it is charged. Final once settled."""

    @property
    def parts(self) -> tuple[Answerer, ...]:
        """The parts in the order of their start."""
        return tuple(self._parts)

    @abstractmethod
    async def begin(self) -> None: ...

    @abstractmethod
    async def run(self, take: TakeDelta) -> bool: ...

    def cancel(self) -> None:
        self.gone = True
        for part in self._parts:
            part.cancel()

    def settle(self, error: ApiError | None = None) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        for part in self._parts:
            self._settle(part, error if part is self._serving else None)
        self._sum_up()
        if self._on_settled is not None:
            self._on_settled(self.exchange, error, self.gone and self._open > 0)

    def _settle(self, part: Answerer, error: ApiError | None = None) -> None:
        """Settle a part once; if it still runs, it ends."""
        index = self._parts.index(part)
        if index not in self._settled_parts:
            self._settled_parts.add(index)
            part.settle(error)
            if len(self._parts) > 1 or error is not None:
                known: dict[str, Any] = {"variant": part.exchange.served.name, "serves": part is self._serving}
                if error is not None:
                    known["error"] = error.code or error.kind
                self.exchange.timeline.part("generate", "variant", self._started_at[index], **known)

    def _start(self, part: Answerer) -> Answerer:
        self._parts.append(part)
        self._started_at.append(time.monotonic())
        return part

    def _serve(self, part: Answerer) -> None:
        """Serve this part's answer from now on, under its variant's name."""
        self._serving = part
        self.exchange.served = part.exchange.served

    def _counting(self, take: TakeDelta) -> TakeDelta:
        """Wrap `take` to count the choices that end."""

        def counted(piece: ChoiceDelta) -> bool:
            if piece.finish is not None:
                self._open -= 1
            return take(piece)

        return counted

    def _hand_over(self, take: TakeDelta) -> bool:
        """Pass on the held deltas; False if the client wants no more for now."""
        while self._held:
            if not self.exchange.first_at:
                self.exchange.first_at = self._clock()
            if not take(self._held.popleft()):
                return False
        return True

    def _sum_up(self) -> None:
        exchange = self.exchange
        exchange.usage = sum_usage(each.usage for each in self.charges if each.charged)
        part = self._serving
        if part is not None:
            exchange.served = part.exchange.served  # a composite part may have changed it
            exchange.prompt_tokens = part.exchange.prompt_tokens
            exchange.shaped_at = exchange.shaped_at or part.exchange.shaped_at
            exchange.first_at = exchange.first_at or part.exchange.first_at
            exchange.last_at = part.exchange.last_at
            exchange.is_held_back = self.holds_back or part.exchange.is_held_back
            exchange.gaps, exchange.reading_s = part.exchange.gaps, part.exchange.reading_s
            exchange.finish = part.exchange.finish


def charges_for(part: Answerer, role: str, *, charged: bool = True) -> list[VariantCharge]:
    """Return the charges of a part; of a composite part, those of its own parts."""
    if isinstance(part, CompositeAnswerer):
        own = part.charges
        return own if charged else [msgspec.structs.replace(each, role=role, charged=False) for each in own]
    return [VariantCharge(part.exchange.served.name, part.exchange.usage, role, charged)]


class DecidingAnswerer(CompositeAnswerer):
    """A CompositeAnswerer that serves the answer of one part, once it has decided which."""

    async def run(self, take: TakeDelta) -> bool:
        if self._serving is None and not await self._decide():
            self._sum_up()
            return True  # the client left
        assert self._serving is not None
        counting = self._counting(take)
        if not self._hand_over(counting):
            return False
        ended = await self._run_serving(self._serving, counting)
        if ended:
            self._sum_up()
        return ended

    @abstractmethod
    async def _decide(self) -> bool:
        """Choose the answer that is served; False if the client left first."""

    async def _run_serving(self, serving: Answerer, take: TakeDelta) -> bool:
        """Pass on what the served answer still has."""
        return await serving.run(take)
