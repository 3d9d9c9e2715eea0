"""The drill `hostile-client`: one key sends requests that are made to be expensive, while another key chats.

Measures the chats' latency without an attack and under each one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from headrace.bench.drills.drill_client import ChatClient, ChatReply, send_at_rate
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.bench.drills.hostile_requests import ATTACKS
from headrace.bench.drills.promises import Promise, milliseconds, percentile

CONFIG: Final = """
[models.mini]

[tenants.victim]
[tenants.attacker]

[[keys]]
name = "victim"
key = "victim"

[[keys]]
name = "attacker"
key = "attacker"
"""
RATE: Final = 20.0  # chats a second
MOST_MEMORY: Final = 64 * 1024 * 1024  # bytes of one key's bodies: the default of server.key_bodies_bytes
_FACTOR: Final = 2.0
_WARM_UP: Final = 20  # chats
_BEGIN_TIMEOUT_S: Final = 600.0  # for the first response to an attack, on a machine that is busy with other things
_BEGIN_S: Final = 1.0  # from then until an attack is in full swing
_STATUSES_OF_A_REFUSAL: Final = range(400, 500)
_BODY_BYTES: Final = re.compile(r"^headrace_body_bytes (\S+)$", re.MULTILINE)


async def run(*, chats: int = 200, attacks: Sequence[str] = tuple(ATTACKS)) -> list[Promise]:
    """`chats`: of the victim in each measurement."""
    promises: list[Promise] = []
    async with DrillServer(CONFIG) as server, ChatClient(server.url, KEY) as client:
        await measure(client, _WARM_UP)
        quiet = await measure(client, chats)
        for name in attacks:
            async with attacking(server.url, name) as statuses:
                replies = await measure(client, chats)
                held = await body_bytes(client)
            again = await measure(client, chats // 2)
            promises.append(stays_fast(ATTACKS[name].about, [*quiet, *again], replies))
            promises.append(is_refused(ATTACKS[name].about, statuses, held, may_wait=ATTACKS[name].half))
            quiet = again
    return promises


async def measure(client: ChatClient, count: int) -> list[ChatReply]:
    async def chat() -> ChatReply:
        return await client.chat("What is time to first token?", key="victim", max_tokens=4, cache="off")

    return await send_at_rate([chat] * count, RATE)


@asynccontextmanager
async def attacking(url: str, name: str) -> AsyncGenerator[dict[int, int]]:
    """Attack within the block. The dictionary has the number of responses by status after it."""
    found: dict[int, int] = {}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace.bench.drills.hostile_requests",
        url,
        "attacker",
        name,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_BEGIN_TIMEOUT_S):
            await process.stdout.readline()
        await asyncio.sleep(_BEGIN_S)
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        output, _ = await process.communicate()
        found |= {int(status): count for status, count in json.loads(output or b"{}").items()}


async def body_bytes(client: ChatClient) -> float:
    """Return the bytes of request bodies that the server holds, according to its metrics."""
    _, text = await client.send("GET", "/metrics")
    found = _BODY_BYTES.search(str(text))
    return float(found[1]) if found else 0.0


def stays_fast(attack: str, quiet: Sequence[ChatReply], attacked: Sequence[ChatReply]) -> Promise:
    failed = sum(not reply.answered for reply in attacked)
    before, during = ([reply.seconds for reply in replies if reply.answered] for replies in (quiet, attacked))
    p99 = percentile(before, 0.99), percentile(during, 0.99)
    found = (
        f"p50 {milliseconds(percentile(before, 0.5))} → {milliseconds(percentile(during, 0.5))}, "
        f"p99 {milliseconds(p99[0])} → {milliseconds(p99[1])}"
    )
    if failed:
        found += f", {failed} of {len(attacked)} failed"
    promised = f"{attack}: another key's chats are answered, p99 within {_FACTOR:g} times that without the attack"
    return Promise(promised, found, not failed and p99[1] <= _FACTOR * p99[0], timed=True)


def is_refused(attack: str, statuses: Mapping[int, int], held: float, *, may_wait: bool = False) -> Promise:
    """`held`: bytes of bodies in memory during the attack. `may_wait`: no response is due, as a body is missing."""
    odd = {status: count for status, count in statuses.items() if status and status not in _STATUSES_OF_A_REFUSAL}
    seen = ", ".join(f"{count} with {status or 'none'}" for status, count in sorted(statuses.items())) or "none"
    refused = may_wait or sum(statuses.values()) > 0
    return Promise(
        f"{attack}: refused, with at most {MOST_MEMORY // 2**20} MiB of bodies in memory",
        f"responses: {seen}; {held / 2**20:.0f} MiB of bodies",
        not odd and refused and held <= MOST_MEMORY,
    )
