"""Cascades: who answers by what confidence, what a client gets of it, and who is charged."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config.routing_section import CascadeConfig
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.routing.cascade import CascadeAnswerer
from headrace.gateway.routing.composite_answerer import collect_choices, sum_usage
from headrace.gateway.routing.confidence import MEASURES, TOP, Confidence
from tests.support.running_server import asynchronous
from tests.support.scripted_answers import (
    PROMPT,
    Client,
    Line,
    Stage,
    answer,
    asked_for,
    broken,
    deliver,
    ends,
    exchange_of,
    said,
    with_logprobs,
)

SURE, UNSURE = -0.01, -2.0
CASCADE = CascadeConfig(small="draft", large="mini", threshold=0.5)


def cascade_of(
    stage: Stage, small: list[Line], large: list[Line] | None = None, cascade: CascadeConfig = CASCADE
) -> CascadeAnswerer:
    script = answer("large ", "answer") if large is None else large
    return CascadeAnswerer(stage.exchange, stage.plays("draft", small), stage.plays("mini", script), cascade)


@asynchronous
async def test_a_sure_answer_of_the_small_model_is_served_and_alone_charged() -> None:
    stage, client = Stage(exchange_of()), Client()
    cascade = cascade_of(stage, answer("yes ", "it is", logprob=SURE))
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "yes it is"}
    assert "mini" not in stage.made
    assert [(each.variant, each.role, each.charged) for each in cascade.charges] == [("draft", "answer", True)]
    assert stage.exchange.usage == client.told() == cascade.charges[0].usage
    assert stage.exchange.model == "draft"
    assert stage.exchange.finish == "stop"
    stage.check_settled()


@asynchronous
async def test_an_unsure_answer_is_answered_by_the_large_model_and_both_are_charged() -> None:
    stage, client = Stage(exchange_of()), Client()
    cascade = cascade_of(stage, answer("maybe ", "so", logprob=UNSURE))
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "large answer"}
    assert [(each.variant, each.role) for each in cascade.charges] == [("draft", "first try"), ("mini", "answer")]
    assert stage.exchange.usage.prompt_tokens == 2 * PROMPT
    assert stage.exchange.usage.output_tokens == 4
    assert stage.exchange.usage == client.told() == sum_usage(each.usage for each in cascade.charges)
    assert stage.exchange.model == "mini"
    (decision,) = cascade.decisions
    assert decision.chosen == "mini"
    assert "mean 0.135 < 0.500" in decision.why
    stage.check_settled()


@asynchronous
async def test_nothing_is_told_before_it_is_decided_and_then_the_small_answer_goes_on_as_it_comes() -> None:
    stage, client = Stage(exchange_of()), Client()
    more = asyncio.Event()
    small: list[Line] = [said("a ", logprob=SURE), said("b ", logprob=SURE), more, said("c"), ends(tokens=3)]
    cascade = cascade_of(stage, small, cascade=replace(CASCADE, tokens=2))
    await cascade.begin()
    running = asyncio.ensure_future(cascade.run(client.take))
    await asyncio.sleep(0.01)
    assert client.texts == {0: "a b "}  # while the rest is still to come
    more.set()
    assert await running
    assert client.texts == {0: "a b c"}
    cascade.settle()


@asynchronous
async def test_after_so_many_tokens_the_rest_of_an_unsure_answer_is_not_waited_for() -> None:
    stage, client = Stage(exchange_of()), Client()
    small: list[Line] = [said("a ", logprob=UNSURE), said("b ", logprob=SURE), asyncio.Event()]
    cascade = cascade_of(stage, small, cascade=replace(CASCADE, tokens=1))
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "large answer"}
    assert cascade.charges[0].usage.output_tokens == 1
    stage.check_settled()


@asynchronous
async def test_a_small_model_that_says_nothing_in_time_is_left() -> None:
    stage, client = Stage(exchange_of()), Client()
    cascade = cascade_of(stage, [asyncio.Event()], cascade=replace(CASCADE, within_s=0.01))
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "large answer"}
    assert stage.exchange.usage.output_tokens == 2
    assert "undecided after 0.01 s" in cascade.decisions[0].why


@asynchronous
async def test_a_small_model_without_logprobs_is_not_listened_to_for_ever() -> None:
    stage, client = Stage(exchange_of()), Client()
    small: list[Line] = [*(said("x") for _ in range(50)), asyncio.Event()]
    cascade = cascade_of(stage, small, cascade=replace(CASCADE, tokens=4))
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "large answer"}
    assert cascade.charges[0].usage.output_tokens <= 6


@pytest.mark.parametrize("refused", [broken(), invalid_request("the prompt is too long", "messages")])
@asynchronous
async def test_what_the_small_model_refuses_the_large_one_answers(refused: ApiError) -> None:
    stage, client = Stage(exchange_of()), Client()
    cascade = CascadeAnswerer(
        stage.exchange, stage.plays("draft", refuses=refused), stage.plays("mini", answer("large")), CASCADE
    )
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "large"}
    assert stage.exchange.usage == client.told()


@asynchronous
async def test_a_small_model_that_fails_within_its_answer_is_charged_and_left() -> None:
    stage, client = Stage(exchange_of()), Client()
    cascade = cascade_of(stage, [said("a", logprob=SURE), broken()])
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "large answer"}
    assert stage.exchange.usage.output_tokens == 3


@asynchronous
async def test_an_error_of_the_large_model_is_told_and_what_was_computed_is_charged() -> None:
    stage, client = Stage(exchange_of()), Client()
    cascade = cascade_of(stage, answer("a", logprob=UNSURE), [said("large "), broken()])
    error = await deliver(cascade, client)
    assert error is not None
    assert error.code == "engine_lost"
    assert client.texts == {0: "large "}
    assert stage.exchange.usage.output_tokens == 2
    stage.check_settled()


@asynchronous
async def test_a_client_that_leaves_before_the_decision_ends_it_and_nobody_else_is_asked() -> None:
    stage, client = Stage(exchange_of()), Client()
    heard: list[tuple[str, bool]] = []
    cascade = CascadeAnswerer(
        stage.exchange,
        stage.plays("draft", [said("a", logprob=UNSURE), asyncio.Event()]),
        stage.plays("mini", answer("large")),
        CASCADE,
        settled=lambda exchange, error, gone: heard.append((exchange.id, gone)),
    )
    await cascade.begin()
    running = asyncio.ensure_future(cascade.run(client.take))
    await asyncio.sleep(0.01)
    cascade.cancel()
    assert await running
    cascade.settle()
    cascade.settle()
    assert heard == [("one", True)]
    assert "mini" not in stage.made
    assert client.pieces == []
    assert stage.exchange.usage.output_tokens == 1


@pytest.mark.parametrize("wanted", [None, 0, 2])
@asynchronous
async def test_a_client_sees_no_log_probabilities_that_it_did_not_ask_for(wanted: int | None) -> None:
    stage, client = Stage(exchange_of(asked_for(sampling=with_logprobs(wanted)))), Client()
    top = [SURE, -5.0, -6.0, -7.0]
    small: list[Line] = [said("a", logprob=SURE, top=top), said("b", logprob=SURE, top=top), ends(tokens=2)]
    cascade = cascade_of(stage, small, cascade=replace(CASCADE, tokens=1))
    assert await deliver(cascade, client) is None
    (part,) = stage.made["draft"]
    assert part.exchange.text_request.sampling.logprobs == max(TOP, wanted or 0)
    texts = [piece for piece in client.pieces if piece.content]
    if wanted is None:
        assert all(piece.logprobs is None for piece in texts)
    else:
        found = [token for piece in texts for token in piece.logprobs or ()]
        assert [token.logprob for token in found] == [SURE, SURE]
        assert all(len(token.top) == wanted for token in found)


@asynchronous
async def test_of_several_choices_the_least_sure_decides() -> None:
    stage, client = Stage(exchange_of(asked_for(n=2))), Client()
    small: list[Line] = [*answer("a", logprob=SURE), *answer("b", index=1, logprob=UNSURE)]
    cascade = cascade_of(stage, small, [*answer("x"), *answer("y", "z", index=1)])
    assert await deliver(cascade, client) is None
    assert client.texts == {0: "x", 1: "yz"}
    assert stage.exchange.usage == client.told(2)
    assert stage.exchange.usage.prompt_tokens == 2 * PROMPT
    assert stage.exchange.usage.output_tokens == 5


@asynchronous
async def test_a_whole_answer_is_that_of_the_model_that_was_decided_for() -> None:
    for logprob, text in ((SURE, "small"), (UNSURE, "large answer")):
        stage = Stage(exchange_of())
        cascade = cascade_of(stage, answer("small", logprob=logprob))
        await cascade.begin()
        (choice,) = await collect_choices(cascade)
        assert choice.content == text
        cascade.settle()
        assert choice.usage == stage.exchange.usage


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_client_is_told_is_what_is_charged(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    after = data.draw(st.sampled_from((None, 1, 2)))
    logprobs = st.sampled_from((SURE, UNSURE))

    def script(word: str) -> list[Line]:
        lines: list[Line] = []
        for index in range(n):
            texts = [f"{word}{place} " for place in range(data.draw(st.integers(1, 4)))]
            lines += [said(text, index, logprob=data.draw(logprobs)) for text in texts]
            lines.append(ends(index=index, tokens=len(texts)))
        return lines

    small, large = script("s"), script("l")
    rooms = data.draw(st.lists(st.booleans(), min_size=40, max_size=40))

    async def main() -> None:
        stage, client = Stage(exchange_of(asked_for(n=n))), Client(room=lambda: rooms.pop() if rooms else True)
        cascade = cascade_of(stage, small, large, replace(CASCADE, tokens=after))
        assert await deliver(cascade, client) is None
        chosen = large if cascade.escalated else small
        wanted = {index: "" for index in range(n)}
        for line in chosen:
            if isinstance(line, ChoiceDelta):
                wanted[line.index] += line.content
        assert client.texts == wanted
        assert client.told(n) == stage.exchange.usage == sum_usage(each.usage for each in cascade.charges)
        stage.check_settled()

    asyncio.run(main())


def test_the_measures_are_what_they_say() -> None:
    confidence = Confidence()
    assert [confidence.value(measure) for measure in MEASURES] == [0.0, 0.0, 0.0]
    confidence.add(math.log(0.5), [math.log(0.5), math.log(0.25), math.log(0.25)])
    confidence.add(math.log(0.125), [math.log(0.5), math.log(0.5)])
    assert confidence.value("mean") == pytest.approx(0.25)
    assert confidence.value("least") == pytest.approx(0.125)
    # 1.5 bits and one bit: 2 ** -1.25
    assert confidence.value("entropy") == pytest.approx(2**-1.25)


def test_a_measure_does_not_depend_on_the_length() -> None:
    short, long = Confidence(), Confidence()
    for confidence, count in ((short, 3), (long, 300)):
        for _ in range(count):
            confidence.add(-0.3, [-0.3, -2.0])
    for measure in MEASURES:
        assert short.value(measure) == pytest.approx(long.value(measure))
        assert 0 < short.value(measure) < 1


def test_the_part_of_the_probabilities_that_is_not_told_counts_as_one_token() -> None:
    confidence = Confidence()
    confidence.add(math.log(0.5), [math.log(0.5)])
    assert confidence.value("entropy") == pytest.approx(0.5)
