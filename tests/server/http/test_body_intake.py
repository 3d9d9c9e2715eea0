"""The bounds on the request bodies of a payer and of all: memory, pace, and turns to have one parsed."""

from __future__ import annotations

import asyncio

import pytest

from headrace.config import ServerConfig
from headrace.gateway.api_errors import ApiError
from headrace.observe import metrics
from headrace.server.http.body_intake import UNCOUNTED_BYTES, BodyIntake
from tests.support.running_server import asynchronous, count

MIB = 1024 * 1024


class Pauses:
    """A clock that stands still, and a sleep that notes how long it was."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def intake(pauses: Pauses | None = None, **server: int) -> BodyIntake:
    pauses = pauses or Pauses()
    bounds = {"body_bytes": 1 * MIB, "key_bodies_bytes": 2 * MIB, "bodies_bytes": 3 * MIB} | server
    return BodyIntake(ServerConfig(**bounds), clock=pauses.clock, sleep=pauses.sleep)  # pyright: ignore[reportArgumentType]


@asynchronous
async def test_the_bodies_of_one_payer_are_bounded_and_others_have_room() -> None:
    bodies = intake()
    refused = count(metrics.bodies_refused, "key_bytes")
    with bodies.hold("key a") as one, bodies.hold("key a") as two, bodies.hold("key b") as other:
        await one.take(MIB + UNCOUNTED_BYTES)
        await two.take(MIB + UNCOUNTED_BYTES)
        with pytest.raises(ApiError) as raised:
            await two.take(1)
        assert (raised.value.status, raised.value.code, raised.value.retry_after) == (429, "key_bodies_too_large", 1.0)
        assert count(metrics.bodies_refused, "key_bytes") == refused + 1
        await other.take(MIB + UNCOUNTED_BYTES)
        assert bodies.held == 3 * MIB
        with pytest.raises(ApiError) as raised:
            await other.take(1)
        assert (raised.value.status, raised.value.code) == (503, "bodies_too_large")
    assert bodies.held == 0
    with bodies.hold("key a") as again:
        await again.take(2 * MIB)


@asynchronous
async def test_small_bodies_are_not_counted() -> None:
    bodies = intake()
    with bodies.hold("key a") as hold:
        await hold.take(UNCOUNTED_BYTES - 1)
        await hold.take(1)
        assert bodies.held == 0
        await hold.take(5)
        assert bodies.held == 5


@asynchronous
async def test_one_body_of_the_longest_length_always_fits() -> None:
    bodies = intake(body_bytes=8 * MIB)
    with bodies.hold("key a") as hold:
        await hold.take(8 * MIB)


@asynchronous
async def test_a_payer_ahead_of_its_pace_waits_and_others_do_not() -> None:
    pauses = Pauses()
    bodies = intake(pauses, key_body_bytes_per_s=MIB, body_bytes=8 * MIB)
    with bodies.hold("key a") as hold, bodies.hold("key b") as other:
        await hold.take(UNCOUNTED_BYTES + MIB // 4)  # the burst
        assert pauses.slept == []
        await hold.take(MIB // 2)
        assert pauses.slept == [0.5]
        await other.take(UNCOUNTED_BYTES + MIB // 4)
        assert pauses.slept == [0.5]
        pauses.now += 10.0
        await hold.take(MIB // 4)
        assert pauses.slept == [0.5]


@asynchronous
async def test_a_payer_has_one_body_parsed_at_a_time_and_does_not_hold_up_others() -> None:
    bodies = intake()
    order: list[str] = []
    release = asyncio.Event()

    async def parse(payer: str, name: str) -> None:
        async with bodies.turn(payer):
            order.append(name)
            await release.wait()

    crowd = [asyncio.create_task(parse("key a", f"a{number}")) for number in range(3)]
    await asyncio.sleep(0)
    other = asyncio.create_task(parse("key b", "b"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a0", "b"]
    release.set()
    await asyncio.gather(*crowd, other)
    assert order == ["a0", "b", "a1", "a2"]
    assert bodies._turns == {}


@asynchronous
async def test_a_turn_that_does_not_come_is_refused() -> None:
    bodies = BodyIntake(ServerConfig(body_s=0.01))
    async with bodies.turn("key a"):
        with pytest.raises(ApiError) as raised:
            async with bodies.turn("key a"):
                raise AssertionError
        assert (raised.value.status, raised.value.code) == (503, "bodies_waiting")
    async with bodies.turn("key a"):
        pass
