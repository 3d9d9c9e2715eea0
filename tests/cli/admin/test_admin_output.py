"""Amounts in tables of `headrace admin`: in the currency, with the digits that matter, and their totals."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.admin.admin_output import _amounts, print_budgets, print_usage  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("micros", "shown"),
    [
        ([], []),
        ([0], ["0.00"]),
        ([1_234_567_890, 0], ["1,234.57", "0.00"]),
        ([12_300_000, 4_560], ["12.3000", "0.0046"]),
        ([123, 20_000_000], ["0.000123", "20.000000"]),
        ([-1_500_000], ["-1.50"]),
    ],
)
def test_the_smallest_amount_of_a_column_decides_its_digits(micros: list[int], shown: list[str]) -> None:
    assert _amounts(micros) == shown


def usage_row(tenant: str, micros: int, saved: int) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "requests": 1200,
        "input_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "machine_seconds": "1.250000",
        "micros": micros,
        "saved": {"exact": {"requests": 1, "micros": saved}, "prefix": {"requests": 2, "micros": 500_000}},
    }


def test_usage_ends_with_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [usage_row("red [bold]", 1_500_000, 250_000), usage_row("blue", 2_000_000, 0)]
    print_usage({"by": ["tenant"], "currency": "EUR", "rows": rows})
    heading, red, blue, total = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert heading == "tenant requests input cached output seconds cost (EUR) saved".split()
    assert red == "red [bold] 1,200 10 4 5 1.2 1.50 0.75".split()
    assert blue == "blue 1,200 10 4 5 1.2 2.00 0.50".split()
    assert total == "total 2,400 20 8 10 2.5 3.50 1.25".split()


def test_usage_without_groups_has_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_usage({"by": [], "currency": "", "rows": [usage_row("", 1_000_000, 0)]})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["requests", "1,200"]


def test_budgets_name_the_currency_of_their_amounts(capsys: pytest.CaptureFixture[str]) -> None:
    line = {
        "tenant": "red",
        "period": "2026-11",
        "endpoint": "",
        "limit_micros": 5_000_000,
        "spent_micros": 4_000_000,
        "reserved_micros": 250_000,
        "left_micros": 750_000,
        "renews_at": 1_796_083_200,
    }
    answer = {"currency": "USD", "data": [line], "has_more": False}
    print_budgets(answer, as_json=False)
    heading, row = capsys.readouterr().out.splitlines()
    assert "limit (USD)" in heading
    assert row.split() == "red 2026-11 all 5.00 4.00 0.25 0.75 2026-12-01 00:00:00".split()


def test_numbers_are_never_broken_however_long_the_names_are(capsys: pytest.CaptureFixture[str]) -> None:
    by = ["day", "tenant", "key", "endpoint", "model", "variant", "surface"]
    row = usage_row("red", 123_456_789_012, 0) | {name: name * 9 for name in by} | {"input_tokens": 9_876_543_210}
    print_usage({"by": by, "currency": "EUR", "rows": [row]})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "9,876,543,210" in out
    assert "123,456.79" in out
