"""Reads the GPUs of this machine every few seconds, and sets their metrics.

Reads in a thread of its own, which nothing waits for: a call of a driver may hang when a GPU fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from headrace.observe.gpus.amd import open_amd
from headrace.observe.gpus.gpu import Gpu, GpuReader
from headrace.observe.gpus.gpu_metrics import set_gpus
from headrace.observe.gpus.nvidia import open_nvml

log: Final = logging.getLogger(__name__)

_EVERY_S: Final = 5.0


def open_gpus() -> GpuReader | None:
    """Return what reads all GPUs of this machine; None if there are none."""
    readers = [reader for reader in (open_nvml(), open_amd()) if reader is not None]
    if not readers:
        return None
    return lambda: [gpu for reader in readers for gpu in reader()]


class GpuWatch:
    def __init__(self, open: Callable[[], GpuReader | None] = open_gpus, *, every_s: float = _EVERY_S) -> None:
        self.latest: Sequence[Gpu] = ()
        self._open = open
        self._every_s = every_s

    async def run(self) -> None:
        """Read until cancelled."""
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="gpus", daemon=True).start()
        try:
            await asyncio.Future()
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        reader = self._open()
        if reader is None:
            return
        failed = False
        while True:
            try:
                self.latest = reader()
                failed = False
            except Exception:
                self.latest = ()
                if not failed:
                    log.exception("cannot read the GPUs; trying again every %g s", self._every_s)
                failed = True
            set_gpus(self.latest)
            if ended.wait(self._every_s):
                return
