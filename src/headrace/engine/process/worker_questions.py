"""Messages that a worker answers, and their answers, by number. Other messages need none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from headrace.engine.process import wire
from headrace.engine.process.client_errors import WorkerLostError
from headrace.engine.process.submission import Replica

WorkerAnswer = wire.Stats | wire.Pinned | wire.AdapterLoaded


class WorkerQuestions:
    """The questions of one client. Belongs to its event loop."""

    def __init__(self, *, patience: float) -> None:
        """`patience`: seconds that an answer may take."""
        self._patience = patience
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    def next_number(self) -> int:
        """Return a number for a message whose answer nobody waits for."""
        return next(self._numbers)

    async def ask(
        self, replica: Replica, message: Callable[[int], wire.ClientMessage], *, patient: bool = False
    ) -> Any:
        """Send a message and return the answer. `patient`: it may take as long as the worker lives. WorkerLostError
        if none comes."""
        if replica.connection is None:
            raise WorkerLostError(f"The worker at {replica.address} is not connected.")
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        replica.connection.send(message(number))
        lost = replica.connection.closed
        try:
            timeout = None if patient else self._patience
            await asyncio.wait({answer, lost}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise WorkerLostError(f"The worker at {replica.address} did not answer within {self._patience:g} s.")
            return answer.result()
        finally:
            del self._open[number]

    def take(self, answer: WorkerAnswer) -> bool:
        """Hand an answer to who waits for it. Return False if nobody does."""
        waiting = self._open.get(answer.number)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(answer)
        return True
