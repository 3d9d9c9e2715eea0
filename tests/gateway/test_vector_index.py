"""The nearest vectors are found, removed ones are not, and beyond a bound another index takes over."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.gateway.vector_index import (
    ExactVectors,
    GraphVectors,
    GrowingVectors,
    VectorFormat,
    unit,
    usearch_index,
)

WIDTH = 32


def vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(("kind", "close"), [("float32", 1e-6), ("int8", 0.02)])
def test_the_nearest_come_first_with_their_cosines(kind: VectorFormat, close: float) -> None:
    rows = vectors(500)
    index = ExactVectors(WIDTH, kind)
    for id, row in enumerate(rows, start=100):
        index.add(id, row)
    query = unit(rows[7] + 0.1 * rows[8])
    found = index.search(query, 5)
    wanted = np.argsort(-(rows @ query))[:5]
    assert found[0][0] == 107
    assert [cosine for _, cosine in found] == pytest.approx((rows @ query)[wanted], abs=close)
    assert [cosine for _, cosine in found] == sorted((cosine for _, cosine in found), reverse=True)
    assert len(index.search(query, 1000)) == 500


def test_a_removed_vector_is_not_found_and_the_others_are() -> None:
    rows = vectors(40)
    index = ExactVectors(WIDTH)
    for id, row in enumerate(rows):
        index.add(id, row)
    for id in (0, 39, 17, 5):
        index.remove(id)
    assert len(index) == 36
    for id, row in enumerate(rows):
        (nearest, _), *_ = index.search(row, 1)
        assert (nearest == id) == (id not in (0, 39, 17, 5))
    index.add(17, rows[17])
    assert index.search(rows[17], 1)[0][0] == 17


def test_equal_cosines_come_by_age_wherever_their_rows_stand() -> None:
    row = vectors(1)[0]
    index = ExactVectors(WIDTH)
    for id in (3, 1, 2):
        index.add(id, row)
    index.remove(3)
    assert [id for id, _ in index.search(row, 2)] == [1, 2]


def test_a_vector_is_added_once_and_an_empty_index_finds_nothing() -> None:
    index = ExactVectors(WIDTH)
    row = vectors(1)[0]
    assert index.search(row, 3) == []
    index.add(1, row)
    with pytest.raises(ValueError, match="already"):
        index.add(1, row)
    assert index.search(row, 0) == []


def test_a_vector_without_direction_is_refused() -> None:
    for values in (np.zeros(4), np.array([np.nan, 1.0]), np.array([np.inf, 1.0])):
        with pytest.raises(ValueError, match="direction"):
            unit(values.astype(np.float32))


class FakeGraph:
    """usearch's index, as far as it is used here."""

    def __init__(self, *, ndim: int, metric: str, dtype: str, expansion_search: int) -> None:
        assert (ndim, metric, dtype) == (WIDTH, "cos", "f32")
        self.rows: dict[int, NDArray[np.float32]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, keys: Any, rows: NDArray[np.float32]) -> None:
        for place, row in enumerate(np.atleast_2d(rows)):
            self.rows[int(np.atleast_1d(keys)[place])] = row

    def remove(self, key: int) -> None:
        del self.rows[key]

    def search(self, vector: NDArray[np.float32], count: int) -> Any:
        found = sorted((1.0 - float(row @ vector), key) for key, row in self.rows.items())[:count]
        return SimpleNamespace(keys=[key for _, key in found], distances=[distance for distance, _ in found])


def grown(count: int) -> tuple[GrowingVectors, NDArray[np.float32]]:
    rows = vectors(count)
    index = GrowingVectors(WIDTH, exact=10)
    for id, row in enumerate(rows):
        index.add(id, row)
    return index, rows


def test_beyond_the_bound_the_graph_takes_over_with_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("usearch.index")
    module.__dict__["Index"] = FakeGraph
    monkeypatch.setitem(sys.modules, "usearch", ModuleType("usearch"))
    monkeypatch.setitem(sys.modules, "usearch.index", module)
    assert not grown(10)[0].approximate
    index, rows = grown(25)
    assert index.approximate
    assert len(index) == 25
    index.remove(3)
    assert index.search(rows[20], 2)[0][0] == 20
    assert all(index.search(rows[3], 25)[place][0] != 3 for place in range(24))


def test_without_usearch_the_search_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    index, rows = grown(25)
    assert not index.approximate
    assert index.search(rows[20], 1)[0][0] == 20


def test_usearch_itself_finds_what_the_exact_search_finds() -> None:
    pytest.importorskip("usearch.index", reason="the extra 'vector' is not installed")
    index, rows = grown(200)
    assert index.approximate
    index.remove(0)
    exact = ExactVectors(WIDTH)
    for id, row in enumerate(rows[1:], start=1):
        exact.add(id, row)
    for row in rows[::20]:
        found, wanted = index.search(row, 3), exact.search(row, 3)
        assert [id for id, _ in found] == [id for id, _ in wanted]
        assert [cosine for _, cosine in found] == pytest.approx([cosine for _, cosine in wanted], abs=1e-3)


def graph_of(rows: NDArray[np.float32], kind: VectorFormat = "float32") -> GrowingVectors:
    pytest.importorskip("usearch")
    index = GrowingVectors(WIDTH, kind=kind, exact=10)
    index.add_all(np.arange(len(rows)), rows)
    assert index.approximate
    return index


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_search_among_some_finds_only_these(kind: VectorFormat) -> None:
    rows = vectors(3000)
    exact = GrowingVectors(WIDTH, kind=kind)
    exact.add_all(np.arange(len(rows)), rows)
    some = [*range(0, 3000, 7)]
    for among in (some, some[:3], [2999, 5000]):
        wanted = exact.search_with(rows[1], 5, recall="high", among=among)
        found = graph_of(rows, kind).search_with(rows[1], 5, recall="high", among=among)
        assert {id for id, _ in wanted} <= set(among)
        assert [id for id, _ in found] == [id for id, _ in wanted]


def test_more_recall_finds_more_of_the_nearest_and_exact_finds_all() -> None:
    rows = vectors(4000)
    index = graph_of(rows)
    found = {"fast": 0, "high": 0, "exact": 0}
    for query in vectors(30, seed=1):
        nearest = set(np.argsort(-(rows @ query))[:10].tolist())
        for recall in ("fast", "high", "exact"):
            found[recall] += len(nearest & {id for id, _ in index.search_with(query, 10, recall=recall)})
    assert found["exact"] == 300
    assert found["fast"] <= found["high"]
    assert found["high"] >= 290


def test_a_saved_graph_is_the_same_after_a_restart(tmp_path: Path) -> None:
    rows = vectors(500)
    index = graph_of(rows)
    assert index.graph is not None
    index.graph.save(tmp_path / "graph")
    made = usearch_index()
    assert made is not None
    loaded = GraphVectors(WIDTH, "float32", made, file=tmp_path / "graph")
    again = GrowingVectors(WIDTH, graph=loaded)
    assert sorted(again.ids.tolist()) == [*range(500)]
    assert again.search(rows[3], 4) == index.search(rows[3], 4)
    (tmp_path / "graph").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="no graph"):
        GraphVectors(WIDTH, "float32", made, file=tmp_path / "graph")
