"""One tenant's part of the semantic cache: its entries, their vectors, and what was learned of them.

Owns the entries with their bounds (number, bytes, time to live, tags) and the choice of a candidate: nearest
vectors, then guards, then the verifier. A namespace belongs to one tenant and has never heard of another; nothing
here takes two. It does not wait for anything: embeddings, judges and disks are the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.gateway.caches.semantic.guards import refusal_reason
from headrace.gateway.caches.semantic.semantic_entry import SemanticEntry, SemanticKey, StoredAnswer
from headrace.gateway.caches.semantic.thresholds import CELLS, Evidence, Thresholds
from headrace.gateway.caches.semantic.vector_index import EXACT, GrowingVectors, VectorFormat
from headrace.gateway.caches.semantic.verifier import score

Floats = NDArray[np.float32]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of one namespace."""

    entries: int = 20_000
    nbytes: int = 64 * 1024 * 1024  # 64 MiB of texts and vectors
    ttl_s: float = 24 * 3600.0
    tag_ttl_s: Mapping[str, float] = {}  # the shortest of an entry's tags counts
    vectors: VectorFormat = "float32"
    exact: int = EXACT


class CacheCandidate(msgspec.Struct, frozen=True):
    entry: SemanticEntry
    cosine: float
    score: float


class CandidateSearch(msgspec.Struct, frozen=True):
    """The best candidate, or why the nearest was refused; neither where nothing is near."""

    best: CacheCandidate | None
    reason: str = ""


_WITHOUT_TEXT: Final = 256 + 4 * CELLS  # bytes that an entry takes beside its texts and its vector, about


class Namespace:
    def __init__(self, thresholds: Thresholds, bounds: Bounds) -> None:
        self.thresholds = thresholds
        self.bounds = bounds
        self.nbytes = 0
        self.evicted = 0
        self._entries: OrderedDict[int, SemanticEntry] = OrderedDict()  # the least used first
        self._groups: dict[bytes, GrowingVectors] = {}  # by digest: only what has the same may answer
        self._tagged: dict[str, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SemanticEntry]:
        return iter(self._entries.values())

    def get(self, id: int) -> SemanticEntry | None:
        return self._entries.get(id)

    # Looking for

    def search(
        self, subject: SemanticKey, vector: Floats, *, now: float, nearest: int, floor: float, guarded: bool = True
    ) -> CandidateSearch:
        """The candidate that scores best among those near enough that no guard refuses."""
        group = self._groups.get(subject.digest)
        if group is None:
            return CandidateSearch(None)
        best: CacheCandidate | None = None
        reason = ""
        for id, cosine in group.search(vector, nearest):
            if cosine < floor:
                break
            entry = self._entries[id]
            if entry.expires <= now:
                continue
            why = refusal_reason(subject.question, entry.question) if guarded else None
            if why is not None:
                reason = reason or why
                continue
            found = CacheCandidate(entry, cosine, score(subject.question, entry.question, cosine))
            if best is None or found.score > best.score:
                best = found
        return CandidateSearch(best, "" if best is not None else reason)

    def used(self, entry: SemanticEntry) -> None:
        entry.hits += 1
        if entry.id in self._entries:
            self._entries.move_to_end(entry.id)

    # Keeping

    def add(
        self, subject: SemanticKey, vector: Floats, answer: StoredAnswer, *, now: float
    ) -> tuple[SemanticEntry | None, list[int]]:
        """The new entry, if there is room for one of its size at all, and the ids of those that made room."""
        kept = frozenset(subject.tags)
        ttl = min([self.bounds.ttl_s, *(self.bounds.tag_ttl_s[tag] for tag in kept if tag in self.bounds.tag_ttl_s)])
        entry = SemanticEntry(
            self._next, subject.digest, subject.question, answer, kept, now, now + ttl, evidence=Evidence()
        )
        if self._size(entry, vector) > self.bounds.nbytes or ttl <= 0:
            return None, []
        self._next += 1
        return entry, self._put(entry, vector)

    def restore(self, entry: SemanticEntry, vector: Floats) -> list[int]:
        """An entry that a database had kept, left out where it does not fit the others; the ids that made room."""
        group = self._groups.get(entry.digest)
        if entry.id in self._entries or self._size(entry, vector) > self.bounds.nbytes:
            return []
        if group is not None and group.width != len(vector):
            return []
        self._next = max(self._next, entry.id + 1)
        self.thresholds.remember(entry.evidence)
        return self._put(entry, vector)

    def skip_ids(self, last: int) -> None:
        """The next entry's id is beyond this one: a database has entries that were not loaded."""
        self._next = max(self._next, last + 1)

    def _put(self, entry: SemanticEntry, vector: Floats) -> list[int]:
        size = self._size(entry, vector)
        gone: list[int] = []
        while self._entries and (len(self) >= self.bounds.entries or self.nbytes + size > self.bounds.nbytes):
            oldest = next(iter(self._entries))
            self.remove(oldest)
            gone.append(oldest)
        self.evicted += len(gone)
        group = self._groups.get(entry.digest)
        if group is None:
            group = GrowingVectors(len(vector), kind=self.bounds.vectors, exact=self.bounds.exact)
            self._groups[entry.digest] = group
        group.add(entry.id, vector)
        self._entries[entry.id] = entry
        self._sizes[entry.id] = size
        self.nbytes += size
        for tag in entry.tags:
            self._tagged.setdefault(tag, set()).add(entry.id)
        return gone

    def _size(self, entry: SemanticEntry, vector: Floats) -> int:
        each = 4 if self.bounds.vectors == "float32" else 1
        return entry.nbytes + each * len(vector) + _WITHOUT_TEXT + sum(map(len, entry.tags))

    # Letting go

    def remove_oldest(self) -> int | None:
        """The least used entry; its id, or None where there is none."""
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
        """All entries that have one of them."""
        ids = sorted({id for tag in tags for id in self._tagged.get(tag, ())})
        for id in ids:
            self.remove(id)
        return ids

    def clear(self) -> list[int]:
        """All of it; what was learned of the tenant's entries as a whole stays."""
        ids = list(self._entries)
        for id in ids:
            self.remove(id)
        return ids

    def sweep(self, now: float) -> list[int]:
        """All that have expired."""
        ids = [entry.id for entry in self if entry.expires <= now]
        for id in ids:
            self.remove(id)
        return ids
