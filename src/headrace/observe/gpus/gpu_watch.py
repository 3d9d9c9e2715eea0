"""Reads the GPUs of this machine every few seconds, and sets their metrics.

Reads in a thread of its own, which nothing waits for: a call of a driver may hang when a GPU fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from headrace.observe.gpus.amd import open_amd
from headrace.observe.gpus.gpu import Gpu, GpuReader
from headrace.observe.gpus.gpu_metrics import set_gpus
from headrace.observe.gpus.nvidia import open_nvml

log: Final = logging.getLogger(__name__)

_EVERY_S: Final = 5.0
_AGAIN_S: Final = 60.0  # after a failure, and on a machine without GPUs: a driver may be loaded later
_STALE: Final = 4  # readings that are missing


def open_gpus() -> GpuReader | None:
    """Return what reads all GPUs of this machine; None if there are none."""
    readers = [reader for reader in (open_nvml(), open_amd()) if reader is not None]
    if not readers:
        return None
    return lambda: [gpu for reader in readers for gpu in reader()]


class GpuWatch:
    def __init__(
        self,
        open: Callable[[], GpuReader | None] = open_gpus,
        *,
        every_s: float = _EVERY_S,
        again_s: float = _AGAIN_S,
    ) -> None:
        self.latest: Sequence[Gpu] = ()
        self.thread: threading.Thread | None = None
        self._open = open
        self._every_s = every_s
        self._again_s = again_s
        self._read_at = time.monotonic()

    async def run(self) -> None:
        """Read until cancelled. What a driver that hangs said last does not stay."""
        ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, args=(ended,), name="gpus", daemon=True)
        self.thread.start()
        try:
            while True:
                await asyncio.sleep(self._every_s)
                if self.latest and time.monotonic() - self._read_at > _STALE * self._every_s:
                    log.error("the driver of the GPUs does not answer; see nvidia-smi and the kernel's log")
                    self._set(())
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        reader: GpuReader | None = None
        found: Sequence[Gpu] = ()
        failed = False
        while not ended.is_set():
            try:
                reader = reader or self._open()
                found = () if reader is None else reader()
                failed = False
            except Exception:
                if not failed:
                    log.exception("cannot read the GPUs; trying again every %g s", self._again_s)
                failed, reader, found = True, None, ()
            self._set(found)
            ended.wait(self._every_s if reader is not None else self._again_s)

    def _set(self, found: Sequence[Gpu]) -> None:
        self._read_at = time.monotonic()
        self.latest = found
        set_gpus(found)
