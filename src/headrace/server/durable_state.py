"""DurableState: the stores of files, batches and responses. Does not serve them (server.api)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.server.api.batch_endpoints import BatchRunner
from headrace.server.api.batches import Batches
from headrace.server.api.files import FileStore
from headrace.server.api.response_store import ResponseStore
from headrace.server.endpoint_context import EndpointContext

log: Final = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 600.0


class DurableState:
    """All of it belongs to one event loop. Nothing is opened before it is used."""

    def __init__(self, context: EndpointContext, database: Database) -> None:
        storage = context.config.storage
        self._sweeping: asyncio.Task[None] | None = None
        self.files = FileStore(database, storage.path, storage)
        self.responses = ResponseStore(database, hours=storage.response_hours)
        runner = BatchRunner(context, self.responses)
        self.batches = Batches(database, self.files, runner.run, storage, running=storage.batch_running)

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())
        await self.batches.resume()

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.batches.close()

    async def _sweep(self) -> None:
        """Remove what has expired, even where nothing new is written."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for sweep in (self.files.sweep, self.responses.sweep):
                try:
                    await sweep()
                except ApiError as error:
                    log.warning("expired files or responses were not removed: %s", error)
