"""Searches the nearest vectors: exactly with numpy, and beyond a size with usearch's graph if it is installed.

Owns the vectors of one group of entries that may answer each other. Vectors have unit length, so that a product is a
cosine. Knows entry numbers only. A group belongs to one tenant; nothing here takes two.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
VectorFormat = Literal["float32", "int8"]
Neighbours = list[tuple[int, float]]  # number and cosine, nearest first

EXACT: Final = 50_000  # entries searched exactly; beyond them usearch takes over if it is installed
_CHUNK: Final = 4096  # rows of int8 that are made floats at a time: 6 MiB at a width of 384
_STEPS: Final = 127.0  # of int8, on each side of zero


class Vectors(Protocol):
    """The interface of both kinds of index."""

    def __len__(self) -> int: ...

    def add(self, id: int, vector: Floats) -> None: ...

    def remove(self, id: int) -> None: ...

    def search(self, vector: Floats, count: int) -> Neighbours: ...


def unit(vector: Floats) -> Floats:
    """Scale a vector to length 1. ValueError for one without a direction."""
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length < 1e-12:
        raise ValueError("a vector without a direction cannot be compared")
    return (vector / length).astype(np.float32)


class ExactVectors:
    """All vectors in one matrix; a search is one product of it with a vector."""

    def __init__(self, width: int, kind: VectorFormat = "float32") -> None:
        self.width = width
        self.kind: VectorFormat = kind
        self._rows = np.zeros((1, width), dtype=np.float32 if kind == "float32" else np.int8)
        self._ids = np.zeros(1, dtype=np.int64)
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._ids.nbytes

    def add(self, id: int, vector: Floats) -> None:
        if id in self._places:
            raise ValueError(f"entry {id} has a vector already")
        place = len(self._places)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._rows[place] = vector if self.kind == "float32" else np.rint(vector * _STEPS)
        self._ids[place] = id
        self._places[id] = place

    def remove(self, id: int) -> None:
        """Remove a vector; the last row takes its place."""
        place = self._places.pop(id)
        last = len(self._places)
        if place != last:
            self._rows[place] = self._rows[last]
            self._ids[place] = self._ids[last]
            self._places[int(self._ids[place])] = place

    def search(self, vector: Floats, count: int) -> Neighbours:
        size = len(self._places)
        if not size or count < 1:
            return []
        cosines = self._cosines(vector, size)
        count = min(count, size)
        nearest = np.argpartition(-cosines, count - 1)[:count] if count < size else np.arange(size)
        # By cosine, then by age, so that the order does not depend on row positions.
        order = nearest[np.lexsort((self._ids[nearest], -cosines[nearest]))]
        return [(int(self._ids[place]), float(cosines[place])) for place in order]

    def _cosines(self, vector: Floats, size: int) -> Floats:
        if self.kind == "float32":
            return self._rows[:size] @ vector
        parts = [
            self._rows[start : min(start + _CHUNK, size)].astype(np.float32) @ vector
            for start in range(0, size, _CHUNK)
        ]
        return (np.concatenate(parts) / _STEPS).astype(np.float32)

    def items(self) -> tuple[NDArray[np.int64], Floats]:
        size = len(self._places)
        rows = self._rows[:size].astype(np.float32)
        return self._ids[:size], rows if self.kind == "float32" else rows / np.float32(_STEPS)


class GraphVectors:
    """usearch's graph: nearly exact, with search times that hardly grow with its size."""

    def __init__(self, width: int, kind: VectorFormat, index: type[Any]) -> None:
        self.width = width
        self._index = index(ndim=width, metric="cos", dtype="f32" if kind == "float32" else "i8", expansion_search=128)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, id: int, vector: Floats) -> None:
        self._index.add(id, vector)

    def add_all(self, ids: NDArray[np.int64], vectors: Floats) -> None:
        self._index.add(ids.astype(np.uint64), vectors)

    def remove(self, id: int) -> None:
        self._index.remove(id)

    def search(self, vector: Floats, count: int) -> Neighbours:
        if not len(self._index) or count < 1:
            return []
        matches = self._index.search(vector, count)
        found = [
            (int(key), 1.0 - float(distance)) for key, distance in zip(matches.keys, matches.distances, strict=True)
        ]
        return sorted(found, key=lambda each: (-each[1], each[0]))


def usearch_index() -> type[Any] | None:
    """Return usearch's index class; None if the extra `vector` is not installed."""
    try:
        return importlib.import_module("usearch.index").Index
    except ImportError:
        return None


class GrowingVectors:
    """Exact up to `exact` entries, then a graph if usearch is installed; it stays a graph."""

    def __init__(self, width: int, *, kind: VectorFormat = "float32", exact: int = EXACT) -> None:
        self.width = width
        self._kind: VectorFormat = kind
        self._exact_most = exact
        self._vectors: ExactVectors | GraphVectors = ExactVectors(width, kind)

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def approximate(self) -> bool:
        return isinstance(self._vectors, GraphVectors)

    def add(self, id: int, vector: Floats) -> None:
        vectors = self._vectors
        if isinstance(vectors, ExactVectors) and len(vectors) == self._exact_most:
            self._vectors = vectors = self._graph(vectors)
        vectors.add(id, vector)

    def remove(self, id: int) -> None:
        self._vectors.remove(id)

    def search(self, vector: Floats, count: int) -> Neighbours:
        return self._vectors.search(vector, count)

    def _graph(self, vectors: ExactVectors) -> ExactVectors | GraphVectors:
        index = usearch_index()
        if index is None:
            log.warning(
                "the semantic cache compares more than %d vectors one by one: the extra 'vector' (usearch) is missing",
                self._exact_most,
            )
            return vectors
        graph = GraphVectors(vectors.width, self._kind, index)
        graph.add_all(*vectors.items())
        return graph
