"""`headrace trace` against a running server."""

from __future__ import annotations

import asyncio

import pytest

from headrace.cli import main
from tests.support.running_server import asynchronous, serving, words


@asynchronous
async def test_the_waterfall_names_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        server.engine.answer = words("a ", "b")
        answer = await (await server.client()).chat()
        capsys.readouterr()  # the server's log
        code = await asyncio.to_thread(main, ["trace", answer.json["id"], "--url", server.server.url])
        shown = capsys.readouterr().out
        assert code == 0
        lines = [line.split()[0] for line in shown.splitlines() if line.strip()]
        assert lines[5:12] == ["identify", "read", "route", "shape", "template", "tokenise", "admit"]
        assert "200" in shown
        assert answer.headers["x-request-id"] in shown


@asynchronous
async def test_an_unknown_request_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        assert await asyncio.to_thread(main, ["trace", "nothing", "--url", server.server.url]) == 2
        assert "No recent request 'nothing'" in capsys.readouterr().err
