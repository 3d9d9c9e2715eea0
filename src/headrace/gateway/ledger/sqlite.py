"""The ledger in the server's sqlite file: the default, for one gateway.

Each batch is one transaction: charges, the daily and budget sums they change, and the alerts that follow. A charge that
is already stored changes nothing. Old charges are deleted; the sums are kept separately and do not change.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Container, Sequence
from typing import Final

from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import Database
from headrace.gateway.ledger.ledger_records import BudgetScope, DayKey, DaySum, LedgerCharge, scopes_in, sums_of
from headrace.gateway.ledger.ledger_sql import charge_row, sources_statement, sums_statement
from headrace.gateway.ledger.ledger_store import (
    BudgetAlert,
    BudgetReading,
    FindBudget,
    LeaseRenewal,
    LeaseRequest,
    LedgerBatch,
    SumRow,
    UsageQuery,
    WriteResult,
    alerts_due,
)

log: Final = logging.getLogger(__name__)

SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS ledger_charges (
        id TEXT PRIMARY KEY,  -- the exchange's
        day TEXT NOT NULL,  -- of its reservation: the period it belongs to
        at INTEGER NOT NULL,  -- seconds since 1970
        tenant TEXT NOT NULL,
        key TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        model TEXT NOT NULL,
        variant TEXT NOT NULL,
        surface TEXT NOT NULL,
        ended TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        machine_us INTEGER NOT NULL,
        micros INTEGER NOT NULL,
        saved TEXT NOT NULL  -- JSON: micros by what saved them
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS ledger_charges_by_day ON ledger_charges (day)",
    """
    CREATE TABLE IF NOT EXISTS ledger_days (
        day TEXT NOT NULL,
        tenant TEXT NOT NULL,
        key TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        model TEXT NOT NULL,
        variant TEXT NOT NULL,
        surface TEXT NOT NULL,
        source TEXT NOT NULL,  -- empty: what was charged; else what saved these micros
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        machine_us INTEGER NOT NULL,
        micros INTEGER NOT NULL,
        PRIMARY KEY (day, tenant, key, endpoint, model, variant, surface, source)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS ledger_periods (
        tenant TEXT NOT NULL,
        endpoint TEXT NOT NULL,  -- empty: all of them
        period TEXT NOT NULL,  -- a day or a month
        spent INTEGER NOT NULL,
        PRIMARY KEY (tenant, endpoint, period)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS ledger_alerts (
        tenant TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        period TEXT NOT NULL,
        percent INTEGER NOT NULL,
        budget INTEGER NOT NULL,  -- micros
        spent INTEGER NOT NULL,
        at INTEGER NOT NULL,
        sent INTEGER,  -- NULL: not yet; 1: taken by the webhook; 0: given up
        PRIMARY KEY (tenant, endpoint, period, percent)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS ledger_alerts_to_send ON ledger_alerts (at) WHERE sent IS NULL",
)
_PRUNED: Final = 1000  # charges deleted per transaction
_CHUNK: Final = 500  # rows per statement; older sqlite versions take 999 values
_KNOWN: Final = "SELECT id FROM ledger_charges WHERE id IN ({})"
_CHARGE: Final = f"INSERT INTO ledger_charges VALUES ({', '.join('?' * 16)})"
_SUMS: Final = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "machine_us", "micros")
_DAY: Final = f"INSERT INTO ledger_days VALUES ({', '.join('?' * 14)}) ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in _SUMS
)
_PERIOD: Final = (
    "INSERT INTO ledger_periods VALUES (?, ?, ?, ?) "
    "ON CONFLICT (tenant, endpoint, period) DO UPDATE SET spent = spent + excluded.spent RETURNING spent"
)
_SPENT: Final = "SELECT spent FROM ledger_periods WHERE tenant = ? AND endpoint = ? AND period = ?"
_ALERT: Final = "INSERT INTO ledger_alerts VALUES (?, ?, ?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING"


