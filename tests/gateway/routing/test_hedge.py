"""Hedging: when a second request is made, who wins, who pays, and how many there may be."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.routing_section import HedgeConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.routing.hedge import MIN_SAMPLES, HedgeAllowance, HedgedAnswerer, HedgePolicy, LatencyWindow
from tests.support.running_server import asynchronous
from tests.support.scripted_answers import PROMPT, Client, Line, Stage, answer, broken, deliver, exchange_of, said

QUICK = HedgeConfig(least_ms=5.0, most_ms=20.0)


def hedging(*, idle: bool = True, known: bool = True, saved: int = 1, config: HedgeConfig = QUICK) -> HedgePolicy:
    """One that knows that first tokens take no time, and has saved up for so many hedges."""
    made = HedgePolicy(config, lambda: idle)
    for _ in range(MIN_SAMPLES if known else 0):
        made.record_first_token(0.001)
    for _ in range(round(saved / config.share)):
        made.record_request()
    return made


def hedge(stage: Stage, first: list[Line], second: list[Line], state: HedgePolicy) -> HedgedAnswerer:
    return HedgedAnswerer(stage.exchange, stage.plays("first", first), stage.plays("second", second), state)


@asynchronous
async def test_a_first_token_in_time_needs_no_second_request() -> None:
    stage, client = Stage(exchange_of()), Client()
    answers = hedge(stage, answer("on ", "time"), answer("second"), hedging())
    assert await deliver(answers, client) is None
    assert client.texts == {0: "on time"}
    assert not answers.hedged
    assert list(stage.made) == ["first"]
    assert stage.exchange.usage == client.told()
    stage.check_settled()


@asynchronous
async def test_where_the_first_is_late_the_second_answers_and_it_alone_is_charged() -> None:
    stage, client = Stage(exchange_of()), Client()
    answers = hedge(stage, [asyncio.Event(), *answer("late")], answer("sec", "ond"), hedging())
    assert await deliver(answers, client) is None
    assert client.texts == {0: "second"}
    assert answers.hedged
    assert answers.won
    assert [(each.variant, each.charged) for each in answers.charges] == [("first", False), ("second", True)]
    assert stage.exchange.usage == client.told()
    assert [each.why for each in answers.decisions] == ["the second of two requests answered first"]
    stage.check_settled()


@asynchronous
async def test_the_first_may_still_win() -> None:
    stage, client = Stage(exchange_of()), Client()
    go = asyncio.Event()
    answers = hedge(stage, [go, *answer("first")], [asyncio.Event()], hedging())
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await deliver(answers, client) is None
    assert client.texts == {0: "first"}
    assert answers.hedged
    assert not answers.won
    assert [(each.variant, each.charged) for each in answers.charges] == [("first", True), ("second", False)]
    stage.check_settled()


@asynchronous
async def test_there_is_no_second_request_without_an_idle_replica_or_an_allowance_or_a_known_quantile() -> None:
    for state in (hedging(idle=False), hedging(saved=0), hedging(known=False)):
        stage, client = Stage(exchange_of()), Client()
        go = asyncio.Event()
        answers = hedge(stage, [go, *answer("first")], answer("second"), state)
        asyncio.get_running_loop().call_later(0.05, go.set)
        assert await deliver(answers, client) is None
        assert client.texts == {0: "first"}
        assert list(stage.made) == ["first"]


@asynchronous
async def test_a_second_request_that_is_refused_harms_nobody() -> None:
    stage, client = Stage(exchange_of()), Client()
    go = asyncio.Event()
    answers = HedgedAnswerer(
        stage.exchange,
        stage.plays("first", [go, *answer("first")]),
        stage.plays("second", refuses=broken()),
        hedging(),
    )
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await deliver(answers, client) is None
    assert client.texts == {0: "first"}


@asynchronous
async def test_where_the_first_fails_meanwhile_the_second_answers_and_where_both_do_the_first_error_is_told() -> None:
    for second, told in ((answer("second"), None), ([broken("b")], "a")):
        stage, client = Stage(exchange_of()), Client()
        go, later = asyncio.Event(), asyncio.Event()
        answers = hedge(stage, [go, broken("a")], [later, *second], hedging())
        asyncio.get_running_loop().call_later(0.04, go.set)
        asyncio.get_running_loop().call_later(0.06, later.set)
        error = await deliver(answers, client)
        assert (None if error is None else error.code) == told
        assert client.texts == ({0: "second"} if told is None else {})
        stage.check_settled()


@asynchronous
async def test_a_client_that_leaves_ends_both() -> None:
    stage, client = Stage(exchange_of()), Client()
    answers = hedge(stage, [asyncio.Event()], [asyncio.Event()], hedging())
    await answers.begin()
    running = asyncio.ensure_future(answers.run(client.take))
    while not answers.hedged:
        await asyncio.sleep(0.005)
    answers.cancel()
    assert await running
    answers.settle()
    assert stage.exchange.usage == TokenUsage()
    stage.check_settled()


@asynchronous
async def test_a_server_that_ends_leaves_no_task_behind() -> None:
    stage, client = Stage(exchange_of()), Client()
    answers = hedge(stage, [asyncio.Event()], [asyncio.Event()], hedging())
    await answers.begin()
    before = asyncio.all_tasks()
    running = asyncio.ensure_future(answers.run(client.take))
    while not answers.hedged:
        await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    answers.settle()
    assert asyncio.all_tasks() == before


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(("first", "second", "break first", "break second")),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_exactly_one_of_two_is_heard_and_charged(order: list[str], rooms: list[bool]) -> None:
    """Both are under way; in any order they speak and break."""

    async def main() -> None:
        events = {name: asyncio.Event() for name in order}
        stage, client = Stage(exchange_of()), Client(room=lambda: rooms.pop() if rooms else True)

        def script(name: str) -> list[Line]:
            return [events[name], said(f"{name} "), events[f"break {name}"], broken(name)]

        answers = hedge(stage, script("first"), script("second"), hedging())
        running = asyncio.ensure_future(deliver(answers, client))
        while not answers.hedged:
            await asyncio.sleep(0.002)
        for name in order:
            events[name].set()
            for _ in range(5):
                await asyncio.sleep(0)
        error = await running
        assert isinstance(error, ApiError)
        texts = {name: f"{name} " for name in ("first", "second")}
        heard = client.texts.get(0, "")
        assert heard in ("", *texts.values())
        paid = [each for each in answers.charges if each.charged]
        assert len(paid) == 1
        if heard:
            assert heard == texts[paid[0].variant]
            assert stage.exchange.usage == TokenUsage(prompt_tokens=PROMPT, output_tokens=1)
        assert stage.exchange.usage == paid[0].usage
        stage.check_settled()

    asyncio.run(main())


def test_hedges_are_never_more_than_their_share_of_the_requests() -> None:
    allowance, hedges = HedgeAllowance(0.05, most=3.0), 0
    for requests in range(1, 2001):
        allowance.earn()
        hedges += allowance.take()
        assert hedges <= 0.05 * requests + 1e-6
    assert hedges == 100


def test_what_a_quiet_time_saves_up_is_bounded() -> None:
    allowance = HedgeAllowance(0.05, most=3.0)
    for _ in range(10_000):
        allowance.earn()
    assert sum(allowance.take() for _ in range(10)) == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=120), st.floats(0.5, 0.999))
def test_a_quantile_is_that_of_the_latest_times(times: list[float], share: float) -> None:
    latencies = LatencyWindow(30)
    for seconds in times:
        latencies.add(seconds)
    latest = sorted(times[-30:])
    wanted = latest[min(len(latest) - 1, int(share * len(latest)))] if len(latest) >= MIN_SAMPLES else None
    assert latencies.quantile(share) == wanted


def test_the_wait_for_the_first_is_bounded_on_both_sides() -> None:
    state = HedgePolicy(HedgeConfig(least_ms=50, most_ms=200), lambda: True)
    assert state.delay() is None
    for seconds, wanted in ((0.001, 0.05), (0.1, 0.1), (9.0, 0.2)):
        for _ in range(256):
            state.record_first_token(seconds)
        assert state.delay() == wanted
