"""The documented power of the gate is what the tests have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.gate_power import power_of_drop, power_of_ratio

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "gate-a-variant.md").read_text(encoding="utf-8")
LEVEL = 0.05 / 10  # of the smallest p-value among ten


def documented(begin: str) -> list[float]:
    [row] = re.findall(rf"^\| {re.escape(begin)} .*$", PAGE, re.MULTILINE)
    return [float(each) / 100.0 for each in re.findall(r"(\d+) %", row)]


@pytest.mark.parametrize(("row", "drop"), [("5 points", 0.05), ("10 points", 0.1), ("20 points", 0.2)])
def test_drops(row: str, drop: float) -> None:
    counts = (50, 100, 200, 500)
    found = [power_of_drop(drop, count, margin=0.02, level=LEVEL, trials=300, seed=1) for count in counts]
    assert found == pytest.approx(documented(row)[:4], abs=0.09)


@pytest.mark.parametrize(("row", "ratio"), [("1.25 times", 1.25), ("1.3 times", 1.3), ("1.4 times", 1.4)])
def test_ratios(row: str, ratio: float) -> None:
    counts = (20, 50, 100, 200)
    found = [power_of_ratio(ratio, count, limit=1.2, level=LEVEL, trials=300, seed=1) for count in counts]
    assert found == pytest.approx(documented(row), abs=0.09)
