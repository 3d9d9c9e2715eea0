"""Fallback chains: who goes on with an answer that broke, and that no text comes twice without a mark."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.routing_section import AfterBreak
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, RestartDelta, TokenUsage, ToolCallDelta
from headrace.gateway.routing.composite_answerer import collect_choices, itemise_charges, sum_usage
from headrace.gateway.routing.continuation import Continuation, DeliveredText, DivergedError
from headrace.gateway.routing.fallback import FallbackAnswerer, FallbackStep, may_fall_back
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
)


def chain(stage: Stage, *steps: tuple[str, Sequence[Line], AfterBreak], **options: object) -> FallbackAnswerer:
    made = [FallbackStep(variant, stage.plays(variant, script), then) for variant, script, then in steps]
    return FallbackAnswerer(stage.exchange, made, **options)  # pyright: ignore[reportArgumentType]


# Before anything was delivered


@asynchronous
async def test_what_the_first_refuses_the_next_one_answers_without_a_mark() -> None:
    stage, client = Stage(exchange_of()), Client()
    steps = [
        FallbackStep("a", stage.plays("a", refuses=broken())),
        FallbackStep("b", stage.plays("b", answer("hello"))),
    ]
    fallback = FallbackAnswerer(stage.exchange, steps)
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "hello"}
    assert client.restarts == []
    assert stage.exchange.model == "b"
    assert [(each.stage, each.chosen) for each in fallback.decisions] == [("fallback", "b")]
    assert [(each.variant, each.charged) for each in fallback.charges] == [("b", True), ("a", False)]
    stage.check_settled()


@asynchronous
async def test_what_breaks_before_its_first_token_goes_on_even_where_a_broken_stream_would_not() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [broken()], "error"), ("b", answer("hello"), "error"))
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "hello"}
    assert client.restarts == []


@asynchronous
async def test_a_step_that_hangs_is_left_after_the_patience_and_the_last_one_is_not() -> None:
    stage, client = Stage(exchange_of()), Client()
    go = asyncio.Event()
    fallback = chain(stage, ("a", [asyncio.Event()], "error"), ("b", [go, *answer("late")], "error"), patience=0.01)
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "late"}
    assert "too_late" in fallback.decisions[0].why
    assert stage.made["a"][0].settled == 1


@asynchronous
async def test_a_step_that_has_begun_is_waited_for() -> None:
    stage, client = Stage(exchange_of()), Client()
    go = asyncio.Event()
    fallback = chain(
        stage, ("a", [said("one "), go, *answer("two")], "error"), ("b", answer("x"), "restart"), patience=0.01
    )
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "one two"}
    assert "b" not in stage.made


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (broken(), True),
        (ApiError("slow down", kind="rate_limit_error"), True),
        (ApiError("oh", kind="server_error"), True),
        (invalid_request("too long", "messages", code="context_length_exceeded"), True),
        (invalid_request("no such thing", "tools"), False),
        (ApiError("no", kind="permission_error"), False),
    ],
)
@asynchronous
async def test_only_what_another_variant_may_do_better_goes_on(error: ApiError, goes_on: bool) -> None:
    stage, client = Stage(exchange_of()), Client()
    steps = [FallbackStep("a", stage.plays("a", refuses=error)), FallbackStep("b", stage.plays("b", answer("hello")))]
    told = await deliver(FallbackAnswerer(stage.exchange, steps), client)
    assert may_fall_back(error) == goes_on
    assert (told is None) == goes_on
    assert client.texts == ({0: "hello"} if goes_on else {})


@asynchronous
async def test_where_all_fail_the_last_error_is_told_and_nobody_is_charged() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [broken("first")], "error"), ("b", [broken("second")], "error"))
    error = await deliver(fallback, client)
    assert error is not None
    assert error.code == "second"
    assert stage.exchange.usage == TokenUsage()
    stage.check_settled()


@asynchronous
async def test_what_one_variant_took_is_not_wrong_because_another_refuses_it() -> None:
    wrong = invalid_request("'b' knows no tools", "tools")
    for last, told in ((answer("hello"), None), ([broken("c")], "c")):
        stage, client = Stage(exchange_of()), Client()
        steps = [
            FallbackStep("a", stage.plays("a", [broken("a")])),
            FallbackStep("b", stage.plays("b", refuses=wrong)),
            FallbackStep("c", stage.plays("c", last)),
        ]
        error = await deliver(FallbackAnswerer(stage.exchange, steps), client)
        assert (None if error is None else error.code) == told


@asynchronous
async def test_what_breaks_after_its_end_is_whole() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [*answer("hello"), broken()], "error"), ("b", answer("x"), "restart"))
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "hello"}
    assert "b" not in stage.made


# After something was delivered


@asynchronous
async def test_a_broken_stream_is_continued_byte_for_byte() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(
        stage,
        ("a", [said("The capital "), said("of Fra"), broken()], "error"),
        ("b", [said("The "), said("capital of France"), *answer(" is", " Paris")], "continue"),
    )
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "The capital of France is Paris"}
    assert client.restarts == []
    assert [piece.content for piece in client.pieces] == ["The capital ", "of Fra", "nce", " is", " Paris", ""]
    assert [(each.variant, each.charged) for each in fallback.charges] == [("b", True), ("a", False)]
    assert stage.exchange.usage == client.told()


@asynchronous
async def test_a_broken_stream_begins_anew_with_a_mark() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [said("The capi"), broken()], "error"), ("b", answer("Paris"), "restart"))
    assert await deliver(fallback, client) is None
    (mark,) = client.restarts
    assert (mark.index, mark.variant, mark.why) == (0, "b", "engine_lost")
    assert client.texts == {0: "Paris"}
    assert stage.exchange.usage == client.told()
    assert stage.exchange.model == "b"


@asynchronous
async def test_a_broken_stream_ends_with_an_error_where_that_is_declared() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [said("The capi"), broken()], "error"), ("b", answer("Paris"), "error"))
    error = await deliver(fallback, client)
    assert error is not None
    assert error.code == "engine_lost"
    assert client.texts == {0: "The capi"}
    assert "b" not in stage.made
    assert stage.exchange.usage == TokenUsage(prompt_tokens=PROMPT, output_tokens=1)


@pytest.mark.parametrize("second", [answer("The town"), answer("The"), [ends()]])
@asynchronous
async def test_a_continuation_that_says_something_else_is_an_error(second: list[Line]) -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [said("The capital"), broken()], "error"), ("b", second, "continue"))
    error = await deliver(fallback, client)
    assert error is not None
    assert error.code == "generation_failed"
    assert client.texts == {0: "The capital"}
    assert client.restarts == []


@asynchronous
async def test_a_continuation_that_says_something_else_is_marked_where_that_is_declared() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(
        stage,
        ("a", [said("The capital"), broken()], "error"),
        ("b", answer("The ", "town ", "of"), "continue"),
        diverged="restart",
    )
    assert await deliver(fallback, client) is None
    assert len(client.restarts) == 1
    assert client.texts == {0: "The town of"}
    assert stage.exchange.usage == client.told()


@asynchronous
async def test_a_choice_that_is_whole_stays_and_only_the_others_go_on() -> None:
    stage, client = Stage(exchange_of(asked_for(n=2))), Client()
    first: list[Line] = [*answer("whole"), said("bro", 1), broken()]
    second: list[Line] = [*answer("another"), *answer("x", "y", index=1)]
    fallback = chain(stage, ("a", first, "error"), ("b", second, "restart"))
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "whole", 1: "xy"}
    assert [mark.index for mark in client.restarts] == [1]
    assert stage.exchange.usage == client.told(2)
    paid = {each.variant: each.usage.output_tokens for each in fallback.charges if each.charged}
    assert paid == {"a": 1, "b": 2}


@asynchronous
async def test_a_whole_answer_needs_no_mark() -> None:
    for then in ("continue", "restart", "error"):
        stage = Stage(exchange_of())
        fallback = chain(stage, ("a", [said("The capi"), broken()], "error"), ("b", answer("Paris"), then), whole=True)
        await fallback.begin()
        (choice,) = await collect_choices(fallback)
        fallback.settle()
        assert choice.content == "Paris"
        assert choice.usage == stage.exchange.usage


@asynchronous
async def test_a_step_that_itself_begins_anew_takes_back_a_choice_that_had_ended() -> None:
    stage, client = Stage(exchange_of(asked_for(n=2))), Client(anew=True)
    again: list[Line] = [RestartDelta(0, why="engine_lost"), RestartDelta(1, why="engine_lost")]
    script: list[Line] = [*answer("first"), said("bro", 1), *again, *answer("one"), *answer("t", "wo", index=1)]
    fallback = chain(stage, ("a", script, "error"), ("b", answer("never"), "error"), whole=True)
    assert await deliver(fallback, client) is None
    assert client.texts == {0: "one", 1: "two"}
    assert stage.exchange.usage == client.told(2)
    assert [(each.variant, each.usage.output_tokens, each.charged) for each in fallback.charges] == [("a", 3, True)]
    stage.check_settled()


@asynchronous
async def test_tool_calls_and_reasoning_are_continued_like_text() -> None:
    stage, client = Stage(exchange_of()), Client()
    call = ChoiceDelta(0, calls=[ToolCallDelta(0, "call_1", "look_up", '{"wor')])
    again = ChoiceDelta(0, calls=[ToolCallDelta(0, "call_9", "look_up", '{"word": ')])
    first: list[Line] = [ChoiceDelta(0, reasoning="I look"), call, broken()]
    second: list[Line] = [
        ChoiceDelta(0, reasoning="I "),
        ChoiceDelta(0, reasoning="look"),
        again,
        ChoiceDelta(0, calls=[ToolCallDelta(0, arguments='"mill"}')]),
        ends(finish="tool_calls", tokens=4),
    ]
    fallback = chain(stage, ("a", first, "error"), ("b", second, "continue"))
    assert await deliver(fallback, client) is None
    choice = Choice(0)
    for piece in client.pieces:
        choice.add(piece)
    assert choice.reasoning == "I look"
    assert [(each.id, each.name, each.arguments) for each in choice.calls] == [
        ("call_1", "look_up", '{"word": "mill"}')
    ]


@asynchronous
async def test_a_client_that_leaves_ends_the_chain() -> None:
    stage, client = Stage(exchange_of()), Client()
    fallback = chain(stage, ("a", [said("The "), asyncio.Event()], "error"), ("b", answer("x"), "restart"))
    await fallback.begin()
    running = asyncio.ensure_future(fallback.run(client.take))
    await asyncio.sleep(0.01)
    fallback.cancel()
    assert await running
    fallback.settle()
    assert "b" not in stage.made
    assert stage.exchange.usage == TokenUsage(prompt_tokens=PROMPT, output_tokens=1)


TEXT = "Water turns the wheel, and the wheel turns the stone."


def cut(data: st.DataObject, text: str, index: int) -> list[ChoiceDelta]:
    """The text in pieces of any sizes."""
    places = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=6)))
    return [said(text[start:end], index) for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def woven(data: st.DataObject, answers: list[list[ChoiceDelta]]) -> list[ChoiceDelta]:
    """Several choices' pieces, side by side."""
    found: list[ChoiceDelta] = []
    left = [list(each) for each in answers]
    while any(left):
        found.append(data.draw(st.sampled_from([each for each in left if each])).pop(0))
    return found


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_byte_comes_twice_wherever_it_breaks(data: st.DataObject) -> None:
    """Steps of the same text may continue, others begin anew; each but the last breaks anywhere."""
    n = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(2, 4))
    diverged = data.draw(st.sampled_from(("restart", "error")))
    steps: list[tuple[str, list[Line], AfterBreak]] = []
    texts: dict[str, list[str]] = {}
    for number in range(count):
        same = data.draw(st.booleans())
        name = f"v{number}"
        texts[name] = [f"{TEXT}{index}" if same else f"{name}: {TEXT[number:]}{index}" for index in range(n)]
        whole = [
            [*cut(data, text, index), ends(index=index, tokens=len(text))] for index, text in enumerate(texts[name])
        ]
        script: list[Line] = [*woven(data, whole)]
        if number < count - 1 or data.draw(st.booleans()):
            script = [*script[: data.draw(st.integers(0, len(script) - 1))], broken(name)]
        then: AfterBreak = data.draw(st.sampled_from(("continue", "restart", "error")))
        steps.append((name, script, then))
    rooms = data.draw(st.lists(st.booleans(), min_size=60, max_size=60))

    async def main() -> None:
        stage, client = Stage(exchange_of(asked_for(n=n))), Client(room=lambda: rooms.pop() if rooms else True)
        fallback = chain(stage, *steps, diverged=diverged)
        error = await deliver(fallback, client)
        known = [text for each in texts.values() for text in each]
        for index, text in client.texts.items():
            # What a client has since the last mark is a beginning of one variant's own text, never of two.
            assert any(each.startswith(text) for each in known if each.endswith(str(index))), text
        if error is None:
            assert set(client.usages) == set(range(n))
            for index in range(n):
                assert client.texts[index] in known
            assert client.told(n) == stage.exchange.usage
            assert sum_usage(each.usage for each in fallback.charges if each.charged) == stage.exchange.usage
        marked = {mark.index for mark in client.restarts}
        for index in set(range(n)) - marked:
            heard = "".join(piece.content for piece in client.pieces if piece.index == index)
            assert heard == client.texts.get(index, "")
        stage.check_settled()

    asyncio.run(main())


