"""A grammar being compiled in another thread, within a bound on its processor time.

The bound is on processor time, so that a busy machine does not reject a grammar that an idle one accepts. A second, far
larger bound on the time that has passed ends the wait of requests where the thread does not get to run at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from headrace.engine.grammar.grammar_state import CompiledGrammar, GrammarState
from headrace.engine.grammar.triggered_state import TriggeredGrammar
from headrace.errors import RequestError

Compiled = CompiledGrammar | TriggeredGrammar

_LONGEST_WAIT: Final = 12  # times the bound on processor time
_LOOK_SECONDS: Final = 0.05  # at the clock of the other thread, at least


class CompilationJob:
    """A compilation in a thread pool. Several requests may wait for it."""

    def __init__(self, pool: ThreadPoolExecutor, compile: Callable[[], Compiled]) -> None:
        self._compile = compile
        self._clock: int | None = None  # of the thread that compiles
        self._began = 0.0
        self.future: Future[Compiled] = pool.submit(self._run)

    def processor_seconds(self) -> float:
        """Return how long the thread has worked on it; 0 while it waits for a thread."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._began

    def _run(self) -> Compiled:
        self._began = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        return self._compile()


class Compilation:
    """One request's wait for a grammar."""

    def __init__(self, job: CompilationJob, seconds: float) -> None:
        """`seconds` of processor time may pass."""
        self._job = job
        self._seconds = seconds
        self._until = time.monotonic() + _LONGEST_WAIT * seconds

    def done(self) -> bool:
        """True if `result` returns or raises at once."""
        return self._job.future.done() or self._too_long() or time.monotonic() >= self._until

    def result(self) -> GrammarState:
        """Wait for the compilation. Raise RequestError if the grammar is wrong or takes too long."""
        future = self._job.future
        while not self.done():
            left = min(self._seconds - self._job.processor_seconds(), self._until - time.monotonic())
            try:
                future.result(max(_LOOK_SECONDS, left))
            except TimeoutError:
                if future.done():
                    raise  # the compilation's own
        if future.done():
            return future.result().state()
        if self._too_long():
            message = f"The grammar takes longer than {self._seconds:g} s to compile."
        else:
            waited = _LONGEST_WAIT * self._seconds
            message = f"The grammar was not compiled within {waited:g} s, because the machine is busy. Try again."
        raise RequestError(message, parameter="grammar")

    def _too_long(self) -> bool:
        return self._job.processor_seconds() >= self._seconds
