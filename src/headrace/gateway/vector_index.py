"""Searches the nearest vectors: exactly with numpy, and beyond a size with usearch's graph if it is installed.

Owns the vectors of one group of entries that are searched together. Vectors have unit length, so that a product is a
cosine. Knows entry numbers only. A group belongs to one tenant; nothing here takes two.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
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
# How many candidates a graph keeps while it searches: more of them find more of the nearest, and take longer.
Recall = Literal["fast", "balanced", "high", "exact"]
EXPANSION: Final[dict[Recall, int]] = {"fast": 32, "balanced": 128, "high": 512}
_EXPANSION: Final = EXPANSION["balanced"]
_WIDEST: Final = 16  # times the count that a graph is searched for, before the rest is compared one by one


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

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    def search_among(self, vector: Floats, count: int, ids: Sequence[int]) -> Neighbours:
        """Search only the vectors with these ids; unknown ids are skipped."""
        places = np.array([self._places[id] for id in ids if id in self._places], dtype=np.int64)
        return _nearest(self._rows_at(places) @ vector, self._ids[places], count)

    def _rows_at(self, places: NDArray[np.int64]) -> Floats:
        rows = self._rows[places].astype(np.float32)
        return rows if self.kind == "float32" else rows / np.float32(_STEPS)

    def search(self, vector: Floats, count: int) -> Neighbours:
        size = len(self._places)
        if not size or count < 1:
            return []
        return _nearest(self._cosines(vector, size), self._ids[:size], count)

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


def _nearest(cosines: Floats, ids: NDArray[np.int64], count: int) -> Neighbours:
    """Return the `count` nearest by cosine, then by age, so that the order does not depend on row positions."""
    if count < 1 or not len(cosines):
        return []
    count = min(count, len(cosines))
    nearest = np.argpartition(-cosines, count - 1)[:count] if count < len(cosines) else np.arange(len(cosines))
    order = nearest[np.lexsort((ids[nearest], -cosines[nearest]))]
    return [(int(ids[place]), float(cosines[place])) for place in order]


class GraphVectors:
    """usearch's graph: nearly exact, with search times that hardly grow with its size."""

    def __init__(self, width: int, kind: VectorFormat, index: type[Any], *, file: Path | None = None) -> None:
        """`file`: a graph that `save` wrote, which knows its width. ValueError if it cannot be read."""
        self._index = index(
            ndim=width,
            metric="cos",
            dtype="f32" if kind == "float32" else "i8",
            expansion_search=_EXPANSION,
        )
        if file is not None:
            try:
                self._index.load(str(file))
            except Exception as error:  # usearch raises RuntimeError and others
                raise ValueError(f"no graph of vectors: {error}") from None
        self.width = width if file is None else int(self._index.ndim)

    def save(self, file: Path) -> None:
        self._index.save(str(file))

    @property
    def nbytes(self) -> int:
        return int(self._index.memory_usage)

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.asarray(self._index.keys, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, id: int, vector: Floats) -> None:
        self._index.add(id, vector)

    def add_all(self, ids: NDArray[np.int64], vectors: Floats) -> None:
        self._index.add(ids.astype(np.uint64), vectors)

    def remove(self, id: int) -> None:
        self._index.remove(id)

    def search_among(
        self, vector: Floats, count: int, ids: Sequence[int], *, expansion: int = _EXPANSION
    ) -> Neighbours:
        """Search only the vectors with these ids: the nearest of all first, and if too few of those are among them,
        each of them."""
        wanted = set(ids)
        if len(wanted) * _WIDEST >= len(self._index):
            wide = self.search(vector, min(count * _WIDEST, len(self._index)), expansion=expansion)
            found = [each for each in wide if each[0] in wanted][:count]
            if len(found) == count:
                return found
        return self.search_exactly(vector, count, np.array(sorted(wanted), dtype=np.int64))

    def search_exactly(self, vector: Floats, count: int, ids: NDArray[np.int64]) -> Neighbours:
        """Compare with each of these ids' vectors; unknown ids are skipped."""
        best: Neighbours = []
        for start in range(0, len(ids), _CHUNK):
            keys = ids[start : start + _CHUNK].astype(np.uint64)
            known = keys[np.asarray(self._index.contains(keys))]
            if len(known):
                rows = np.asarray(self._index.get(known, dtype="f32"), dtype=np.float32).reshape(len(known), -1)
                cosines = (rows @ vector) / np.maximum(np.linalg.norm(rows, axis=1), 1e-12)
                best += _nearest(cosines, known.astype(np.int64), count)
        return sorted(best, key=lambda each: (-each[1], each[0]))[:count]

    def search(self, vector: Floats, count: int, *, expansion: int = _EXPANSION) -> Neighbours:
        if not len(self._index) or count < 1:
            return []
        self._index.expansion_search = max(expansion, count)
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

    def __init__(
        self, width: int, *, kind: VectorFormat = "float32", exact: int = EXACT, graph: GraphVectors | None = None
    ) -> None:
        """`graph`: vectors to begin with."""
        self.width = width
        self._kind: VectorFormat = kind
        self._exact_most = exact
        self._vectors: ExactVectors | GraphVectors = ExactVectors(width, kind) if graph is None else graph

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def approximate(self) -> bool:
        return isinstance(self._vectors, GraphVectors)

    @property
    def graph(self) -> GraphVectors | None:
        return self._vectors if isinstance(self._vectors, GraphVectors) else None

    @property
    def nbytes(self) -> int:
        return self._vectors.nbytes

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._vectors.ids

    def add(self, id: int, vector: Floats) -> None:
        vectors = self._vectors
        if isinstance(vectors, ExactVectors) and len(vectors) == self._exact_most:
            self._vectors = vectors = self._graph(vectors)
        vectors.add(id, vector)

    def add_all(self, ids: NDArray[np.int64], rows: Floats) -> None:
        """Add many vectors, at once to a graph."""
        vectors = self._vectors
        if isinstance(vectors, ExactVectors) and len(vectors) + len(ids) > self._exact_most:
            self._vectors = vectors = self._graph(vectors)
        if isinstance(vectors, GraphVectors):
            vectors.add_all(ids, rows)
        else:
            for id, row in zip(ids.tolist(), rows, strict=True):
                vectors.add(id, row)

    def remove(self, id: int) -> None:
        self._vectors.remove(id)

    def search(self, vector: Floats, count: int) -> Neighbours:
        return self._vectors.search(vector, count)

    def search_with(
        self, vector: Floats, count: int, *, recall: Recall, among: Sequence[int] | None = None
    ) -> Neighbours:
        """`recall` trades speed for more of the nearest, once there is a graph. `among`: only these ids. "exact"
        compares with each vector."""
        vectors = self._vectors
        if isinstance(vectors, ExactVectors):
            return vectors.search(vector, count) if among is None else vectors.search_among(vector, count, among)
        if recall == "exact":
            return vectors.search_exactly(vector, count, vectors.ids if among is None else np.array(among))
        if among is not None:
            return vectors.search_among(vector, count, among, expansion=EXPANSION[recall])
        return vectors.search(vector, count, expansion=EXPANSION[recall])

    def _graph(self, vectors: ExactVectors) -> ExactVectors | GraphVectors:
        index = usearch_index()
        if index is None:
            log.warning(
                "more than %d vectors are compared one by one: the extra 'vector' (usearch) is missing",
                self._exact_most,
            )
            return vectors
        graph = GraphVectors(vectors.width, self._kind, index)
        graph.add_all(*vectors.items())
        return graph
