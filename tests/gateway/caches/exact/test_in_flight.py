"""Identical requests under way: one generation, many readers, each at its own pace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.exact.in_flight import Flight, FlightReader, Flights, JoinTerms
from headrace.gateway.requests.text_request import ChoiceDelta, TokenUsage
from tests.support.running_server import asynchronous
from tests.support.stores.exact_caches import USAGE, Mouth, heard, said, saying, text_of, turns

KEY = b"k" * 32
TERMS = JoinTerms()


async def nothing(flight: Flight) -> None:
    pass


def lead(flights: Flights, mouth: Mouth, terms: JoinTerms = TERMS) -> FlightReader:
    return flights.lead(KEY, terms, mouth, n=1, ended=nothing)


def join(flights: Flights, terms: JoinTerms = TERMS) -> FlightReader:
    flight = flights.find(KEY, terms)
    assert flight is not None
    return flight.join("joiner")


class Listener:
    """A client that hears everything as it comes, or stops listening after so many pieces at a time."""

    def __init__(self, reader: FlightReader, *, at_once: int = 1_000_000) -> None:
        self.reader = reader
        self.pieces: list[ChoiceDelta] = []
        self._at_once = at_once
        self._left = at_once

    def __call__(self, piece: ChoiceDelta) -> bool:
        self.pieces.append(piece)
        self._left -= 1
        return self._left > 0

    async def listen(self) -> bool:
        self._left = self._at_once
        return await self.reader.run(self)

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@asynchronous
async def test_a_late_joiner_gets_what_is_there_at_once_and_then_what_comes_as_it_comes() -> None:
    flights, mouth = Flights(), Mouth(*said("One ", "two ")[:2])
    first = Listener(lead(flights, mouth))
    leading = asyncio.create_task(first.listen())
    await turns()
    late = Listener(join(flights))
    joining = asyncio.create_task(late.listen())
    await turns()
    assert (first.text, late.text) == ("One two ", "One two ")
    mouth.say(ChoiceDelta(0, "three."))
    await turns()
    assert (first.text, late.text) == ("One two three.", "One two three.")
    mouth.say(ChoiceDelta(0, finish="stop", usage=USAGE))
    mouth.end()
    assert await leading
    assert await joining
    assert mouth.runs == 1
    assert [each.usage for each in first.pieces if each.usage] == [USAGE]
    # Who joined waited for no engine, and its tokens were computed for somebody else.
    (usage,) = [each.usage for each in late.pieces if each.usage]
    assert usage == TokenUsage(prompt_tokens=20, output_tokens=3, cached_tokens=16)
    for listener in (first, late):
        listener.reader.cancel()
    assert (first.reader.facts().pays, first.reader.facts().saved) == (True, TokenUsage())
    assert (late.reader.facts().pays, late.reader.facts().saved) == (False, replace(USAGE, queue_s=0.0))


@asynchronous
async def test_a_slow_reader_holds_up_nobody_and_hears_everything_in_the_end() -> None:
    flights, mouth = Flights(), Mouth()
    slow, quick = Listener(lead(flights, mouth), at_once=1), Listener(join(flights))
    listening = asyncio.create_task(quick.listen())
    for number in range(50):
        mouth.say(ChoiceDelta(0, f"{number} "))
    mouth.say(ChoiceDelta(0, finish="stop", usage=USAGE))
    mouth.end()
    assert await listening
    assert slow.text == ""
    while not await slow.listen():
        assert len(slow.pieces) <= 51
    assert slow.text == quick.text
    assert mouth.runs == 1


@asynchronous
async def test_who_is_far_behind_lets_others_have_a_turn() -> None:
    flights, mouth = Flights(), Mouth(*[ChoiceDelta(0, "x")] * 1000)
    lead(flights, mouth)
    await turns()
    late = Listener(join(flights))
    listening = asyncio.create_task(late.listen())
    await asyncio.sleep(0)
    assert 0 < len(late.pieces) < 1000
    await turns(20)
    assert len(late.pieces) == 1000
    mouth.say(ChoiceDelta(0, "y"))
    await turns()
    assert late.text[-1] == "y"
    late.reader.cancel()
    assert await listening


@asynchronous
async def test_the_generation_is_cancelled_when_the_last_reader_leaves_and_not_before() -> None:
    flights, mouth = Flights(), Mouth(ChoiceDelta(0, "One "))
    leader = Listener(lead(flights, mouth))
    joiner = Listener(join(flights))
    runs = [asyncio.create_task(each.listen()) for each in (leader, joiner)]
    await turns()
    leader.reader.cancel()
    leader.reader.cancel()  # twice is once
    assert await runs[0]
    assert not mouth.cancelled
    mouth.say(ChoiceDelta(0, "two "))
    await turns()
    assert (leader.text, joiner.text) == ("One ", "One two ")
    third = Listener(join(flights))
    third.reader.cancel()
    assert not mouth.cancelled
    joiner.reader.cancel()
    assert mouth.cancelled
    assert flights.find(KEY, TERMS) is None  # nobody joins what is about to end
    assert await runs[1]
    await turns()
    assert len(flights) == 0
    assert await third.listen()
    assert mouth.runs == 1


@asynchronous
async def test_who_pays_is_always_one_and_a_leader_that_leaves_hands_over() -> None:
    flights, mouth = Flights(), Mouth(ChoiceDelta(0, "One "))
    readers = [lead(flights, mouth), join(flights), join(flights)]
    await turns()
    readers[0].cancel()
    assert [each.facts().pays for each in readers] == [False, True, False]
    mouth.say(*said("two."))
    mouth.end()
    await turns()
    for reader in readers[1:]:
        assert text_of(await heard(reader)) == "One two."  # it is over, so it stays paid for
    assert [each.facts().pays for each in readers] == [False, True, False]
    assert [each.facts().saved.output_tokens for each in readers] == [0, 0, 3]  # who left early was spared nothing
    assert [each.facts().role for each in readers] == ["leader", "joiner", "joiner"]


@asynchronous
async def test_whoever_leaves_last_pays_for_what_was_computed() -> None:
    flights, mouth = Flights(), Mouth(ChoiceDelta(0, "One "))
    readers = [lead(flights, mouth), join(flights)]
    await turns()
    for reader in readers:
        reader.cancel()
    assert [each.facts().pays for each in readers] == [False, True]
    assert readers[1].source is mouth  # which knows how much that was


@asynchronous
async def test_an_error_reaches_all_after_what_came_before_it() -> None:
    flights, mouth = Flights(), Mouth(ChoiceDelta(0, "One "))
    listeners = [Listener(lead(flights, mouth)), Listener(join(flights)), Listener(join(flights), at_once=1)]
    runs = [asyncio.create_task(each.listen()) for each in listeners]
    await turns()
    mouth.end(ApiError("the answer broke off", kind="server_error", code="generation_failed"))
    for run in runs[:2]:
        with pytest.raises(ApiError, match="broke off"):
            await run
    assert not await runs[2]
    with pytest.raises(ApiError, match="broke off"):
        await listeners[2].listen()
    assert {each.text for each in listeners} == {"One "}
    assert flights.find(KEY, TERMS) is None
    await turns()
    again = await heard(lead(flights, saying("Fine.")))
    assert text_of(again) == "Fine."


@asynchronous
async def test_a_client_that_breaks_breaks_for_itself_alone() -> None:
    flights, mouth = Flights(), saying("One ", "two.")
    broken, sound = lead(flights, mouth), join(flights)

    def take(piece: ChoiceDelta) -> bool:
        raise RuntimeError("this client broke")

    breaking = asyncio.create_task(broken.run(take))
    assert text_of(await heard(sound)) == "One two."
    with pytest.raises(RuntimeError):
        await breaking


@asynchronous
async def test_a_request_that_is_cancelled_while_it_reads_can_leave() -> None:
    flights, mouth = Flights(), Mouth(ChoiceDelta(0, "One "))
    leader, joiner = lead(flights, mouth), join(flights)
    reading = asyncio.create_task(leader.run(lambda piece: True))
    await turns()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    leader.cancel()
    mouth.say(*said("two."))
    mouth.end()
    assert text_of(await heard(joiner)) == "One two."


@asynchronous
async def test_two_hundred_joiners_that_leave_at_random_share_one_generation() -> None:
    random_ = random.Random(7)
    for _ in range(5):
        flights, mouth = Flights(), Mouth()
        words = [f"{number} " for number in range(60)]
        listeners = [Listener(lead(flights, mouth))]
        runs = [asyncio.create_task(listeners[0].listen())]

        async def one(listener: Listener) -> bool:
            while not await listener.listen():
                await asyncio.sleep(0)
            return True

        left: set[int] = set()
        for word in words:
            mouth.say(ChoiceDelta(0, word))
            for _ in range(random_.randrange(8)):
                if len(listeners) <= 200:
                    listeners.append(Listener(join(flights), at_once=random_.choice([1, 3, 10_000])))
                    runs.append(asyncio.create_task(one(listeners[-1])))
            await turns(random_.randrange(4))
            leaving = random_.randrange(len(listeners))
            if random_.random() < 0.7 and len(left) < len(listeners) - 1:
                left.add(leaving)
                listeners[leaving].reader.cancel()
        mouth.say(ChoiceDelta(0, finish="stop", usage=USAGE))
        mouth.end()
        assert all(await asyncio.gather(*runs))
        whole = "".join(words)
        for place, listener in enumerate(listeners):
            assert whole.startswith(listener.text)
            assert place in left or listener.text == whole
            listener.reader.cancel()
        assert len(left) > 10
        assert not mouth.cancelled
        assert mouth.runs == 1
        assert sum(each.reader.facts().pays for each in listeners) == 1
        await turns()
        assert len(flights) == 0


@asynchronous
async def test_an_answer_that_is_too_long_is_dropped_as_it_is_read_and_joined_by_nobody() -> None:
    flights, mouth = Flights(most_bytes=100_000), Mouth()
    ended: list[Flight] = []

    async def end(flight: Flight) -> None:
        ended.append(flight)

    quick = Listener(flights.lead(KEY, TERMS, mouth, n=1, ended=end))
    slow = Listener(join(flights), at_once=100)
    listening = asyncio.create_task(quick.listen())
    most = 0
    for _ in range(20):
        mouth.say(*[ChoiceDelta(0, "x" * 100) for _ in range(100)])
        await turns()
        await slow.listen()
        flight = flights.find(KEY, TERMS)
        most = max(most, 0 if flight is None else len(flight.pieces))
    assert flights.find(KEY, TERMS) is None
    mouth.say(*said())
    mouth.end()
    assert await listening
    while not await slow.listen():
        pass
    assert len(quick.text) == len(slow.text) == 20 * 100 * 100
    assert (len(ended), ended[0].whole) == (1, False)
    assert len(ended[0].pieces) < 600  # of two thousand
    assert most < 500
    assert slow.reader.facts().saved.output_tokens == USAGE.output_tokens


@asynchronous
async def test_what_has_ended_can_be_joined_until_it_is_stored() -> None:
    flights, storing = Flights(), asyncio.Event()

    async def store(flight: Flight) -> None:
        await storing.wait()

    leader = flights.lead(KEY, TERMS, saying("Hello."), n=1, ended=store)
    await turns()
    late = join(flights, JoinTerms(deadline=1.0))  # no deadline cuts it any more
    assert text_of(await heard(late)) == text_of(await heard(leader)) == "Hello."
    storing.set()
    await turns()
    assert flights.find(KEY, TERMS) is None


@pytest.mark.parametrize(
    ("running", "wished", "joins"),
    [
        (JoinTerms(), JoinTerms(), True),
        (JoinTerms(surface="chat"), JoinTerms(surface="voice"), False),
        (JoinTerms(priority=1), JoinTerms(priority=0), True),
        (JoinTerms(priority=0), JoinTerms(priority=1), False),
        (JoinTerms(deadline=10.0), JoinTerms(deadline=10.0), True),
        (JoinTerms(deadline=10.0), JoinTerms(deadline=10.5), True),
        (JoinTerms(deadline=10.0), JoinTerms(deadline=11.5), False),  # it would be cut too early
        (JoinTerms(deadline=10.0), JoinTerms(deadline=9.0), False),  # it would be cut too late
        (JoinTerms(deadline=10.0), JoinTerms(), False),
        (JoinTerms(), JoinTerms(deadline=10.0), False),
    ],
)
@asynchronous
async def test_a_request_joins_only_what_runs_on_terms_as_good_as_its_own(
    running: JoinTerms, wished: JoinTerms, joins: bool
) -> None:
    flights = Flights(slack_s=1.0)
    leader = lead(flights, Mouth(), running)
    assert (flights.find(KEY, wished) is not None) is joins
    leader.cancel()


@asynchronous
async def test_the_latest_generation_is_the_one_that_is_joined() -> None:
    flights, mouths = Flights(), [Mouth(), Mouth()]
    first = lead(flights, mouths[0], JoinTerms(deadline=5.0))
    second = lead(flights, mouths[1], JoinTerms(deadline=50.0))
    mouths[0].say(*said("old"))
    mouths[0].end()
    mouths[1].say(*said("new"))
    assert text_of(await heard(first)) == "old"
    joined = Listener(join(flights, JoinTerms(deadline=50.0)))
    listening = asyncio.create_task(joined.listen())
    await turns()
    assert joined.text == "new"
    mouths[1].end()
    assert await listening
    assert text_of(await heard(second)) == "new"


@asynchronous
async def test_there_is_a_bound_on_generations_and_on_readers() -> None:
    flights = Flights(most=1, readers=2)
    leader = lead(flights, Mouth())
    other = flights.lead(b"o" * 32, TERMS, Mouth(), n=1, ended=nothing)
    assert flights.find(b"o" * 32, TERMS) is None  # it runs, and alone
    joiner = join(flights)
    assert flights.find(KEY, TERMS) is None
    joiner.cancel()
    assert flights.find(KEY, TERMS) is not None
    for reader in (leader, other):
        reader.cancel()


@asynchronous
async def test_when_the_server_ends_all_are_told() -> None:
    flights, mouth = Flights(), Mouth(ChoiceDelta(0, "One "))
    listeners = [Listener(lead(flights, mouth)), Listener(join(flights))]
    runs = [asyncio.create_task(each.listen()) for each in listeners]
    await turns()
    await flights.close(ApiError("The server is shutting down", kind="overloaded_error", code="draining"))
    for run in runs:
        with pytest.raises(ApiError, match="shutting down"):
            await run
    assert mouth.cancelled
    assert len(flights) == 0


@asynchronous
async def test_a_source_that_ends_at_once_is_over_at_once() -> None:
    class Empty:
        async def run(self, take: Callable[[ChoiceDelta], bool]) -> bool:
            return True

        def cancel(self) -> None:
            raise AssertionError("it was over")

        def keeps(self) -> bool:
            return True

    flights = Flights()
    reader = flights.lead(KEY, TERMS, Empty(), n=1, ended=nothing)
    assert await heard(reader) == []