class SqliteLedgerStore:
    shared = False

    def __init__(self, db: Database) -> None:
        self._db = db
        self._version = 0  # of the latest reading; changes in the database's thread
        self._ready = False
        self._tables = asyncio.Lock()

    async def open(self, run: str, previous: str) -> None:
        """Create the tables; if the disk fails, retry on first use."""
        try:
            await self._make_tables()
        except ApiError as error:
            log.error("cannot create the ledger's tables yet: %s", error)

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult:
        await self._make_tables()
        return await self._db.run(lambda connection: self._write(connection, batch, watch, int(now)))

    async def lease(self, requests: Sequence[LeaseRequest]) -> dict[BudgetScope, BudgetReading]:
        """Lease everything that is left: only this process spends."""
        await self._make_tables()

        def read(connection: sqlite3.Connection) -> dict[BudgetScope, BudgetReading]:
            self._version += 1
            return {each.scope: BudgetReading(_spent(connection, each.scope), self._version) for each in requests}

        return await self._db.run(read)

    async def renew(self) -> LeaseRenewal:
        return LeaseRenewal()

    async def end_leases(self, run: str) -> None: ...

    async def prune(self, before: str) -> int:
        await self._make_tables()

        def prune(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "DELETE FROM ledger_charges WHERE id IN (SELECT id FROM ledger_charges WHERE day < ? LIMIT ?)",
                (before, _PRUNED),
            ).rowcount

        return await self._db.run(prune)

    async def next_alert(self) -> BudgetAlert | None:
        await self._make_tables()

        def find(connection: sqlite3.Connection) -> BudgetAlert | None:
            row = connection.execute(
                "SELECT tenant, endpoint, period, percent, budget, spent, at FROM ledger_alerts "
                "WHERE sent IS NULL ORDER BY at, tenant, endpoint, period, percent LIMIT 1"
            ).fetchone()
            return None if row is None else BudgetAlert(BudgetScope(*row[:3]), *row[3:])

        return await self._db.run(find)

    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None:
        values = (int(sent), *alert.scope, alert.percent)
        await self._db.run(
            lambda connection: connection.execute(
                "UPDATE ledger_alerts SET sent = ? WHERE tenant = ? AND endpoint = ? AND period = ? AND percent = ?",
                values,
            )
        )

    async def sums(self, query: UsageQuery) -> AsyncIterator[list[SumRow]]:
        """Read on a separate read-only connection, so that a slow reader blocks no one."""
        await self._make_tables()
        path = await self._db.run(lambda connection: connection.execute("PRAGMA database_list").fetchone()[2])
        connection = await asyncio.to_thread(_reader, path)
        try:
            cursor = await asyncio.to_thread(connection.execute, *sums_statement(query, "?"))
            while rows := await asyncio.to_thread(cursor.fetchmany, _CHUNK):
                yield [(DayKey(*row[:8]), DaySum(*row[8:])) for row in rows]
        finally:
            connection.interrupt()  # a cancelled statement may still be running
            await asyncio.to_thread(connection.close)

    async def sources(self, query: UsageQuery) -> list[str]:
        await self._make_tables()

        def find(connection: sqlite3.Connection) -> list[str]:
            return [source for (source,) in connection.execute(*sources_statement(query, "?"))]

        return await self._db.run(find)

    async def tend(self, running: Container[str], day: str) -> list[LedgerCharge]:
        """Take over no requests: only this process writes the ledger."""
        return []

    async def close(self) -> None:
        """The owner of the database closes it."""

    def _write(self, connection: sqlite3.Connection, batch: LedgerBatch, watch: FindBudget, now: int) -> WriteResult:
        known = _known(connection, [charge.id for charge in batch.charges])
        charges = [charge for charge in batch.charges if charge.id not in known]
        connection.executemany(_CHARGE, map(charge_row, charges))
        days, scopes = sums_of(charges)
        connection.executemany(_DAY, ((*key, *sum) for key, sum in days.items()))
        totals = {
            scope: connection.execute(_PERIOD, (*scope, spent)).fetchone()[0]
            for scope, spent in (dict.fromkeys(scopes_in(batch.charges), 0) | scopes).items()
        }
        due = list(batch.alerts)
        for scope in scopes:
            due += alerts_due(scope, watch(*scope), totals[scope], now)
        self._version += 1
        readings = {scope: BudgetReading(spent, self._version) for scope, spent in totals.items()}
        return WriteResult(frozenset(known), [alert for alert in due if _record(connection, alert)], readings)

    async def _make_tables(self) -> None:
        if not self._ready:
            async with self._tables:
                if not self._ready:
                    await self._db.run(_make_tables)
                    self._ready = True


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA:
        connection.execute(statement)


def _known(connection: sqlite3.Connection, ids: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for start in range(0, len(ids), _CHUNK):
        some = ids[start : start + _CHUNK]
        found |= {id for (id,) in connection.execute(_KNOWN.format(", ".join("?" * len(some))), some)}
    return found


def _spent(connection: sqlite3.Connection, scope: BudgetScope) -> int:
    row = connection.execute(_SPENT, scope).fetchone()
    return 0 if row is None else row[0]


def _record(connection: sqlite3.Connection, alert: BudgetAlert) -> bool:
    """Record an alert. Return False if it is already recorded."""
    values = (*alert.scope, alert.percent, alert.limit, alert.spent, alert.at)
    return connection.execute(_ALERT, values).rowcount == 1


def _reader(path: str) -> sqlite3.Connection:
    """Open a read-only connection, used by one thread at a time but not always the same."""
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA query_only = ON")
    return connection
