"""The golden fallback: which answers are replaced, before the client has anything of them, and what is charged."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from headrace.config.routing_section import GoldenConfig
from headrace.engine.interface.grammar_spec import Grammar
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, TextRequest
from headrace.gateway.routing.composite_answerer import derive_exchange
from headrace.gateway.routing.golden import GoldenAnswerer, failed_golden_check
from headrace.gateway.serving.exchange import Exchange
from tests.support.running_server import asynchronous
from tests.support.scripted_answers import Line, Scripted, answer, asked_for, broken, exchange_of, served

JSON = Grammar("json_object")


def refuses_bad(choices: Sequence[Choice], exchange: Exchange) -> str:
    return "json" if any("bad" in choice.content for choice in choices) else ""


class Trial:
    def __init__(
        self, first: Sequence[Line], golden: Sequence[Line] = (), *, stream: bool = False, **config: object
    ) -> None:
        self.exchange = exchange_of(asked_for(stream=stream, grammar=JSON))
        self.first = Scripted(derive_exchange(self.exchange, self.exchange.served, self.exchange.text_request), first)
        better = derive_exchange(self.exchange, served("mini@golden"), self.exchange.text_request)
        self.golden = Scripted(better, golden or answer("good"))
        self.asked: list[TextRequest] = []
        settings = GoldenConfig(**{"checks": ("json",), **config})  # type: ignore[arg-type]

        def first_made(text_request: TextRequest) -> Scripted:
            self.asked.append(text_request)
            return self.first

        self.whole = GoldenAnswerer(self.exchange, first_made, lambda _: self.golden, settings, refuses_bad)
        self.taken: list[ChoiceDelta] = []

    async def run(self) -> str:
        await self.whole.begin()
        assert await self.whole.run(lambda delta: self.taken.append(delta) is None)
        self.whole.settle()
        return "".join(delta.content for delta in self.taken)


@asynchronous
async def test_an_answer_that_passes_is_served_and_charged() -> None:
    trial = Trial(answer("fine ", "answer"))
    assert await trial.run() == "fine answer"
    assert (trial.exchange.served.name, trial.golden.begun) == ("mini", False)
    assert [(each.variant, each.charged) for each in trial.whole.charges] == [("mini", True)]
    assert trial.exchange.usage.output_tokens == 2
    assert failed_golden_check(trial.whole.decisions) is None


@asynchronous
async def test_a_failed_check_is_answered_by_the_golden_variant_which_alone_is_charged() -> None:
    trial = Trial(answer("a ", "bad ", "answer"), answer("good"))
    assert await trial.run() == "good"  # nothing of the first answer came out
    assert trial.exchange.served.name == "mini@golden"
    charges = [(each.variant, each.role, each.charged) for each in trial.whole.charges]
    assert charges == [("mini", "first try", False), ("mini@golden", "answer", True)]
    assert trial.exchange.usage.output_tokens == 1
    assert failed_golden_check(trial.whole.decisions) == ("json", "mini", "mini@golden")
    assert trial.first.settled


@asynchronous
async def test_low_confidence_fails_where_it_is_checked() -> None:
    doubtful = answer("maybe ", "so", logprob=math.log(0.2))
    trial = Trial(doubtful, checks=("confidence",), confidence=0.3)
    assert await trial.run() == "good"
    assert trial.asked[0].sampling.logprobs is not None
    sure = Trial(answer("surely ", "so", logprob=math.log(0.9)), checks=("confidence",), confidence=0.3)
    assert await sure.run() == "surely so"
    assert all(delta.logprobs is None for delta in sure.taken)  # the client asked for none


@asynchronous
async def test_a_check_that_is_not_configured_does_not_count() -> None:
    assert await Trial(answer("a ", "bad ", "answer"), checks=("citations",)).run() == "a bad answer"


@asynchronous
async def test_a_stream_is_checked_by_its_beginning_only() -> None:
    wrong = Trial(answer("Sure, ", "here ", "it ", "is: {}"), stream=True, stream_tokens=2)
    assert await wrong.run() == "good"
    late = Trial(answer('{"a": ', "1, ", "2, ", "bad"), stream=True, stream_tokens=2)
    assert await late.run() == '{"a": 1, 2, bad'  # the client had its beginning
    short = Trial(answer("bad"), stream=True)
    assert await short.run() == "good"  # all of it was held


@asynchronous
async def test_a_slow_answer_is_passed_on() -> None:
    gate = asyncio.Event()
    trial = Trial([*answer("bad ")[:1], gate, *answer("end")], within_s=0.01)
    running = asyncio.ensure_future(trial.run())
    while not trial.taken:
        await asyncio.sleep(0.002)
    gate.set()
    assert await running == "bad end"


@asynchronous
async def test_a_client_that_leaves_ends_both() -> None:
    gate = asyncio.Event()
    trial = Trial([gate])
    await trial.whole.begin()
    running = asyncio.ensure_future(trial.whole.run(lambda _: True))
    await asyncio.sleep(0)
    trial.whole.cancel()
    gate.set()
    assert await running
    trial.whole.settle()
    assert trial.first.gone


@asynchronous
async def test_the_first_variants_errors_pass_through() -> None:
    trial = Trial([broken()])
    with pytest.raises(ApiError):
        await trial.run()
