"""The loads of the server benchmark run against a real server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import Server

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["c1", "prefix"])
def test_a_load_is_measured(name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (PROGRAMS, PROGRAMS / "core", PROGRAMS / "serve"):
        monkeypatch.syspath_prepend(str(folder))
    import loads

    (load,) = [each for each in loads.LOADS if each.name == name]
    found = loads.measure(load, server.url, (), seed=1, quick=True)
    assert found
    assert all(value > 0 for value in found.values())
    for module in ("loads", "places"):  # other programs have modules of these names
        monkeypatch.delitem(sys.modules, module)
