"""Calls between two processes of a server: answers, errors, and the end of the other side."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headrace.gateway.api_errors import ApiError
from headrace.server.processes.channel import CallHandler, Channel
from tests.support.running_server import asynchronous, until


async def connected(handlers: dict[str, CallHandler]) -> tuple[Channel, Channel]:
    """A side that asks, and one that answers by these handlers."""
    one, other = socket.socketpair()
    found = Channel({}), Channel(handlers)
    for channel, each in zip(found, (one, other), strict=True):
        each.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda channel=channel: channel, sock=each)
    return found


@asynchronous
async def test_calls_have_typed_arguments_and_answers() -> None:
    told: list[str] = []

    async def later(number: int, text: str) -> list[str]:
        await asyncio.sleep(0)
        return [text] * number

    asking, answering = await connected(
        {"later": CallHandler(tuple[int, str], later), "tell": CallHandler(tuple[str], told.append)}
    )
    asking.notify("tell", "x" * 100_000)
    assert await asking.call("later", 2, "a", type=list[str]) == ["a", "a"]
    assert told == ["x" * 100_000]
    asking.close()
    await until(lambda: not answering.is_open)


@asynchronous
async def test_an_api_error_arrives_as_it_was_raised() -> None:
    def refuse() -> None:
        raise ApiError("No.", kind="rate_limit_error", code="slow", retry_after=1.5, headers={"x-a": "b"})

    asking, _ = await connected({"refuse": CallHandler(tuple[()], refuse)})
    with pytest.raises(ApiError) as caught:
        await asking.call("refuse")
    error = caught.value
    assert (error.message, error.kind, error.code, error.status) == ("No.", "rate_limit_error", "slow", 429)
    assert (error.retry_after, dict(error.headers)) == (1.5, {"x-a": "b"})


@asynchronous
async def test_a_call_fails_when_the_other_side_ends() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    asking, answering = await connected({"never": CallHandler(tuple[()], never)})
    waiting = asyncio.create_task(asking.call("never"))
    await asyncio.sleep(0)
    answering.close()
    with pytest.raises(ApiError, match="main process is not available"):
        await waiting
    with pytest.raises(ApiError, match="main process is not available"):
        await asking.call("never")
