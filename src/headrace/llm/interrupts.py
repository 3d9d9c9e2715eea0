"""Holds back Ctrl-C while the engine changes its state, so that an interrupted program can go on with the engine."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

# Handlers that raise nothing in Python code, and so interrupt nothing.
_HARMLESS: Final = (signal.SIG_DFL, signal.SIG_IGN, None)


class held_interrupts:  # noqa: N801 - used as a statement, like contextlib's
    """A block that the first SIGINT does not interrupt: its handler runs at the end of the block. A second SIGINT
    interrupts the block, because a step may be long. Does nothing outside the main thread."""

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> held_interrupts:
        self._held = False
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if handler not in _HARMLESS:
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._held and kind is None:
            self._handler(signal.SIGINT, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._handler(number, frame)
        self._held = True
