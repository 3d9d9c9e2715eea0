"""KvTiers: keeps the KV of evicted and idle blocks in host memory and on disk, and brings it back when it is needed.

    block memory ──evicted──▶ host memory ──oldest──▶ disk
          ▲  └──────────── idle ─────────────────────▶ │
          └──────────── recall: into fresh blocks ─────┘

Both tiers are bounded. The disk is written beside a running step and while the engine is idle (`work`, `rest`);
only copies between block memory and host memory happen between two steps. KV is named by a digest of its tokens, all
tokens before them, who may find it and what computed it, so what comes back is what was there, byte for byte.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.memory.block_manager import BlockManager
from headrace.engine.memory.block_table import PrefixMatch
from headrace.engine.memory.kv_disk import KvDisk, KvDiskStats
from headrace.engine.memory.prefix_tree import unpack

_WAITING_BLOCKS: Final = 1024  # that wait to be written; further ones are dropped
_REST_BLOCKS: Final = 16  # written in one turn of an idle engine
_CLOSE_S: Final = 10.0  # for writing at the end
_HURRY_S: Final = 0.1  # for reading from disk while other requests run

Bytes = NDArray[np.uint8]


class BlockCopier(Protocol):
    """Copies blocks between the executor's memory and ours, after the steps launched before."""

    def read_blocks(self, blocks: Sequence[int]) -> list[Bytes]: ...

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None: ...

    @property
    def block_bytes(self) -> int: ...


class KvTierStats(msgspec.Struct):
    """`memory_*` and `waiting` are current, the others are counts since the start. All but bytes and seconds count
    blocks."""

    memory_entries: int = 0
    memory_bytes: int = 0
    waiting: int = 0  # to be written to the disk
    memory_hits: int = 0
    disk_hits: int = 0
    dropped: int = 0  # left the tiers, and the disk had no room or time for them
    recalls: int = 0  # requests for which something came back
    recalled_tokens: int = 0
    recall_seconds: float = 0.0
    disk: KvDiskStats = msgspec.field(default_factory=KvDiskStats)


class _Kept(msgspec.Struct):
    salt: str | None
    data: Bytes


