"""DurableState: the stores of files, batches, responses, conversations and collections. Does not serve them
(server.api)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from headrace.config import Config, variants_of
from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.pipelines.collections.collections import Collections
from headrace.server.api.batches.batch_runner import BatchRunner
from headrace.server.api.batches.batches import Batches
from headrace.server.api.conversations.conversation_store import ConversationStore
from headrace.server.api.files import FileStore
from headrace.server.api.response_store import ResponseStore
from headrace.server.api.responses.background_responses import BackgroundResponses
from headrace.server.api.responses.response_history import ResponseHistory
from headrace.server.endpoint_context import EndpointContext
from headrace.tasks import end_tasks

log: Final = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 600.0
_BATCH_RUNNING: Final = 32


def batch_running(config: Config) -> int:
    """Return how many requests of batches run at once: of a variant for throughput, twice what it runs, so that its
    next ones wait in its own queue."""
    filled = [
        2 * variant.max_sequences
        for name, model in config.models.items()
        for variant in variants_of(name, model, config.surfaces).values()
        if variant.batch_mode == "throughput"
    ]
    return max([_BATCH_RUNNING, *filled])


class DurableState:
    """All of it belongs to one event loop. Nothing is opened before it is used."""

    def __init__(self, context: EndpointContext, database: Database) -> None:
        storage = context.config.storage
        self._sweeping: asyncio.Task[None] | None = None
        self.files = FileStore(database, storage.path, storage)
        self.history = ResponseHistory(
            ResponseStore(database, hours=storage.response_hours),
            ConversationStore(database, hours=storage.conversation_hours),
        )
        self.background = BackgroundResponses(context, self.history, running=storage.background_running)
        runner = BatchRunner(context, self.history)
        self.batches = Batches(
            database,
            self.files,
            runner.run,
            storage,
            running=storage.batch_running or batch_running(context.config),
            line_values=context.config.limits.values,
        )
        self.collections = Collections.from_config(context.config.collections, storage.path, context.services)
        if (pipelines := context.services.pipelines) is not None:
            from headrace.pipelines.pipelines import Pipelines  # as in server.assemble

            assert isinstance(pipelines, Pipelines)
            pipelines.services.retriever = self.collections
            self.collections.watcher = pipelines

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())
        self.background.resume()
        await self.batches.resume()
        await self.collections.start()

    async def close(self) -> None:
        await end_tasks([self._sweeping])
        await self.background.close()
        await self.batches.close()
        await self.collections.close()

    async def _sweep(self) -> None:
        """Remove what has expired, even where nothing new is written."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            history, files, collections = self.history, self.files, self.collections
            for sweep in (files.sweep, history.responses.sweep, history.conversations.sweep, collections.sweep):
                try:
                    await sweep()
                except ApiError as error:
                    log.warning("expired files, responses or conversations were not removed: %s", error)
