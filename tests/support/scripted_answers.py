"""Answerings that follow a script, in the place of engines and upstreams, and a client that takes what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import (
    ChoiceDelta,
    FinishReason,
    RestartDelta,
    TakeDelta,
    TextRequest,
    TokenLogprob,
    TokenUsage,
    combine_usages,
)
from headrace.gateway.routing.composite_answerer import Answerer, choice_count, derive_exchange
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.running_server import FakeEngine, tokenizer

PROMPT = 20  # tokens of every prompt
Line = ChoiceDelta | ApiError | asyncio.Event


def served(name: str, surface: str = "chat") -> ServedVariant:
    return ServedVariant(
        name=name, engine=FakeEngine(), tokenizer=tokenizer(), context=2048, fingerprint=f"fp_{name}", surface=surface
    )


def asked_for(text: str = "Hello", **changes: object) -> TextRequest:
    asked = TextRequest(model="mini", messages=[{"role": "user", "content": text}])
    return asked.but(**changes)


def exchange_of(asked: TextRequest | None = None, *, variant: str = "mini", tenant: str = "acme") -> Exchange:
    return Exchange(caller=Caller(tenant=tenant), text_request=asked or asked_for(), served=served(variant), id="one")


def broken(code: str = "engine_lost") -> ApiError:
    return ApiError("it broke", kind="overloaded_error", code=code)


def said(text: str, index: int = 0, *, logprob: float | None = None, top: Sequence[float] = ()) -> ChoiceDelta:
    logprobs = None
    if logprob is not None:
        likeliest = [(f"t{place}", b"t", each) for place, each in enumerate(top or (logprob,))]
        logprobs = [TokenLogprob(text, text.encode(), logprob, likeliest, text)]
    return ChoiceDelta(index, text, logprobs=logprobs)


def ends(text: str = "", index: int = 0, *, tokens: int = 0, finish: FinishReason = "stop") -> ChoiceDelta:
    return ChoiceDelta(index, text, finish=finish, usage=TokenUsage(prompt_tokens=PROMPT, output_tokens=tokens))


def answer(*texts: str, index: int = 0, logprob: float | None = None) -> list[Line]:
    """The texts, a token each, and the end."""
    return [*(said(text, index, logprob=logprob) for text in texts), ends(index=index, tokens=len(texts))]


class Scripted:
    """An event in a script is waited for. It is charged for its prompt and a token for each piece."""

    def __init__(self, exchange: Exchange, script: Sequence[Line], refuses: ApiError | None = None) -> None:
        self.exchange = exchange
        self.gone = False
        self.settled = 0
        self.begun = False
        self._script = list(script)
        self._refuses = refuses
        self._tokens: dict[int, int] = {}
        self._usages: dict[int, TokenUsage] = {}
        self._over: asyncio.Event = asyncio.Event()

    async def begin(self) -> None:
        self.begun = True
        if self._refuses is not None:
            raise self._refuses
        self.exchange.prompt_tokens = PROMPT

    async def run(self, take: TakeDelta) -> bool:
        while self._script:
            if self.gone or self.settled:
                return True
            line = self._script[0]
            if isinstance(line, asyncio.Event):
                await self._wait(line)
                if self.gone:
                    return True
                self._script.pop(0)
                continue
            self._script.pop(0)
            if isinstance(line, ApiError):
                raise line
            self._count(line)
            if not take(msgspec.structs.replace(line)):
                return False
        return True

    async def _wait(self, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._over.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def _count(self, piece: ChoiceDelta) -> None:
        if isinstance(piece, RestartDelta):
            self._usages.pop(piece.index, None)
            self._tokens.pop(piece.index, None)
        elif piece.finish is not None and piece.usage is not None:
            self._usages[piece.index] = piece.usage
            self.exchange.finish = piece.finish
            self.exchange.usage = combine_usages(
                [self._usages[each] for each in sorted(self._usages)], self.exchange.text_request.n
            )
        else:
            self._tokens[piece.index] = self._tokens.get(piece.index, 0) + 1

    def cancel(self) -> None:
        self.gone = True
        self._over.set()

    def settle(self, error: ApiError | None = None) -> None:
        self.settled += 1
        self._over.set()
        if len(self._usages) < choice_count(self.exchange.text_request) and self._tokens:
            self.exchange.usage = TokenUsage(prompt_tokens=PROMPT, output_tokens=sum(self._tokens.values()))


@dataclass
class Stage:
    """Makes scripted parts of one exchange, and remembers them by their variant."""

    exchange: Exchange
    made: dict[str, list[Scripted]] = field(default_factory=dict[str, list[Scripted]])

    def plays(
        self, variant: str, script: Sequence[Line] = (), refuses: ApiError | None = None
    ) -> Callable[[TextRequest], Answerer]:
        def make(asked: TextRequest) -> Answerer:
            part = Scripted(derive_exchange(self.exchange, served(variant), asked), script, refuses)
            self.made.setdefault(variant, []).append(part)
            return part

        return make

    def check_settled(self) -> None:
        for parts in self.made.values():
            for part in parts:
                assert part.settled == 1, part.exchange.served.name


@dataclass
class Client:
    """What a client has of a stream: texts by choice, marks, and the usage that it was told."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    restarts: list[RestartDelta] = field(default_factory=list[RestartDelta])
    usages: dict[int, TokenUsage] = field(default_factory=dict[int, TokenUsage])
    pieces: list[ChoiceDelta] = field(default_factory=list[ChoiceDelta])
    room: Callable[[], bool] = field(default=lambda: True)
    anew: bool = False  # hears of the answer when it is whole, so that also what has ended may begin anew

    def take(self, piece: ChoiceDelta) -> bool:
        self.pieces.append(piece)
        if self.anew and isinstance(piece, RestartDelta):
            self.usages.pop(piece.index, None)
        assert piece.index not in self.usages, "a choice goes on after its end"
        if isinstance(piece, RestartDelta):
            self.restarts.append(piece)
            self.texts[piece.index] = ""
        else:
            self.texts[piece.index] = self.texts.get(piece.index, "") + piece.content
        if piece.finish is not None:
            self.usages[piece.index] = piece.usage or TokenUsage()
        return self.room()

    def told(self, n: int = 1) -> TokenUsage:
        return combine_usages([self.usages[index] for index in sorted(self.usages)], n)


async def deliver(answers: Answerer, client: Client) -> ApiError | None:
    """As the server does: begun, run as often as there is room, settled."""
    error: ApiError | None = None
    try:
        await answers.begin()
        while not await answers.run(client.take):
            await asyncio.sleep(0)
    except ApiError as caught:
        error = caught
    answers.settle(error)
    return error


def with_logprobs(count: int | None) -> SamplingParams:
    return SamplingParams(logprobs=count)
