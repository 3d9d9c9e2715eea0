"""The server of a drill."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bench.drills.drill_server import DrillError, DrillServer


def test_a_server_that_cannot_start_says_why() -> None:
    async def start() -> None:
        async with DrillServer("[models.none]\npath = '/nowhere'\n"):
            pass

    with pytest.raises(DrillError, match=r"did not start: .*nowhere"):
        asyncio.run(start())


def test_a_server_that_has_started_is_found_by_its_address() -> None:
    async def start() -> tuple[str, list[int]]:
        async with asyncio.timeout(120), DrillServer("[models.mini]\noptions = { threads = 1 }\n") as server:
            return server.url, server.workers()

    url, workers = asyncio.run(start())
    assert url.startswith("http://127.0.0.1:")
    assert len(workers) == 1
