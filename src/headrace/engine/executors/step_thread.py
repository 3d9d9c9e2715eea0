"""A thread that runs calls in order, for an executor whose steps block their caller.

Handing over a call takes a few microseconds; a standard-library pool takes tens.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class StepCall(Generic[T]):
    """A submitted call. `result` returns its value or raises its error."""

    __slots__ = ("_arguments", "_callbacks", "_ended", "_error", "_finished", "_function", "_value")

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._value: T | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._callbacks: list[Callable[[Any], object]] = []
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        try:
            self._value = self._function(*self._arguments)
        except BaseException as error:
            self._error = error
        self._arguments = ()
        self._finished = True
        self._ended.release()
        self._tell()

    def done(self) -> bool:
        return self._finished

    def result(self) -> T:
        """Wait for the call."""
        with self._ended:
            pass
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType] - it has returned, so this is what it returned

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` when the call is done, on the step thread; at once if it is done already."""
        self._callbacks.append(fn)
        if self._finished:
            self._tell()

    def _tell(self) -> None:
        # Both threads may get here at once; each callback is popped by one of them.
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback(self)


class StepThread:
    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[StepCall[Any] | None] = SimpleQueue()
        # A daemon thread, so that a program that never closes its executor can exit; `_finish_calls` waits for a call.
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)  # the thread of a forgotten executor ends
        _threads.add(self)

    def submit(self, function: Callable[..., T], *arguments: Any) -> StepCall[T]:
        call = StepCall(function, arguments)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Return when all calls have ended."""
        self._calls.put(None)
        self._thread.join()


_threads: weakref.WeakSet[StepThread] = weakref.WeakSet()


def _serve(calls: SimpleQueue[StepCall[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()


@atexit.register
def _finish_calls() -> None:
    """Wait for the calls under way before the interpreter ends: a thread that returns from the core to an interpreter
    that is gone aborts the process."""
    for thread in list(_threads):
        thread.close()
