"""Usage: sums by any part of what they are told apart by, as CSV and JSON, in streams."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.gateway.ledger.ledger_records import DayKey, DaySum
from headrace.gateway.ledger.ledger_store import Dimension, SumRow, UsageQuery
from headrace.gateway.ledger.usage_export import UsageRow, quotient, usage_csv, usage_json, usage_rows
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous
from tests.support.stores.ledgers import DAY, NOON, Opened, entry, ledger_in, used


async def spend(opened: Opened, id: str, tenant: str = "a", **options: Any) -> None:
    asked = {name: options.pop(name) for name in ("variant", "endpoint", "key", "counted") if name in options}
    tokens = {name: options.pop(name) for name in ("prompt", "output", "cached", "seconds") if name in options}
    await opened.ledger.reserve(entry(id, tenant, **asked), output_tokens=10)
    opened.ledger.settle(id, used(**tokens), **options)


async def several(opened: Opened, clock: Clock) -> None:
    await spend(opened, "1", cached=4)
    await spend(opened, "2", hit="exact")
    await spend(opened, "3", variant="mini@int4", instead_of="mini", route="cheap")
    await spend(opened, "4", "b", key="other", endpoint="/v1/embeddings", output=0)
    await spend(opened, "5", counted=False)  # a part of another request
    clock.now += DAY
    await spend(opened, "6", seconds=1.5)
    await opened.ledger.flush()


async def rows(opened: Opened, *by: Dimension, **options: Any) -> list[UsageRow]:
    return [row async for row in usage_rows(opened.store, UsageQuery(by=by, **options))]


def test_sums_by_any_dimension(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock(NOON)
        async with ledger_in(tmp_path, clock=clock) as opened:
            await several(opened, clock)
            a, b = await rows(opened, "tenant")
            assert (a.group, a.sum) == ({"tenant": "a"}, DaySum(4, 50, 4, 50, 1_500_000, 27 + 0 + 3 + 30 + 30))
            assert {source: (sum.requests, sum.micros) for source, sum in a.saved.items()} == {
                "prefix": (1, 3),
                "exact": (1, 30),
                "cheap": (1, 27),
            }
            assert (b.group, b.sum, b.saved) == ({"tenant": "b"}, DaySum(1, 10, 0, 0, 0, 10), {})
            split = await rows(opened, "variant", "day")
            found = [(row.group["variant"], row.group["day"], row.sum.micros) for row in split]
            assert found == [("mini", "2025-11-22", 67), ("mini", "2025-11-23", 30), ("mini@int4", "2025-11-22", 3)]
            (only,) = await rows(opened, "endpoint", tenant="b", last_day="2025-11-22")
            assert only.group == {"endpoint": "/v1/embeddings"}
            assert await rows(opened, "day", tenant="b", first_day="2025-11-23") == []
            (all_of_it,) = await rows(opened)
            assert all_of_it.sum.micros == 100

    asynchronous(test)


def test_quotients_are_whole_and_rounded_half_up() -> None:
    row = UsageRow({}, DaySum(3, 10, 0, 5, 0, 7))
    assert row.amounts()["micros_per_1000_requests"] == 2333
    assert row.amounts()["micros_per_million_tokens"] == 466_667
    assert UsageRow({}).amounts()["micros_per_1000_requests"] is None
    assert [quotient(*each) for each in ((1, 2), (-1, 2), (0, 5), (5, 0))] == [1, 0, 0, None]


async def whole(pieces: AsyncIterator[bytes]) -> str:
    return b"".join([piece async for piece in pieces]).decode()


def test_csv_has_a_column_for_each_source_and_json_the_same(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock(NOON)
        async with ledger_in(tmp_path, clock=clock) as opened:
            await several(opened, clock)
            query = UsageQuery(by=("tenant", "key"))
            lines = list(csv.DictReader(io.StringIO(await whole(usage_csv(opened.store, query)))))
            assert lines[0] == {
                "tenant": "a",
                "key": "k",
                "requests": "4",
                "input_tokens": "50",
                "cached_tokens": "4",
                "output_tokens": "50",
                "machine_seconds": "1.500000",
                "micros": "90",
                "micros_per_1000_requests": "22500",
                "micros_per_million_tokens": "900000",
                "saved_cheap_requests": "1",
                "saved_cheap_micros": "27",
                "saved_exact_requests": "1",
                "saved_exact_micros": "30",
                "saved_prefix_requests": "1",
                "saved_prefix_micros": "3",
            }
            document = json.loads(await whole(usage_json(opened.store, query)))
            assert document["by"] == ["tenant", "key"]
            assert document["rows"][0]["saved"]["exact"] == {"requests": 1, "micros": 30}
            assert [row["micros"] for row in document["rows"]] == [int(line["micros"]) for line in lines]
            empty = UsageQuery(tenant="nobody")
            assert json.loads(await whole(usage_json(opened.store, empty)))["rows"] == []
            assert len((await whole(usage_csv(opened.store, empty))).splitlines()) == 1

    asynchronous(test)


class Endless:
    """A store of so many tenants' sums, which counts how far it was read."""

    def __init__(self, tenants: int) -> None:
        self.tenants = tenants
        self.read = 0

    async def sums(self, query: UsageQuery) -> AsyncIterator[list[SumRow]]:
        for number in range(self.tenants):
            self.read = number
            key = DayKey("2025-11-22", f"tenant {number:06}", "k", "/e", "m", "v", "s", "")
            yield [(key, DaySum(1, 1, 1, 1, 1, 1))] * 2

    async def sources(self, query: UsageQuery) -> list[str]:
        return []


def test_an_export_reads_no_further_than_it_is_read(tmp_path: Path) -> None:
    async def test() -> None:
        for written in (usage_csv, usage_json):
            store: Any = Endless(1_000_000)
            pieces = written(store, UsageQuery(by=("tenant",)))
            sizes = [len(await anext(pieces)) for _ in range(3)]
            assert all(size < 100_000 for size in sizes)
            assert store.read < 10_000

    asynchronous(test)


def test_an_export_that_is_left_leaves_the_store_usable(tmp_path: Path) -> None:
    async def test() -> None:
        clock = Clock(NOON)
        async with ledger_in(tmp_path, clock=clock) as opened:
            await several(opened, clock)
            sums = opened.store.sums(UsageQuery())
            assert len(await anext(sums)) == 7
            await spend(opened, "while it is read")
            await opened.ledger.flush()
            await sums.aclose()  # type: ignore[attr-defined]
            assert (await rows(opened))[0].sum.micros == 130

    asynchronous(test)
