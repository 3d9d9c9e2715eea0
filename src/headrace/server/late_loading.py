"""Does what a start leaves for later, once the server has answered its first requests and has nothing to do.

Reading a large tokenizer holds the interpreter for a tenth of a second at a time, which streams would feel. A spare
worker takes a processor for two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from headrace.engine.process import early_worker
from headrace.errors import HeadraceError
from headrace.models.text.tokenizer import Tokenizer

log: Final = structlog.stdlib.get_logger("headrace")

_FIRST_S: Final = 1.0  # the first requests come in the moment in which a server is ready
_SPARE_S: Final = 1.0  # between looks for a spare worker
_PAUSE_S: Final = 0.25
_MOST_PAUSES: Final = 120  # of a server that is never idle


async def load_templates(tokenizers: Iterable[Tokenizer]) -> None:
    """Compile the chat templates of indexed tokenizers, which takes less time than the workers take to start."""
    for tokenizer in tokenizers:
        with contextlib.suppress(HeadraceError, MemoryError):  # the first chat reports it
            await asyncio.to_thread(tokenizer.load_templates)


async def load_rest(tokenizers: Iterable[Tokenizer], is_idle: Callable[[], bool]) -> None:
    """Load the tokenizers whole. Returns when that is done; logs what fails, which requests then report."""
    await asyncio.sleep(_FIRST_S)
    for tokenizer in tokenizers:
        pauses = 0
        while not is_idle() and pauses < _MOST_PAUSES:
            pauses += 1
            await asyncio.sleep(_PAUSE_S)
        try:
            await asyncio.to_thread(tokenizer.load_encoder)
        except (HeadraceError, OSError, MemoryError) as error:
            log.error("a tokenizer was not loaded", reason=str(error))


async def keep_spare_worker(is_idle: Callable[[], bool]) -> None:
    """Have a worker process wait for its configuration, until cancelled. The next engine that starts takes it: after a
    crash, when a model scales up, or when one is reloaded. Its own start is then only that of its model."""
    while True:
        await asyncio.sleep(_SPARE_S)
        if not early_worker.is_waiting() and is_idle():
            early_worker.launch_early()
