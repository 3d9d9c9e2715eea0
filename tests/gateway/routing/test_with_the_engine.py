"""Cascades, hedges and chains of the flow's own answerings, over streams of an engine that a test controls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headrace.config.routing_section import CascadeConfig, HedgeConfig
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import SampledToken
from headrace.engine.process.client_errors import WorkerLostError
from headrace.engine.process.output_stream import OutputStream
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.cascade import CascadeAnswerer
from headrace.gateway.routing.composite_answerer import Answerer, AnswererFactory, derive_exchange
from headrace.gateway.routing.fallback import FallbackAnswerer, FallbackStep
from headrace.gateway.routing.hedge import MIN_SAMPLES, HedgedAnswerer, HedgePolicy
from headrace.gateway.serving.engine_answering import EngineAnswering
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.served_variant import ServedVariant
from tests.support.running_server import FakeEngine, asynchronous, tokenizer, until
from tests.support.scripted_answers import Client, asked_for, deliver


class Variant:
    def __init__(self, name: str) -> None:
        self.engine = FakeEngine()
        self.served = ServedVariant(
            name=name, engine=self.engine, tokenizer=tokenizer(), context=2048, fingerprint=name
        )

    def part(self, exchange: Exchange) -> AnswererFactory:
        def make(asked: TextRequest) -> Answerer:
            return EngineAnswering(derive_exchange(exchange, self.served, asked))

        return make

    @property
    def requests(self) -> list[GenerationRequest]:
        return [stream.request for stream in self.engine.streams]


def exchange_for(variant: Variant, asked: TextRequest | None = None) -> Exchange:
    return Exchange(caller=Caller(tenant="acme"), text_request=asked or asked_for(), served=variant.served)


def says(*words: str, probability: float | None = None, breaks: bool = False) -> Callable[[OutputStream], None]:
    """A token for each word; log-probabilities only where the request asks for them."""

    def answer(stream: OutputStream) -> None:
        for word in words:
            token = tokenizer().encode(word, add_special_tokens=False)[0]
            chosen = None
            if stream.request.sampling.logprobs is not None and probability is not None:
                chosen = [SampledToken(token, math.log(probability), ((token, math.log(probability)),))]
            stream.push(SequenceOutput("", 0, [token], tokenizer().decode([token]), chosen=chosen))
        if breaks:
            stream.end(WorkerLostError("it is gone"))
            return
        usage = SequenceUsage(len(stream.request.prompt), len(words), 0, 0, 0, 0.001, 0.002, 0.003)
        stream.push(SequenceOutput("", 0, [], "", ending=SequenceEnd(FinishReason.STOP, usage)))

    return answer


@asynchronous
async def test_a_cascade_asks_the_engine_for_log_probabilities_and_goes_by_them() -> None:
    for probability, chosen in ((0.9, "draft"), (0.2, "mini")):
        draft, mini = Variant("draft"), Variant("mini")
        draft.engine.answer = says("small", probability=probability)
        mini.engine.answer = says("large", "words")
        exchange, client = exchange_for(mini), Client()
        cascade = CascadeAnswerer(
            exchange,
            draft.part(exchange),
            mini.part(exchange),
            CascadeConfig(small="draft", large="mini", threshold=0.5),
        )
        assert await deliver(cascade, client) is None
        assert exchange.model == chosen
        assert client.told() == exchange.usage
        assert exchange.usage.prompt_tokens == sum(len(each.prompt) for each in draft.requests + mini.requests)
        assert draft.requests[0].sampling.logprobs is not None
        assert all(each.sampling.logprobs is None for each in mini.requests)
        assert not draft.engine.open
        assert not mini.engine.open


@asynchronous
async def test_a_stream_whose_engine_is_lost_goes_on_with_another_byte_for_byte() -> None:
    first, second = Variant("first"), Variant("second")
    words = ("the", "wheel", "turns", "the", "stone")
    first.engine.answer = says(*words[:3], breaks=True)
    second.engine.answer = says(*words)
    whole, alone = Client(), exchange_for(second)
    await deliver(FallbackAnswerer(alone, [FallbackStep("second", second.part(alone))]), whole)
    exchange, client = exchange_for(first), Client()
    steps = [FallbackStep("first", first.part(exchange)), FallbackStep("second", second.part(exchange), "continue")]
    assert await deliver(FallbackAnswerer(exchange, steps), client) is None
    assert client.texts == whole.texts
    assert client.restarts == []
    assert "".join(piece.content for piece in client.pieces) == whole.texts[0]
    assert exchange.usage.output_tokens == len(words)
    assert exchange.usage == client.told()


@asynchronous
async def test_a_hedge_that_loses_is_cancelled_in_the_engine() -> None:
    variant = Variant("mini")
    hedging = HedgePolicy(HedgeConfig(least_ms=5.0, most_ms=10.0), lambda: True)
    for _ in range(MIN_SAMPLES):
        hedging.record_first_token(0.001)
        hedging.record_request()
    exchange, client = exchange_for(variant), Client()
    hedged = HedgedAnswerer(exchange, variant.part(exchange), variant.part(exchange), hedging)
    delivering = asyncio.ensure_future(deliver(hedged, client))
    await until(lambda: len(variant.engine.streams) == 2)
    first, second = variant.engine.streams
    says("quick", "words")(second)
    assert await delivering is None
    assert variant.engine.dropped == [first]
    assert exchange.usage.output_tokens == 2
    assert exchange.usage == client.told()
    assert first.request.sampling.seed == second.request.sampling.seed
