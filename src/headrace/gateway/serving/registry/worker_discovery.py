"""Finds the workers that the registry names, and lets the fleet send them requests, without a restart.

The registry says whom to try; the connection says who is there. So a worker whose lease has ended stays as long as it
answers, and a registry that is gone or was emptied takes nobody away. Certificates and fingerprints are checked when a
worker is connected, whoever named it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from headrace.config import Config
from headrace.config.environment import required_secret
from headrace.engine.process.submission import ReplicaState
from headrace.engine.process.worker_address import WorkerAddressError, parse_address
from headrace.gateway.redis_client import connect
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.registry.worker_registry import WorkerAnnouncement, WorkerRegistry

log: Final = logging.getLogger(__name__)

_MOST: Final = 256  # workers of one model


class WorkerChanges(NamedTuple):
    """Addresses of workers to connect to, and of those to give up."""

    found: list[str]
    lost: list[str]


def changes(known: Sequence[ReplicaState], announced: Iterable[WorkerAnnouncement], *, most: int) -> WorkerChanges:
    """Compare the workers of one model with those that the registry names."""
    named = {each.address: each for each in announced}
    addresses = {each.address for each in known}
    lost = [each.address for each in known if each.discovered and each.pid is None and each.address not in named]
    room = most - sum(each.discovered for each in known) + len(lost)
    new = [address for address, each in sorted(named.items()) if address not in addresses and not each.draining]
    return WorkerChanges(new[: max(0, room)], lost)


class WorkerDiscovery:
    """All of it belongs to one event loop."""

    def __init__(
        self, fleet: Fleet, registry: WorkerRegistry, models: Sequence[str], *, poll_s: float, tls_only: bool = False
    ) -> None:
        """`models` are those that take workers from the registry. `tls_only`: ignore workers without TLS."""
        self._fleet = fleet
        self._registry = registry
        self._models = models
        self._poll_s = poll_s
        self._tls_only = tls_only
        self._announced: dict[str, WorkerAnnouncement] = {}  # by address
        self._rejected: set[str] = set()  # addresses that were logged as invalid
        self._failing: set[str] = set()  # models whose workers could not be followed at the last look
        self.answers = True  # the registry's last answer was one

    @classmethod
    def from_config(cls, config: Config, fleet: Fleet, environ: Mapping[str, str]) -> WorkerDiscovery | None:
        """Return None if no model takes workers from a registry."""
        models = [name for name, model in config.models.items() if model.discover_workers]
        section = config.workers
        if not models or section.redis_env is None:
            return None
        url = required_secret(environ, section.redis_env, "workers.redis_env")
        client = connect(url, seconds=section.wait_ms / 1e3, used_for="registry of workers")
        registry = WorkerRegistry(client, namespace=section.namespace)
        return cls(fleet, registry, models, poll_s=section.poll_s, tls_only=bool(section.cert_file))

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await self.turn()
                await asyncio.sleep(self._poll_s)
        finally:
            await self._registry.close()

    async def turn(self) -> None:
        """Look once."""
        try:
            found = await self._registry.workers()
        except Exception as error:  # a driver's own
            if self.answers:
                log.warning("the registry of workers does not answer (%s); keeping those that are known", _why(error))
            self.answers = False
            for model in self._models:
                self._note_loads(model, [])
            return
        if not self.answers:
            log.info("the registry of workers answers again")
        self.answers = True
        usable = [(self._usable_address(each.address), each) for each in found]
        self._announced = {address: replace(each, address=address) for address, each in usable if address}
        for model in self._models:
            try:
                await self._follow(model)
                self._failing.discard(model)
            except Exception:  # the next look tries again
                if model not in self._failing:
                    log.exception("cannot follow the workers of %s that the registry names; trying again", model)
                self._failing.add(model)

    def announcement(self, address: str) -> WorkerAnnouncement | None:
        """Return what the worker at an address said of itself, as of the last look."""
        return self._announced.get(address)

    async def _follow(self, model: str) -> None:
        announced = [each for each in self._announced.values() if each.model == model]
        found, lost = changes(self._fleet.replicas(model), announced, most=_MOST)
        for address in found:
            log.info("found the worker of %s at %s", model, address)
            self._fleet.add_worker(model, address)
        for address in lost:
            log.info("the worker of %s at %s is gone", model, address)
            await self._fleet.remove_worker(model, address)
        self._note_loads(model, announced)

    def _note_loads(self, model: str, announced: Iterable[WorkerAnnouncement]) -> None:
        """Tell the fleet how many sequences each worker has. A worker that is not announced counts as idle."""
        loads = {each.address: each.sequences for each in announced}
        for each in self._fleet.replicas(model):
            self._fleet.note_sequences(model, each.address, loads.get(each.address, 0))

    def _usable_address(self, text: str) -> str:
        """Return a worker's address as the fleet writes it; empty if servers may not connect to it."""
        try:
            address = parse_address(text)
        except WorkerAddressError as error:
            self._reject(text, str(error))
            return ""
        if not address.is_remote:
            return ""
        if self._tls_only and not address.tls:
            self._reject(text, f"The worker address {text!r} has no TLS, but [workers] has certificates.")
            return ""
        return str(address)

    def _reject(self, text: str, why: str) -> None:
        if text not in self._rejected and len(self._rejected) < _MOST:
            self._rejected.add(text)
            log.warning("the registry names a worker that cannot be used: %s", why)


def _why(error: Exception) -> str:
    return type(error).__name__
