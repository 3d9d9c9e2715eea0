"""`headrace advise` against a server that runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.bench.advice import LEAST_REQUESTS
from headrace.cli import FAILED, main
from tests.support.admin_server import ROOT, administered
from tests.support.running_server import words


async def asked(path: Path, requests: int, *arguments: str) -> int:
    async with administered(path) as server:
        server.engine.answer = words("a ", "b")
        for _ in range(requests):
            await server.chat("caller-secret")
        return await asyncio.to_thread(main, ["advise", "--url", server.url, *arguments])


def test_few_requests_are_too_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    assert asyncio.run(asked(tmp_path, 2)) == 0
    assert "2 requests so far: too few" in capsys.readouterr().out


def test_a_server_is_read_through_its_admin_api(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    assert asyncio.run(asked(tmp_path, LEAST_REQUESTS, "--json")) == 0
    out = capsys.readouterr().out
    assert [] in [json.loads(line) for line in out.splitlines() if line.startswith("[")]


def test_a_server_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    assert main(["advise", "--url", "http://127.0.0.1:9"]) == FAILED
    assert "http://127.0.0.1:9" in capsys.readouterr().err
