"""Prints responses of the admin API: as JSON, exactly as they came, or as tables of at most 100 columns.

Tables round amounts to the digits that matter; JSON and CSV have exact micros, millionths of the currency.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, cast

from rich.console import Console
from rich.table import Table

from headrace.cli.admin.admin_client import printable

_COLUMNS: Final = 100  # width of tables that are not printed on a terminal; longer cells are wrapped
_MICROS: Final = 1_000_000  # of one unit of the currency
_COUNTS: Final = ("requests", "input_tokens", "cached_tokens", "output_tokens")
_MONEY: Final = ("limit", "spent", "reserved", "left")


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(_cell, cast("list[Any]", value))) or "none"
        case dict():
            present = {name: each for name, each in cast("dict[str, Any]", value).items() if each is not None}
            return printable(json.dumps(present, ensure_ascii=False)) if present else "-"
        case float():
            return f"{value:g}"
        case _:
            return printable(str(value))


def _time(seconds: Any) -> str:
    if not isinstance(seconds, int):
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _display(name: str, value: Any) -> str:
    if name == "secrets":
        return ", ".join(
            f"…{_cell(each['last_four'])} of {_time(each['created_at'])}"
            + ("" if each["expires_at"] is None else f" until {_time(each['expires_at'])}")
            for each in value
        )
    return _time(value) if name.endswith("_at") or name in ("at", "since", "until") else _cell(value)


def _table(titles: Iterable[str], numbers: Container[str] = ()) -> Table:
    """A table whose long cells are wrapped, so that nothing is lost. `numbers`: columns that are aligned right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        is_number = title in numbers  # its digits stay together; other columns give way
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def _amounts(micros: Sequence[int]) -> list[str]:
    """Format amounts of a column in the currency, with as many decimals as the smallest needs to show two digits."""
    least = min((abs(each) for each in micros if each), default=_MICROS)
    decimals = 2 if least >= _MICROS // 10 else 4 if least >= _MICROS // 1000 else 6
    return [f"{Decimal(each) / _MICROS:,.{decimals}f}" for each in micros]


def _in_currency(title: str, answer: Mapping[str, Any]) -> str:
    return f"{title} ({printable(answer['currency'])})" if answer.get("currency") else title


def print_table(table: Table) -> None:
    """Print a table in the terminal's width, or 100 columns elsewhere, without spaces at the ends of lines."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
    with console.capture() as written:
        console.print(table)
    for line in written.get().splitlines():
        print(line.rstrip())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=not sys.stdout.encoding.lower().startswith("utf")))


def print_list(
    answer: Mapping[str, Any], columns: Sequence[str], *, as_json: bool, numbers: Sequence[str] = ()
) -> None:
    if as_json:
        print_json(answer)
        return
    table = _table((column.removesuffix("_at").replace("_", " ") for column in columns), numbers)
    for item in answer["data"]:
        table.add_row(*(_display(column, item.get(column)).replace("[", r"\[") for column in columns))
    print_table(table)
    if answer.get("has_more"):
        print("More entries exist. Raise --limit, or pass the last entry to --after.", file=sys.stderr)


def print_one(answer: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in answer.items():
        if name not in ("object", "secret"):
            table.add_row(name.replace("_", " "), _display(name, value).replace("[", r"\["))
    print_table(table)
    if "secret" in answer:
        print("\nThe key. It is shown only once:", file=sys.stderr)
        print(answer["secret"])


def print_usage(answer: Mapping[str, Any]) -> None:
    """Print a row for each group and their total."""
    rows: list[dict[str, Any]] = answer["rows"]
    by: list[str] = answer["by"]
    groups = [[_cell(row[name]) for name in by] for row in rows]
    counts = [[int(row[name]) for name in _COUNTS] for row in rows]
    seconds = [Decimal(row["machine_seconds"]) for row in rows]
    costs = [int(row["micros"]) for row in rows]
    saved = [sum(int(each["micros"]) for each in row["saved"].values()) for row in rows]
    if by and len(rows) > 1:
        groups.append(["total"] + [""] * (len(by) - 1))
        counts.append([sum(column) for column in zip(*counts, strict=True)])
        seconds.append(sum(seconds, Decimal()))
        costs.append(sum(costs))
        saved.append(sum(saved))
    numbers = ("requests", "input", "cached", "output", "seconds", _in_currency("cost", answer), "saved")
    table = _table((*by, *numbers), numbers)
    for group, count, second, *money in zip(groups, counts, seconds, _amounts(costs), _amounts(saved), strict=True):
        cells = [*group, *(f"{each:,}" for each in count), f"{second:,.1f}", *money]
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    print_table(table)


def print_feedback(answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a row for each group: its mean with the interval, and what the requests took and cost."""
    price = _in_currency("per 1000", answer)
    data: list[dict[str, Any]] = answer["data"]
    prices = _amounts([each["micros_per_1000_requests"] for each in data])
    units = iter(_amounts([each["micros_per_unit"] for each in data if each["micros_per_unit"] is not None]))
    lines: list[dict[str, Any]] = []
    for each, cost in zip(data, prices, strict=True):
        low, high = each["mean_low"], each["mean_high"]
        lines.append(
            {
                **each,
                "mean": f"{each['mean']:.4g}",
                "95 %": "-" if low is None else f"{low:.4g} to {high:.4g}",
                "ms": "-" if each["mean_e2e_ms"] is None else f"{each['mean_e2e_ms']:,.0f}",
                price: cost,
                "per unit": "-" if each["micros_per_unit"] is None else next(units),
            }
        )
    numbers = ("count", "mean", "95 %", "ms", price, "per unit")
    print_list(
        answer if as_json else {**answer, "data": lines}, (*answer["by"], *numbers), as_json=as_json, numbers=numbers
    )


def print_budgets(answer: Mapping[str, Any], *, as_json: bool) -> None:
    data: list[dict[str, Any]] = answer["data"]
    amounts = iter(_amounts([each[f"{name}_micros"] for each in data for name in _MONEY]))
    titles = (_in_currency(_MONEY[0], answer), *_MONEY[1:])
    lines = [
        {**each, "endpoint": each["endpoint"] or "all", **{title: next(amounts) for title in titles}} for each in data
    ]
    columns = ("tenant", "period", "endpoint", *titles, "renews_at")
    print_list(answer if as_json else {**answer, "data": lines}, columns, as_json=as_json, numbers=titles)
