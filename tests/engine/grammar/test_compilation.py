"""A compilation is bounded by the processor time that it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.engine.grammar import compilation
from headrace.engine.grammar.compilation import Compilation, CompilationJob
from headrace.errors import RequestError


class Compiled:
    def state(self) -> str:
        return "a state"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def job(pool: ThreadPoolExecutor, work: Any) -> CompilationJob:
    return CompilationJob(pool, work)


def test_what_waits_for_a_thread_or_sleeps_has_taken_no_processor_time(pool: ThreadPoolExecutor) -> None:
    started, go_on = threading.Event(), threading.Event()

    def compile() -> Compiled:
        started.set()
        go_on.wait()
        return Compiled()

    first, second = job(pool, compile), job(pool, Compiled)
    assert started.wait(60)
    waiting = Compilation(second, 60.0)
    assert (waiting.done(), second.processor_seconds()) == (False, 0.0)
    assert first.processor_seconds() < 60.0
    go_on.set()
    assert waiting.result() == "a state"
    assert waiting.done()


def test_what_works_for_too_long_is_rejected_while_it_works(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_LONGEST_WAIT", 6000)  # a busy machine takes long to give it 0.05 s
    stop = threading.Event()

    def compile() -> Compiled:
        while not stop.is_set():
            pass
        return Compiled()

    working = Compilation(job(pool, compile), 0.05)
    try:
        with pytest.raises(RequestError, match=r"The grammar takes longer than 0\.05 s to compile"):
            working.result()
        assert working.done()
    finally:
        stop.set()


def test_a_thread_that_never_runs_ends_the_wait_at_last(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    pool.submit(go_on.wait)
    waiting = Compilation(job(pool, Compiled), 10.0)
    assert not waiting.done()
    now = time.monotonic() + 120.0
    monkeypatch.setattr(compilation.time, "monotonic", lambda: now)
    with pytest.raises(RequestError, match=r"not compiled within 120 s, because the machine is busy. Try again"):
        waiting.result()
    go_on.set()


def test_the_error_of_a_compilation_is_raised_for_each_that_waits(pool: ThreadPoolExecutor) -> None:
    def compile() -> Compiled:
        raise RequestError("The grammar is wrong.", parameter="grammar")

    shared = job(pool, compile)
    for _ in range(2):
        with pytest.raises(RequestError, match="is wrong"):
            Compilation(shared, 60.0).result()
