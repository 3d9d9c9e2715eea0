"""What runs for a key that is revoked ends at once, and costs what was sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.config import PriceConfig
from headrace.gateway.accounts.access_watch import AccessWatch
from headrace.gateway.accounts.account_store import AccountChanges
from headrace.gateway.accounts.directory import AccountDirectory
from tests.support.accounts import bearer
from tests.support.admin_server import Administered, administered
from tests.support.running_server import CHAT, Answer, Client, asynchronous, request, say, until

PRICES = {"mini": PriceConfig(input=1.0, output=2.0)}


async def revoke(running: Administered, key: dict[str, Any]) -> None:
    await running.did("DELETE", f"keys/{key['id']}")


async def delete(running: Administered, key: dict[str, Any]) -> None:
    await running.did("DELETE", "tenants/green")


async def begun(running: Administered, secret: str, **changes: Any) -> Client:
    """A request that has got two tokens from the engine."""
    client = await running.client()
    before = len(running.engine.streams)
    await client.send(request("POST", "/v1/chat/completions", CHAT | changes, **bearer(secret)))
    await until(lambda: len(running.engine.streams) > before)
    for _ in range(2):
        say(running.engine.streams[-1], "w")
    return client


async def charges(running: Administered) -> list[tuple[int, int]]:
    ledger = running.server.services.ledger
    assert ledger is not None
    await ledger.flush()
    database = running.server.database
    return await database.run(
        lambda connection: connection.execute("SELECT prompt_tokens, output_tokens FROM ledger_charges").fetchall()
    )


@pytest.mark.parametrize("end", [revoke, delete])
def test_a_stream_ends_with_an_error_when_its_key_is_revoked_or_its_tenant_deleted(tmp_path: Path, end: Any) -> None:
    @asynchronous
    async def test() -> None:
        async with administered(tmp_path, prices=PRICES) as running:
            await running.did("POST", "tenants", {"name": "green"})
            key, other = await running.new_key("green"), await running.new_key("red")
            client = await begun(running, key["secret"], stream=True)
            stream = running.engine.streams[-1]
            kept = await begun(running, other["secret"], stream=True)
            for each in (client, kept):
                assert (await each.head())[0] == 200
            heard = b""
            while heard.count(b'"content":"w"') < 2:
                heard += await client.chunk()
            await end(running, key)
            rest = b""
            while chunk := await client.chunk():
                rest += chunk
            (event,) = Answer(200, {}, rest).events
            assert (event["error"]["type"], event["error"]["code"]) == ("permission_error", "key_ended")
            assert stream.closed  # the engine stops, too
            prompt = len(stream.request.prompt)
            await until(lambda: running.server.context.running == 1)
            assert await charges(running) == [(prompt, 2)]
            say(running.engine.streams[-1], "w", end=True)  # another tenant's goes on
            while chunk := await kept.chunk():
                heard += chunk
            assert heard.count(b'"content":"w"') == 2 + 3

    test()


@asynchronous
async def test_a_whole_answer_of_a_revoked_key_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    async with administered(tmp_path, prices=PRICES) as running:
        await running.did("POST", "tenants", {"name": "green"})
        key = await running.new_key("green")
        client = await begun(running, key["secret"])
        await asyncio.sleep(0)
        await revoke(running, key)
        answer = await client.answer()
        assert (answer.status, answer.error["type"], answer.error["code"]) == (403, "permission_error", "key_ended")
        await until(lambda: running.server.context.running == 0)
        assert await charges(running) == []


def test_what_has_ended_is_watched_no_more() -> None:
    watch = AccessWatch(AccountDirectory((), {}, {}))
    caller = AccountDirectory((), {}, {}).identify({})
    unwatch = watch.watch(caller, lambda error: pytest.fail("it had ended"))
    unwatch()
    unwatch()
    assert watch._running == {}  # pyright: ignore[reportPrivateUsage]
    watch.take(AccountChanges(epoch=1, now=0.0, records=(), whole=True))
