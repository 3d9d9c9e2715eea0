"""Holds one tenant's part of the semantic cache: its entries, their vectors, and what was learned about them.

Owns the bounds (number, bytes, time to live, tags) and the choice of a candidate: nearest vectors, then guards, then
the score. A namespace belongs to one tenant; nothing here takes two. Never waits: embeddings and
disks are the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.config.cache_section import SemanticConfig, lifetime_s
from headrace.gateway.caches.semantic.guards import refusal_reason
from headrace.gateway.caches.semantic.pair_score import score
from headrace.gateway.caches.semantic.semantic_entry import SemanticEntry, StoredAnswer
from headrace.gateway.caches.semantic.semantic_key import SemanticKey
from headrace.gateway.caches.semantic.thresholds import CELLS, Evidence, Thresholds
from headrace.gateway.vector_index import EXACT, GrowingVectors

Floats = NDArray[np.float32]


class CacheCandidate(msgspec.Struct, frozen=True):
    entry: SemanticEntry
    cosine: float
    score: float


class CandidateSearch(msgspec.Struct, frozen=True):
    """The best candidate, or why the nearest was refused; neither if nothing is near."""

    best: CacheCandidate | None
    reason: str = ""


_OVERHEAD_BYTES: Final = 256 + 4 * CELLS  # of an entry beside its texts and vector, about


class Namespace:
    def __init__(self, thresholds: Thresholds, config: SemanticConfig, *, exact: int = EXACT) -> None:
        """`exact`: entries of one group up to which the search is exact."""
        self.thresholds = thresholds
        self.config = config
        self._exact = exact
        self._ttl_s = lifetime_s(config.ttl)
        self._tag_ttl_s = {tag: lifetime_s(ttl) for tag, ttl in config.tags.items()}
        self.nbytes = 0
        self.evicted = 0
        self._entries: OrderedDict[int, SemanticEntry] = OrderedDict()  # the least recently used first
        self._groups: dict[bytes, GrowingVectors] = {}  # by digest: only entries with the same one may answer
        self._tagged: dict[str, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SemanticEntry]:
        return iter(self._entries.values())

    def get(self, id: int) -> SemanticEntry | None:
        return self._entries.get(id)

    def search(
        self, subject: SemanticKey, vector: Floats, *, now: float, nearest: int, floor: float, guarded: bool = True
    ) -> CandidateSearch:
        """Return the best-scoring candidate among the near entries that no guard refuses."""
        group = self._groups.get(subject.digest)
        if group is None:
            return CandidateSearch(None)
        best: CacheCandidate | None = None
        reason = ""
        for id, cosine in group.search(vector, nearest):
            if cosine < floor or (best is not None and best.entry.question == subject.question):
                break
            entry = self._entries[id]
            if entry.expires <= now:
                continue
            refusal = refusal_reason(subject.question, entry.question) if guarded else None
            if refusal is not None:
                reason = reason or refusal
                continue
            candidate = CacheCandidate(entry, cosine, score(subject.question, entry.question, cosine))
            if best is None or candidate.score > best.score or entry.question == subject.question:
                best = candidate  # the same text needs no verifier
        return CandidateSearch(best, "" if best is not None else reason)

    def used(self, entry: SemanticEntry) -> None:
        entry.hits += 1
        if entry.id in self._entries:
            self._entries.move_to_end(entry.id)

    def add(
        self, subject: SemanticKey, vector: Floats, answer: StoredAnswer, *, now: float
    ) -> tuple[SemanticEntry | None, list[int]]:
        """Add an entry. Returns it, or None if it exceeds the bounds by itself, and the ids of evicted entries."""
        kept = frozenset(subject.tags)
        ttl = min([self._ttl_s, *(self._tag_ttl_s[tag] for tag in kept if tag in self._tag_ttl_s)])
        entry = SemanticEntry(
            self._next, subject.digest, subject.question, answer, kept, now, now + ttl, evidence=Evidence()
        )
        if self._size(entry, vector) > self.config.tenant_bytes:
            return None, []
        self._next += 1
        return entry, self._put(entry, vector)

    def restore(self, entry: SemanticEntry, vector: Floats) -> list[int]:
        """Restore an entry from the database, unless it does not fit; return the ids of evicted entries."""
        group = self._groups.get(entry.digest)
        if entry.id in self._entries or self._size(entry, vector) > self.config.tenant_bytes:
            return []
        if group is not None and group.width != len(vector):
            return []
        self._next = max(self._next, entry.id + 1)
        self.thresholds.remember(entry.evidence)
        return self._put(entry, vector)

    def skip_ids(self, last: int) -> None:
        """Use only ids after this one: the database has entries that were not loaded."""
        self._next = max(self._next, last + 1)

    def _put(self, entry: SemanticEntry, vector: Floats) -> list[int]:
        size = self._size(entry, vector)
        gone: list[int] = []
        while self._entries and (len(self) >= self.config.entries or self.nbytes + size > self.config.tenant_bytes):
            oldest = next(iter(self._entries))
            self.remove(oldest)
            gone.append(oldest)
        self.evicted += len(gone)
        group = self._groups.get(entry.digest)
        if group is None:
            group = GrowingVectors(len(vector), kind=self.config.vectors, exact=self._exact)
            self._groups[entry.digest] = group
        group.add(entry.id, vector)
        self._entries[entry.id] = entry
        self._sizes[entry.id] = size
        self.nbytes += size
        for tag in entry.tags:
            self._tagged.setdefault(tag, set()).add(entry.id)
        return gone

    def _size(self, entry: SemanticEntry, vector: Floats) -> int:
        each = 4 if self.config.vectors == "float32" else 1
        return entry.nbytes + each * len(vector) + _OVERHEAD_BYTES + sum(map(len, entry.tags))

    def remove_oldest(self) -> int | None:
        """Evict the least recently used entry; return its id, or None if there is none."""
        id = next(iter(self._entries), None)
        if id is not None:
            self.remove(id)
            self.evicted += 1
        return id

    def remove(self, id: int) -> bool:
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        group = self._groups[entry.digest]
        group.remove(id)
        if not len(group):
            del self._groups[entry.digest]
        self.nbytes -= self._sizes.pop(id)
        for tag in entry.tags:
            self._tagged[tag].discard(id)
            if not self._tagged[tag]:
                del self._tagged[tag]
        return True

    def remove_tags(self, tags: Collection[str]) -> list[int]:
        """Remove all entries with one of the tags; return their ids."""
        ids = sorted({id for tag in tags for id in self._tagged.get(tag, ())})
        for id in ids:
            self.remove(id)
        return ids

    def clear(self) -> list[int]:
        """Remove all entries; the learned prior stays."""
        ids = list(self._entries)
        for id in ids:
            self.remove(id)
        return ids

    def sweep(self, now: float) -> list[int]:
        """Remove all expired entries; return their ids."""
        ids = [entry.id for entry in self if entry.expires <= now]
        for id in ids:
            self.remove(id)
        return ids
