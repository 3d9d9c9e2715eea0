"""Several answerings that together answer one exchange: what they have in common, and who is charged for what.

Owns Answers (the surface that flow.Answering has), Charge, Decision, and Composed, from which cascades, hedges and
fallback chains are made: each is such an answering itself, so they can be put into one another. A part has an exchange
of its own, so that its usage is its own; what the client is told is the whole's. Knows no variant and no network.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    RestartDelta,
    TextRequest,
    TokenUsage,
    combine_usages,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.fleet import ServedVariant

Take = Callable[[ChoiceDelta], bool]
Clock = Callable[[], float]


class Answerer(Protocol):
    """An exchange under way; see flow.Answering."""

    exchange: Exchange
    gone: bool

    async def begin(self) -> None: ...

    async def run(self, take: Take) -> bool: ...

    def cancel(self) -> None: ...

    def settle(self, error: ApiError | None = None) -> None: ...


AnswererFactory = Callable[[TextRequest], Answerer]  # makes a part; nothing of it runs yet
SettledCallback = Callable[
    [Exchange, ApiError | None, bool], None
]  # hears once how a whole ended; the bool: its client left


class VariantCharge(msgspec.Struct, frozen=True):
    """What one variant computed for an exchange."""

    variant: str
    usage: TokenUsage
    role: str  # answer, first try, hedge, broken
    charged: bool = True  # False: nobody pays for it


class RoutingDecision(msgspec.Struct, frozen=True):
    """Something that was chosen, and why; for headers and traces."""

    stage: str  # rule, split, cascade, hedge, fallback, health
    chosen: str
    why: str


def derive_exchange(exchange: Exchange, served: ServedVariant, asked: TextRequest) -> Exchange:
    """A part's own exchange: the same request and arrival, so the same deadline, and a usage of its own."""
    return msgspec.structs.replace(
        exchange,
        served=served,
        asked=asked,
        usage=TokenUsage(),
        prompt_tokens=0,
        shaped_at=0.0,
        first_at=0.0,
        last_at=0.0,
        finish="",
    )


def choice_count(asked: TextRequest) -> int:
    """The choices of an answer."""
    return len(asked.prompts or (None,)) * asked.n


_COUNTS: Final = tuple(each.name for each in msgspec.structs.fields(TokenUsage))


def sum_usage(usages: Iterable[TokenUsage]) -> TokenUsage:
    """All of them one after another. (asked.total is for choices that run side by side.)"""
    all_of_them = list(usages)
    return TokenUsage(**{name: sum(getattr(each, name) for each in all_of_them) for name in _COUNTS})


def itemise_charges(ended: Mapping[int, tuple[str, TokenUsage]], n: int) -> list[VariantCharge]:
    """By variant, what choices that ended took: together what asked.total makes of them."""
    found: dict[str, list[TokenUsage]] = {}
    for place, index in enumerate(sorted(ended)):
        variant, usage = ended[index]
        # A prompt counts once, with the first of its choices.
        counted = usage if place % n == 0 else msgspec.structs.replace(usage, prompt_tokens=0, cached_tokens=0)
        found.setdefault(variant, []).append(counted)
    return [VariantCharge(variant, combine_usages(usages, 1), "answer") for variant, usages in found.items()]


def has_output(piece: ChoiceDelta) -> bool:
    """Whether a client hears something of it."""
    return bool(piece.content or piece.reasoning or piece.calls or piece.finish is not None)


class AnswerRun(Protocol):
    """What makes the pieces of an exchange's answer: an Answers, or a flow.Way."""

    exchange: Exchange

    async def run(self, take: Take) -> bool: ...


async def collect_choices(answers: AnswerRun) -> list[Choice]:
    """The whole of what is run."""
    found = [Choice(index) for index in range(choice_count(answers.exchange.asked))]

    def add(piece: ChoiceDelta) -> bool:
        if isinstance(piece, RestartDelta):
            found[piece.index] = Choice(piece.index)
        else:
            found[piece.index].add(piece)
        return True

    await answers.run(add)
    return found


class CompositeAnswerer(ABC):
    """One answering made of several. Whoever makes it settles it; it settles its parts."""

    def __init__(
        self, exchange: Exchange, *, settled: SettledCallback | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.exchange = exchange
        self.gone = False
        self.decisions: list[RoutingDecision] = []
        self._parts: list[Answerer] = []  # in the order in which they were begun
        self._over: set[int] = set()  # places of those that are settled
        self._serving: Answerer | None = None  # whose answer the client gets
        self._held: deque[ChoiceDelta] = deque()  # that the client is still to get, before what comes
        self._open = choice_count(exchange.asked)  # choices that have not ended
        self._clock = clock
        self._on_settled = settled
        self._is_settled = False

    @property
    @abstractmethod
    def charges(self) -> list[VariantCharge]:
        """What was computed, by whom, and who pays. Final once it is settled."""

    @property
    def parts(self) -> tuple[Answerer, ...]:
        """In the order in which they were begun."""
        return tuple(self._parts)

    @abstractmethod
    async def begin(self) -> None: ...

    @abstractmethod
    async def run(self, take: Take) -> bool: ...

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
        """Each part once. What still runs of it ends."""
        place = self._parts.index(part)
        if place not in self._over:
            self._over.add(place)
            part.settle(error)

    def _start(self, part: Answerer) -> Answerer:
        self._parts.append(part)
        return part

    def _serve(self, part: Answerer) -> None:
        """From now on the answer is this part's; the client is told its name."""
        self._serving = part
        self.exchange.served = part.exchange.served

    def _counting(self, take: Take) -> Take:
        """The same, with an eye on which choices have ended."""

        def counted(piece: ChoiceDelta) -> bool:
            if piece.finish is not None:
                self._open -= 1
            return take(piece)

        return counted

    def _hand_over(self, take: Take) -> bool:
        """What is held goes first; False where the client wants no more for now."""
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
            exchange.served = part.exchange.served  # which a part that is composed itself may have found out since
            exchange.prompt_tokens = part.exchange.prompt_tokens
            exchange.shaped_at = exchange.shaped_at or part.exchange.shaped_at
            exchange.first_at = exchange.first_at or part.exchange.first_at
            exchange.last_at = part.exchange.last_at
            exchange.finish = part.exchange.finish


def charges_for(part: Answerer, role: str, *, charged: bool = True) -> list[VariantCharge]:
    """A part's charges; each of its own where it is composed itself."""
    if isinstance(part, CompositeAnswerer):
        own = part.charges
        return own if charged else [msgspec.structs.replace(each, role=role, charged=False) for each in own]
    return [VariantCharge(part.exchange.served.name, part.exchange.usage, role, charged)]
