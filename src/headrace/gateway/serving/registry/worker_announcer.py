"""Announces one worker in the registry until it leaves, and says there what it is busy with.

A registry that does not answer is tried again: the worker serves whoever knows its address all the same.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec

from headrace.engine.process.engine_client import EngineClient
from headrace.errors import HeadraceError
from headrace.gateway.serving.registry.worker_registry import WorkerAnnouncement, WorkerRegistry

log: Final = logging.getLogger(__name__)

_RENEWALS: Final = 4  # within the time of a lease
_LOAD_S: Final = 1.0  # for the engine to say what it is busy with
_LEAVE_S: Final = 2.0


class WorkerAnnouncer:
    """Belongs to one event loop. `engine` is connected to the worker's own engine and to no other."""

    def __init__(
        self, registry: WorkerRegistry, engine: EngineClient, worker: WorkerAnnouncement, *, lease_s: float
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._worker = worker
        self._lease_s = lease_s
        self._wake = asyncio.Event()
        self._is_told = True  # the last renewal succeeded

    async def run(self) -> None:
        """Announce until cancelled."""
        while True:
            self._wake.clear()
            await self._renew()
            try:
                async with asyncio.timeout(self._lease_s / _RENEWALS):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def drain(self) -> None:
        """Say at once that the worker takes nothing new."""
        self._worker = msgspec.structs.replace(self._worker, draining=True)
        self._wake.set()

    async def leave(self) -> None:
        """Remove the worker from the registry, if that answers. Call it when `run` has ended."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._registry.leave(self._worker)
        except Exception as error:  # a driver's own; the lease ends by itself
            log.warning("cannot leave the registry: %s", _reason(error))
        await self._registry.close()

    async def _renew(self) -> None:
        found = await self._load()  # `drain` may change the worker meanwhile
        self._worker = msgspec.structs.replace(self._worker, **found)
        try:
            await self._registry.announce(self._worker, self._lease_s)
        except Exception as error:  # a driver's own
            if self._is_told:
                log.warning("cannot announce this worker in the registry: %s; trying again", _reason(error))
            self._is_told = False
            return
        if not self._is_told:
            log.info("this worker is announced in the registry again")
        self._is_told = True

    async def _load(self) -> dict[str, Any]:
        unknown: dict[str, Any] = {"running": None, "waiting": None, "kv_used_share": None}
        (replica,) = self._engine.replicas()
        draining = {"draining": True} if replica.state == "draining" else {}
        try:
            async with asyncio.timeout(_LOAD_S):
                statistics = await self._engine.stats()
        except (TimeoutError, HeadraceError):
            statistics = []
        if not statistics:
            return unknown | draining
        scheduler, blocks = statistics[0].get("scheduler", {}), statistics[0].get("blocks", {})
        total = blocks.get("total", 0)
        found = {
            "running": scheduler.get("running"),
            "waiting": scheduler.get("waiting"),
            "kv_used_share": round(blocks.get("used", 0) / total, 4) if total else None,
        }
        return found | draining


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