class KvTiers:
    def __init__(
        self,
        blocks: BlockManager,
        copier: BlockCopier,
        *,
        memory_bytes: int = 0,
        disk: KvDisk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._copier = copier
        self._most = memory_bytes // copier.block_bytes
        self._disk = disk
        self._clock = clock
        self._memory: OrderedDict[bytes, _Kept] = OrderedDict()  # least recently used first
        self._evicted: list[tuple[int, bytes, str | None]] = []  # still in block memory
        self._waiting: deque[tuple[bytes, _Kept]] = deque()
        self._waits: dict[bytes, _Kept] = {}  # the same, by digest
        self._rest_stamp = -1  # of the tree, when the present round of `rest` began
        self._rest_left = 0  # blocks that the round may still write, so that it ends if the disk is smaller
        self.counts = KvTierStats()
        blocks.tier = self

    # What leaves the block memory

    def evicted(self, block: int, digest: bytes, salt: str | None) -> None:
        if digest in self._memory:
            self._memory.move_to_end(digest)
        elif self._most or (self._disk is not None and digest not in self._disk and digest not in self._waits):
            self._evicted.append((block, digest, salt))

    def save_evicted(self) -> None:
        """Copy what was evicted since the last call. Call it before anything writes into the blocks."""
        if not self._evicted:
            return
        evicted, self._evicted = self._evicted, []
        contents = self._copier.read_blocks([block for block, _, _ in evicted])
        for (_, digest, salt), data in zip(evicted, contents, strict=True):
            kept = _Kept(salt, data)
            if self._most:
                self._memory[digest] = kept
            else:
                self._to_disk(digest, kept)
        while len(self._memory) > self._most:
            self._to_disk(*self._memory.popitem(last=False))

    def _to_disk(self, digest: bytes, kept: _Kept) -> None:
        if self._disk is None or len(self._waiting) >= _WAITING_BLOCKS:
            self.counts.dropped += 1
        elif digest not in self._disk and digest not in self._waits:
            self._waiting.append((digest, kept))
            self._waits[digest] = kept

    # What is written meanwhile

    def work(self, blocks: int = 1) -> None:
        """Write some of what waits for the disk. Call it while a step runs."""
        while self._waiting and blocks and self._disk is not None:
            digest, kept = self._waiting.popleft()
            del self._waits[digest]
            if not self._disk.write(digest, kept.salt or "", kept.data):
                self.counts.dropped += 1
            blocks -= 1

    def rest(self) -> bool:
        """Write a few blocks that nothing uses now. Call it while the engine is idle. Return whether there are more."""
        if self._disk is None:
            return False
        if self._waiting:
            self.work(_REST_BLOCKS)
            return True
        if self._rest_stamp != self._blocks.stamp:
            self._rest_stamp, self._rest_left = self._blocks.stamp, self._blocks.count
        most = min(_REST_BLOCKS, self._rest_left)
        missing = (each for each in self._blocks.cold_blocks() if each[1] not in self._disk) if most else iter(())
        cold = list(islice(missing, most))
        contents = self._copier.read_blocks([block for block, _, _ in cold]) if cold else []
        self._rest_left = self._rest_left - len(cold) if len(cold) == _REST_BLOCKS else 0
        for (_, digest, salt), data in zip(cold, contents, strict=True):
            if not self._disk.write(digest, salt or "", data):
                self._rest_left = 0  # the disk takes nothing now
        return self._rest_left > 0

    def close(self) -> None:
        """Write what is left, for a bounded time."""
        until = self._clock() + _CLOSE_S
        while self._clock() < until and self.rest():
            pass
        if self._disk is not None:
            for digest, kept in reversed(self._memory.items()):
                if self._clock() >= until or not self._disk.write(digest, kept.salt or "", kept.data):
                    break

    # What comes back

    def has(self, digest: bytes) -> bool:
        return digest in self._memory or digest in self._waits or (self._disk is not None and digest in self._disk)

    def recall(self, match: PrefixMatch, *, patient: bool) -> bool:
        began = self._clock()
        contents = self._contents(match, None if patient else began + _HURRY_S)
        if not contents:
            return False
        blocks, size = self._blocks, self._blocks.block_tokens
        first = len(match.path)
        tokens = unpack(match.packed)[: (first + len(contents)) * size]
        table = blocks.restore(tokens, match.salt, variant=match.variant)
        if table is None:
            return False
        self.save_evicted()  # making room may have evicted others
        computed = table.cached_tokens
        place = computed // size
        self._copier.write_blocks(table.blocks[place:], contents[place - first :])
        blocks.release(table, tokens, len(tokens))
        counts = self.counts
        counts.recalls += 1
        counts.recalled_tokens += len(tokens) - computed
        counts.recall_seconds += self._clock() - began
        return True

    def _contents(self, match: PrefixMatch, until: float | None) -> list[Bytes]:
        """Return the KV of the blocks after the match, as far as the tiers have it and time allows."""
        found: list[Bytes] = []
        for digest, salt in self._blocks.stored_after(match):
            kept = self._memory.get(digest) or self._waits.get(digest)
            if kept is not None:
                self.counts.memory_hits += 1
                if digest in self._memory:
                    self._memory.move_to_end(digest)
                found.append(kept.data)
                continue
            if self._disk is None or (until is not None and self._clock() >= until):
                break
            data = self._disk.read(digest, salt or "")
            if data is None:
                break
            self.counts.disk_hits += 1
            found.append(data)
        return found

    def stats(self) -> KvTierStats:
        counts = self.counts
        counts.memory_entries = len(self._memory)
        counts.memory_bytes = len(self._memory) * self._copier.block_bytes
        counts.waiting = len(self._waiting)
        if self._disk is not None:
            counts.disk = self._disk.stats
        return counts
