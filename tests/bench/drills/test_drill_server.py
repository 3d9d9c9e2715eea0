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
