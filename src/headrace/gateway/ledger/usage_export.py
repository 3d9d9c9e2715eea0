"""Exports usage as CSV or JSON, grouped by day, tenant, key, model, variant, endpoint or surface.

Streams: only one row and one chunk of the store are in memory. Amounts are whole micros; quotients are rounded half up.

    requests, tokens, what was charged, what that makes for 1,000 requests and for a million tokens, and for each cache
    and route that saved money: how many requests it served or moved, and how much they would have cost more
"""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.ledger.ledger_records import ZERO_SUM, DaySum
from headrace.gateway.ledger.ledger_store import LedgerStore, UsageQuery
from headrace.gateway.ledger.prices import format_micros

_AMOUNTS: Final = (
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "machine_seconds",
    "micros",
    "micros_per_1000_requests",
    "micros_per_million_tokens",
)
_CHUNK: Final = 64 * 1024  # 64 KiB per piece


class UsageRow(msgspec.Struct):
    group: dict[str, str]  # in the order of the query's `by`
    sum: DaySum = ZERO_SUM
    saved: dict[str, DaySum] = {}  # by source: its requests and micros

    def amounts(self) -> dict[str, Any]:
        sum = self.sum
        return {
            "requests": sum.requests,
            "input_tokens": sum.prompt_tokens,
            "cached_tokens": sum.cached_tokens,  # of the input
            "output_tokens": sum.output_tokens,
            "machine_seconds": format_micros(sum.machine_us),
            "micros": sum.micros,
            "micros_per_1000_requests": quotient(sum.micros * 1000, sum.requests),
            "micros_per_million_tokens": quotient(sum.micros * 1_000_000, sum.prompt_tokens + sum.output_tokens),
        }

    def as_json(self) -> dict[str, Any]:
        saved = {source: {"requests": sum.requests, "micros": sum.micros} for source, sum in sorted(self.saved.items())}
        return {**self.group, **self.amounts(), "saved": saved}


def quotient(amount: int, by: int) -> int | None:
    """Divide, rounded half up; None for a zero divisor."""
    return (2 * amount + by) // (2 * by) if by else None


async def usage_rows(store: LedgerStore, query: UsageQuery) -> AsyncIterator[UsageRow]:
    """Yield rows in the order of the columns they are grouped by."""
    current: UsageRow | None = None
    async for rows in store.sums(query):
        for key, sum in rows:
            group = {name: getattr(key, name) for name in query.by}
            if current is None or current.group != group:
                if current is not None:
                    yield current
                current = UsageRow(group)
            if key.source:
                current.saved[key.source] = current.saved.get(key.source, ZERO_SUM).plus(sum)
            else:
                current.sum = current.sum.plus(sum)
    if current is not None:
        yield current


async def usage_csv(store: LedgerStore, query: UsageQuery) -> AsyncIterator[bytes]:
    """A header and a line for each row. Each source of savings has two columns."""
    sources = await store.sources(query)
    header = [*query.by, *_AMOUNTS]
    for source in sources:
        header += [f"saved_{source}_requests", f"saved_{source}_micros"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(header)
    async for row in usage_rows(store, query):
        writer.writerow([*row.group.values(), *row.amounts().values(), *_columns(row, sources)])
        if buffer.tell() >= _CHUNK:
            yield _taken(buffer)
    yield _taken(buffer)


async def usage_json(store: LedgerStore, query: UsageQuery, *, currency: str = "") -> AsyncIterator[bytes]:
    """One object, {"currency": "", "by": [...], "rows": [...]}."""
    heading = msgspec.json.encode({"currency": currency, "by": query.by})
    found = [heading[:-1], b',"rows":[']
    size, first = 0, True
    async for row in usage_rows(store, query):
        encoded = msgspec.json.encode(row.as_json())
        found += [encoded] if first else [b",\n", encoded]
        first = False
        size += len(encoded)
        if size >= _CHUNK:
            yield b"".join(found)
            found, size = [], 0
    yield b"".join([*found, b"]}\n"])


def _columns(row: UsageRow, sources: Sequence[str]) -> list[int]:
    found: list[int] = []
    for source in sources:
        sum = row.saved.get(source, ZERO_SUM)
        found += [sum.requests, sum.micros]
    return found


def _taken(buffer: io.StringIO) -> bytes:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text.encode()
