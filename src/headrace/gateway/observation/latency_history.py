"""LatencyHistory: the sums of each hour and the minutes of objectives, in the server's storage.

What was counted since the last minute is merged into its hour, so percentiles of any span of hours are as right as
those of a minute. Days and bytes are bounded. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.observe.latency.latency_book import LatencyBook, Row, Rows, Slice
from headrace.observe.slo.objectives import Objectives, StoredSlot

log: Final = logging.getLogger(__name__)

HOUR: Final = 3600
_DAY: Final = 86_400
_MINUTES_S: Final = 4 * _DAY  # older slots of objectives are put together by the hour


class HistoryHour(NamedTuple):
    hour: int  # when it began, in seconds since 1970
    slice: Slice
    row: Row


class LatencyHistory:
    def __init__(
        self,
        database: Database,
        book: LatencyBook,
        objectives: Objectives,
        *,
        days: int = 35,
        total_bytes: int = 256 * 1024**2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._book = book
        self._objectives = objectives
        self._days = days
        self._bytes = total_bytes
        self._clock = clock
        self._waiting: dict[tuple[str, str, int], StoredSlot] = {}  # to be stored
        self._stored: frozenset[StoredSlot] = frozenset()  # the last that were
        self._flushed_at = clock()
        self._swept_hour = 0

    async def restore(self) -> None:
        """Read what objectives need of the time before this process. ApiError while storage does not work."""
        since = int(self._clock()) - 3 * _DAY

        def read(connection: sqlite3.Connection) -> list[StoredSlot]:
            found = connection.execute(
                "SELECT slo, objective, began, good, total FROM objective_slots WHERE began >= ? ORDER BY began",
                (since,),
            )
            return [StoredSlot(*each) for each in found]

        self._objectives.restore(await self._database.run(read))

    async def flush(self) -> None:
        """Store what was counted since the last call. Where storage fails, the next call stores it."""
        now = self._clock()
        # Of an hour that ended in between, to the side that has most of the time.
        hour = int((self._flushed_at + now) / 2) // HOUR * HOUR
        rows = self._book.take()
        self._waiting |= {each[:3]: each for each in self._objectives.take_slots() if each not in self._stored}
        must_sweep = hour != self._swept_hour
        if not rows and not self._waiting:
            return
        slots = list(self._waiting.values())
        try:
            await self._database.run(lambda connection: self._store(connection, hour, rows, slots, sweep=must_sweep))
        except ApiError as error:
            self._book.put_back(rows)
            log.warning("latencies were not stored: %s", error)
            return
        self._flushed_at, self._swept_hour = now, hour
        self._waiting, self._stored = {}, frozenset(slots)

    def _store(
        self, connection: sqlite3.Connection, hour: int, rows: Rows, slots: list[StoredSlot], *, sweep: bool
    ) -> None:
        for slice, row in rows.items():
            name = _encode(slice)
            found = connection.execute(
                "SELECT sums FROM latency_hours WHERE hour = ? AND slice = ?", (hour, name)
            ).fetchone()
            sums = Row() if found is None else unpacked(found[0])
            sums.merge(row)
            blob = packed(sums)
            connection.execute(
                "INSERT INTO latency_hours (hour, slice, bytes, sums) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (hour, slice) DO UPDATE SET bytes = excluded.bytes, sums = excluded.sums",
                (hour, name, len(blob) + len(name), blob),
            )
        connection.executemany(
            "INSERT INTO objective_slots (slo, objective, began, good, total) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (slo, objective, began) DO UPDATE SET good = excluded.good, total = excluded.total",
            slots,
        )
        if sweep:
            self._sweep(connection, hour)

    def _sweep(self, connection: sqlite3.Connection, hour: int) -> None:
        oldest = hour - self._days * _DAY
        connection.execute("DELETE FROM latency_hours WHERE hour < ?", (oldest,))
        connection.execute("DELETE FROM objective_slots WHERE began < ?", (oldest,))
        (used,) = connection.execute("SELECT COALESCE(SUM(bytes), 0) FROM latency_hours").fetchone()
        sizes = connection.execute("SELECT hour, SUM(bytes) FROM latency_hours GROUP BY hour ORDER BY hour").fetchall()
        for first, size in sizes[:-1]:
            if used <= self._bytes:
                break
            connection.execute("DELETE FROM latency_hours WHERE hour = ?", (first,))
            used -= size
        before = hour - _MINUTES_S
        fine = connection.execute(
            "SELECT slo, objective, began - began % 3600, SUM(good), SUM(total) FROM objective_slots "
            "WHERE began < ? GROUP BY 1, 2, 3 HAVING COUNT(*) > 1",
            (before,),
        ).fetchall()
        for slo, objective, began, good, total in fine:
            connection.execute(
                "DELETE FROM objective_slots WHERE slo = ? AND objective = ? AND began >= ? AND began < ?",
                (slo, objective, began, began + HOUR),
            )
            connection.execute(
                "INSERT INTO objective_slots VALUES (?, ?, ?, ?, ?)", (slo, objective, began, good, total)
            )

    async def hours(self, first: int, last: int) -> list[HistoryHour]:
        """Return the sums of the hours that began from `first` on and before `last`, oldest first."""

        def read(connection: sqlite3.Connection) -> list[tuple[int, str, bytes]]:
            found = connection.execute(
                "SELECT hour, slice, sums FROM latency_hours WHERE hour >= ? AND hour < ? ORDER BY hour", (first, last)
            )
            return found.fetchall()

        def decode(found: list[tuple[int, str, bytes]]) -> list[HistoryHour]:
            return [HistoryHour(hour, _decode(slice), unpacked(sums)) for hour, slice, sums in found]

        return await asyncio.to_thread(decode, await self._database.run(read))

    async def objective_events(self, first: int, last: int) -> list[StoredSlot]:
        """Return good and all events of each objective by the hour, oldest first."""

        def read(connection: sqlite3.Connection) -> list[StoredSlot]:
            found = connection.execute(
                "SELECT slo, objective, began - began % 3600, SUM(good), SUM(total) FROM objective_slots "
                "WHERE began >= ? AND began < ? GROUP BY 1, 2, 3 ORDER BY 3, 1, 2",
                (first, last),
            )
            return [StoredSlot(*each) for each in found]

        return await self._database.run(read)


def _encode(slice: Slice) -> str:
    return msgspec.json.encode(slice).decode()


def _decode(text: str) -> Slice:
    return Slice(*msgspec.json.decode(text, type=list[str]))  # older ones have no profile


def packed(row: Row) -> bytes:
    return zlib.compress(msgspec.json.encode(row.pack()), 1)


def unpacked(blob: bytes) -> Row:
    return Row.unpack(msgspec.json.decode(zlib.decompress(blob)))
