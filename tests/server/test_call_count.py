"""How many calls a chat takes: the cost of a request as a number that no load changes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import headrace
from tests.support.running_server import asynchronous, serving, words

PACKAGE = str(Path(headrace.__file__).parent)
# Of Headrace's own functions, for a chat of 16 tokens. Raise it if what a request gains is worth its cost:
# `python benchmarks/edge/count_calls.py` shows where the calls are.
MOST = 600


@asynchronous
async def test_a_short_chat_takes_few_calls() -> None:
    async with serving() as server:
        server.engine.answer = words(*"abcdefghijklmnop")
        client = await server.client()
        for stream in (False, True):
            assert (await client.chat(stream=stream)).status == 200
            calls = 0

            def count(frame: FrameType, event: str, _: Any) -> None:
                nonlocal calls
                calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

            sys.setprofile(count)
            try:
                answer = await client.chat(stream=stream)
            finally:
                sys.setprofile(None)
            assert answer.status == 200
            assert MOST / 3 < calls < MOST, calls
