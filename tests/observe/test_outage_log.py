"""An outage in the log: its first failure, counts at growing intervals, and its end."""

from __future__ import annotations

import logging

import pytest

from headrace.observe.outage_log import OutageLog
from tests.support.clock import Clock


def test_an_outage_is_a_few_lines_however_long_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = OutageLog(logging.getLogger("headrace.test"), "the store cannot be read", clock=clock)
    with caplog.at_level(logging.INFO):
        for _ in range(3600):
            outage.failed(ConnectionError("refused"))
            clock.now += 1.0
        outage.succeeded()
        outage.succeeded()
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == [
        "the store cannot be read: refused",
        "the store cannot be read, for 10 s and 11 times; the latest: refused",
        "the store cannot be read, for 30 s and 31 times; the latest: refused",
    ]
    assert said[-1] == "the store cannot be read: over after 3600 s and 3600 failures"
    assert len(said) == 12
    assert {record.levelname for record in caplog.records} == {"ERROR"}


def test_the_next_outage_is_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("headrace.test"), "no answer", level=logging.WARNING)
    outage.succeeded()
    for _ in range(2):
        outage.failed(TimeoutError())
        outage.succeeded()
    said = [record.getMessage().partition(" after")[0] for record in caplog.records]
    assert said == ["no answer: TimeoutError", "no answer: over", "no answer: TimeoutError", "no answer: over"]