def test_a_joining_holds_everything_until_all_that_was_delivered_has_come_again() -> None:
    delivered = DeliveredText()
    for piece in (ChoiceDelta(0, reasoning="why"), said("because")):
        delivered.add(piece)
    joining = Continuation(delivered)
    assert joining.read(ChoiceDelta(0, reasoning="why not")) is None
    assert joining.read(said("beca")) is None
    joined = joining.read(said("use of"))
    assert joined is not None
    assert (joined.reasoning, joined.content) == (" not", " of")


def test_a_joining_says_where_another_tool_is_called() -> None:
    delivered = DeliveredText()
    delivered.add(ChoiceDelta(0, calls=[ToolCallDelta(0, "call_1", "look_up", "{}")]))
    with pytest.raises(DivergedError, match="another tool"):
        Continuation(delivered).read(ChoiceDelta(0, calls=[ToolCallDelta(0, "call_2", "weather", "{}")]))


def test_log_probabilities_that_were_told_are_not_told_again() -> None:
    delivered = DeliveredText()
    delivered.add(said("a", logprob=-1.0))
    joining = Continuation(delivered)
    joined = joining.read(
        ChoiceDelta(
            0, "ab", logprobs=[*(said("a", logprob=-1.0).logprobs or ()), *(said("b", logprob=-2.0).logprobs or ())]
        )
    )
    assert joined is not None
    assert [each.logprob for each in joined.logprobs or ()] == [-2.0]


def test_itemised_usages_are_the_whole_whoever_served_which_choice() -> None:
    usage = TokenUsage(prompt_tokens=10, output_tokens=3, cached_tokens=4)
    charges = itemise_charges({0: ("a", usage), 1: ("b", usage), 2: ("a", usage), 3: ("b", usage)}, 2)
    assert {each.variant: (each.usage.prompt_tokens, each.usage.output_tokens) for each in charges} == {
        "a": (20, 6),
        "b": (0, 6),
    }
