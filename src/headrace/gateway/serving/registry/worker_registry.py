"""Where workers announce themselves in Redis or Valkey, and servers find them. Connects to no worker.

An announcement is a lease: it ends by itself unless the worker renews it. The set of addresses is only an index, so an
address without a lease is dropped from it, and a worker that is still there adds itself again with its next renewal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

log: Final = logging.getLogger(__name__)

_MOST: Final = 4096  # addresses that are read
_VALUE_BYTES: Final = 8192  # of one announcement; longer ones are ignored
_ID: Final = 16  # characters at the beginning of a value
_LEAVE: Final = f"""
local value = redis.call('GET', KEYS[2])
if value and string.sub(value, 1, {_ID}) == ARGV[1] then
  redis.call('DEL', KEYS[2])
  redis.call('SREM', KEYS[1], ARGV[2])
end
"""

# What others wrote is bounded, so that it can be computed with.
Sequences = Annotated[int, Meta(ge=0, le=1_000_000)]


class WorkerAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself."""

    id: str  # 16 hexadecimal digits, other ones after each start
    address: str  # where servers reach it, such as tls://10.0.0.5:9000
    model: str  # the model's name in the servers' configuration
    precision: str = ""  # of weights and KV
    arithmetic: str = ""
    release: str = ""  # of Headrace
    fingerprint: str = ""  # of the model's files and options
    preemptible: bool = False
    draining: bool = False  # it takes nothing new and will exit
    running: Sequences | None = None  # sequences, of all servers; None while its engine does not answer
    waiting: Sequences | None = None
    kv_used_share: float | None = None

    @property
    def sequences(self) -> int:
        return (self.running or 0) + (self.waiting or 0)


class WorkerRegistry:
    """Belongs to one event loop. Methods raise what the Redis client raises."""

    def __init__(self, client: Any, *, namespace: str = "headrace") -> None:
        self._client = client
        self._index = f"{namespace}:workers"

    def _name(self, address: str) -> str:
        return f"{self._index}:{address}"

    async def announce(self, worker: WorkerAnnouncement, lease_s: float) -> None:
        """Announce a worker, or renew its lease."""
        pipeline = self._client.pipeline(transaction=True)
        value = worker.id.encode() + msgspec.json.encode(worker)
        pipeline.set(self._name(worker.address), value, px=math.ceil(lease_s * 1000))
        pipeline.sadd(self._index, worker.address)
        await pipeline.execute()

    async def leave(self, worker: WorkerAnnouncement) -> None:
        """Remove a worker, unless another one has announced the same address since."""
        name = self._name(worker.address)
        await self._client.eval(_LEAVE, 2, self._index, name, worker.id, worker.address)

    async def workers(self) -> list[WorkerAnnouncement]:
        """Return the workers whose lease has not ended, by address."""
        found: set[bytes] = await self._client.smembers(self._index)
        addresses = sorted(each.decode("utf-8", "replace") for each in found)[:_MOST]
        if not addresses:
            return []
        values: Sequence[bytes | None] = await self._client.mget([self._name(each) for each in addresses])
        ended = [address for address, value in zip(addresses, values, strict=True) if value is None]
        if ended:
            await self._client.srem(self._index, *ended)
        known = [_decode(address, value) for address, value in zip(addresses, values, strict=True) if value is not None]
        return [each for each in known if each is not None]

    async def close(self) -> None:
        await self._client.aclose()


def _decode(address: str, value: bytes) -> WorkerAnnouncement | None:
    """Read an announcement. Entries of another shape, such as of a later release, are ignored."""
    try:
        if len(value) > _VALUE_BYTES:
            raise ValueError
        found = msgspec.json.decode(value[_ID:], type=WorkerAnnouncement)
    except (ValueError, msgspec.MsgspecError):
        log.warning("the registry's entry for %s cannot be read", address[:200])
        return None
    return found if found.address == address else None
