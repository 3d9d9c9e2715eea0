"""ObservationKeeper: stores, each minute and at the end, what a restart must not forget of finished requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from headrace.gateway.api_errors import ApiError
from headrace.gateway.observation.feedback_store import FeedbackStore
from headrace.gateway.observation.latency_history import LatencyHistory

log: Final = logging.getLogger(__name__)

_EVERY_S: Final = 60.0
_CLOSE_S: Final = 2.0  # for the last write


class ObservationKeeper:
    """All of it belongs to one event loop."""

    def __init__(self, history: LatencyHistory, feedback: FeedbackStore, *, restores: bool, every_s: float = _EVERY_S):
        """`restores`: there are objectives, which go on from what is stored."""
        self.history = history
        self.feedback = feedback
        self._restores = restores
        self._every_s = every_s

    async def run(self) -> None:
        """Restore what objectives counted before, then store what is new until cancelled."""
        while self._restores:
            try:
                await self.history.restore()
                self._restores = False
            except ApiError as error:
                log.warning("objectives were not restored: %s", error)
                await asyncio.sleep(self._every_s)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self.feedback.filling.wait()
            await self.flush()

    async def flush(self) -> None:
        if not self._restores:  # or the first minute would be stored over the one before the restart
            await self.history.flush()
        try:
            await self.feedback.flush()
        except ApiError as error:
            self.feedback.filling.clear()  # the oldest are dropped meanwhile
            log.warning("finished requests were not stored for feedback: %s", error)

    async def close(self) -> None:
        """Store the rest, within bounded time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
