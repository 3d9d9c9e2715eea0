"""A worker's log becomes the server's: structured lines, tracebacks, and lines that are none of ours."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import msgspec
import pytest

from headrace.engine.process.worker_log import LogLine, relay_line, relay_log


def test_lines_keep_their_level_logger_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        relay_line(msgspec.json.encode(LogLine("WARNING", "headrace.engine.engine", "100 % slow")), "worker-0")
        relay_line(msgspec.json.encode(LogLine("CRITICAL", "headrace", "failed", "Traceback …")), "worker-1")
    first, second = caplog.records
    assert (first.levelname, first.name, first.getMessage()) == ("WARNING", "headrace.engine.engine", "100 % slow")
    assert vars(first)["worker"] == "worker-0"
    assert (second.levelname, vars(second)["exception"], vars(second)["worker"]) == ("ERROR", "Traceback …", "worker-1")


def test_other_lines_are_logged_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    async def relay() -> None:
        lines = asyncio.StreamReader()
        lines.feed_data(b"terminate called without an active ")
        lines.feed_data(b"exception\n\n{}\n\xff\n" + b"x" * 200_000 + b"\nlast")
        lines.feed_eof()
        await relay_log(lines, "worker-0")

    asyncio.run(relay())
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == ["terminate called without an active exception", "{}", "\ufffd"]
    assert said[-1] == "last"
    assert sum(each.count("x") for each in said[3:-1]) == 200_000
    assert max(map(len, said)) <= 2 * 65536


def test_a_worker_writes_lines_of_json() -> None:
    code = """
import logging, warnings
from headrace.engine.process.worker_log import configure_worker_log
configure_worker_log()
logging.getLogger("headrace.engine").info("loaded %d", 3)
warnings.warn("old")
raise ValueError("a bug")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    lines = [msgspec.json.decode(line, type=LogLine) for line in done.stderr.splitlines()]
    assert [(line.level, line.logger) for line in lines] == [
        ("INFO", "headrace.engine"),
        ("WARNING", "py.warnings"),
        ("CRITICAL", "headrace.engine.process.worker"),
    ]
    assert lines[0].event == "loaded 3"
    assert "ValueError: a bug" in lines[2].exception
