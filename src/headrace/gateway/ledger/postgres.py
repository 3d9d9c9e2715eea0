"""The ledger in Postgres, for several gateways that share tenants.

Keeps charges, sums and alerts as sqlite does, and also what running requests hold of budgets. A budget holds across all
gateways, because holding is one statement that locks the budget's rows: see ledger_hold in postgres_schema.py. Each
running request has a row with its progress. When a gateway is silent for a while, another one takes over its rows and
charges them provisionally. If the gateway was alive or returns with its journal, its own charge replaces the
provisional one and every sum changes by the difference.

Every wait is bounded. A statement that takes longer ends its connection and may or may not have taken effect; all
writes can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Container, Sequence
from typing import Any, Final

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.ledger import postgres_schema as sql
from headrace.gateway.ledger.ledger_records import (
    CRASHED,
    BudgetScope,
    DayKey,
    DaySum,
    DaySums,
    LedgerCharge,
    LedgerEntry,
    ReservedCharge,
    ScopeSums,
    Settlement,
    add_charge,
    scopes_of,
)
from headrace.gateway.ledger.ledger_store import (
    DIMENSIONS,
    BudgetAlert,
    FindBudget,
    LedgerBatch,
    SumRow,
    UsageQuery,
    WriteResult,
)
from headrace.gateway.ledger.postgres_holds import HoldBatcher, HoldRequest, columns
from headrace.gateway.ledger.prices import FREE
from headrace.gateway.postgres_pool import MissingDriverError, PostgresConnection, PostgresPool

log: Final = logging.getLogger(__name__)

_WRITE_S: Final = 5.0  # timeout of a batch
_EXPORT_S: Final = 600.0  # timeout of an export, including pauses of its reader
_CLAIM_S: Final = 300.0  # how long a gateway may take to send an alert before another one tries
_WARM: Final = 3  # connections opened in advance
_CHUNK: Final = 500  # rows
_PRUNED: Final = 1000  # charges deleted per transaction
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_LOCK: Final = 0x6865616472616365  # advisory lock: only one gateway creates the tables


class SchemaError(HeadraceError):
    """The database has tables of another version."""


class _ConflictError(Exception):
    """Another gateway wrote one of these charges at the same time."""


class PostgresLedgerStore:
    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "headrace",
        wait_s: float = 0.05,  # timeout of a reservation
        connections: int = 8,
        silent_s: float = 120.0,  # after which a gateway counts as dead
        # After this long, a row of this gateway without a running request is removed. A timed-out statement that the
        # database still executed can leave such a row.
        left_s: float = 10.0,
    ) -> None:
        if not _SCHEMA.fullmatch(schema):
            raise SchemaError(f"Invalid schema '{schema}'. Use lower-case letters, digits and underscores.")
        self._schema = schema
        self._connections = PostgresPool(dsn, schema=schema, most=connections)
        self._silent = silent_s
        self._left = left_s
        self._holding = HoldBatcher(self._connections, wait_s=wait_s)
        self._run = ""
        self._ready = False

    async def open(self, run: str, previous: str) -> None:
        """Start. A database that is down is retried later. Raise MissingDriverError without asyncpg."""
        self._run = self._holding.run = run

        async def bury(connection: PostgresConnection) -> None:
            await connection.execute(sql.DEAD, previous)

        try:
            await self._prepared()
            await self._connections.run(bury, _WRITE_S)
            await self._connections.warm(_WARM, _WRITE_S)
        except (MissingDriverError, SchemaError):
            raise
        except Exception as error:
            log.error("cannot reach the ledger's database yet: %s", str(error) or type(error).__name__)

    async def _prepared(self) -> None:
        if not self._ready:
            await self._connections.run(self._prepare, _WRITE_S)
            self._ready = True

    async def _prepare(self, connection: PostgresConnection) -> None:
        version = await _version(connection)
        if version < len(sql.STEPS):
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
                await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                await connection.execute("CREATE TABLE IF NOT EXISTS ledger_schema (version integer NOT NULL)")
                version = await _version(connection)
                for step in sql.STEPS[version:]:
                    await connection.execute(step)
                await connection.execute("DELETE FROM ledger_schema")
                await connection.execute("INSERT INTO ledger_schema VALUES ($1)", len(sql.STEPS))
        elif version > len(sql.STEPS):
            raise SchemaError(
                f"the ledger's tables are of version {version}; this Headrace knows up to {len(sql.STEPS)}"
            )
        await connection.execute(sql.SEEN, self._run)

    async def close(self) -> None:
        self._connections.close()

    # What exchanges hold

    async def hold(
        self, reserved: ReservedCharge, micros: int, limits: Sequence[int | None]
    ) -> tuple[bool, list[tuple[int, int]]]:
        if not self._ready:
            raise ConnectionError("the ledger's database was not reached yet")
        return await self._holding.hold(HoldRequest(reserved, micros, tuple(limits)))

    # Batches

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult:
        await self._prepared()

        async def write(connection: PostgresConnection) -> WriteResult:
            async with connection.transaction():
                return await self._write(connection, batch, watch, int(now))

        return await self._connections.run(write, _WRITE_S)

    async def _write(
        self, connection: PostgresConnection, batch: LedgerBatch, watch: FindBudget, now: int
    ) -> WriteResult:
        new, old = await _sorted_out(connection, batch.charges)
        days: DaySums = {}
        spent: ScopeSums = {}
        for charge in old:
            add_charge(charge, days, spent, sign=-1)
        for charge in new:
            add_charge(charge, days, spent)
        if old:
            await connection.execute("DELETE FROM ledger_charges WHERE id = ANY($1)", [charge.id for charge in old])
        if new:
            inserted = await connection.fetch(sql.CHARGE, *columns(map(_row, new), 18))
            if len(inserted) != len(new):
                raise _ConflictError
        if batch.opened:
            await connection.execute(sql.OPENED, *self._opened(batch.opened))
        if batch.moved:
            moved = [(each.id, each.output_tokens, each.machine_us, each.micros) for each in batch.moved]
            await connection.execute(sql.MOVED, *columns(moved, 4))
        if days:
            await connection.execute(sql.DAYS, *columns(((*key, *days[key]) for key in sorted(days)), 14))
        held = await _end(connection, [*(charge.id for charge in batch.charges), *batch.released])
        # Last, because gateways that want to hold something wait for these rows.
        sums = {scope: (spent.get(scope, 0), held.get(scope, 0)) for scope in sorted({*spent, *held})}
        totals: ScopeSums = {}
        if sums:
            rows = await connection.fetch(sql.PERIODS, *columns(((*scope, *sum) for scope, sum in sums.items()), 5))
            totals = {BudgetScope(*row[:3]): row[3] for row in map(tuple, rows)}
        alerts = list(batch.alerts)
        for scope in spent:
            budget = watch(*scope)
            if budget is not None:
                total = totals[scope]
                alerts += [
                    BudgetAlert(scope, percent, budget.limit_micros, total, now)
                    for percent in budget.alerts_reached(total)
                ]
        recorded = [alert for alert in alerts if await _record(connection, alert)]
        known = {charge.id for charge in batch.charges} - {charge.id for charge in new}
        return WriteResult(frozenset(known), recorded)

    def _opened(self, opened: Sequence[ReservedCharge]) -> list[Any]:
        rows = [
            (each.entry.id, each.entry.tenant, each.entry.endpoint, each.day, msgspec.json.encode(each).decode())
            for each in opened
        ]
        first, *others = columns(rows, 5)
        return [first, self._run, *others]

    async def spent(self, scopes: Sequence[BudgetScope]) -> ScopeSums:
        await self._prepared()
        statement = "SELECT spent FROM ledger_periods WHERE tenant = $1 AND endpoint = $2 AND period = $3"

        async def read(connection: PostgresConnection) -> ScopeSums:
            return {scope: await connection.fetchval(statement, *scope) or 0 for scope in scopes}

        return await self._connections.run(read, _WRITE_S)

    async def prune(self, before: str) -> int:
        await self._prepared()

        async def prune(connection: PostgresConnection) -> int:
            return len(await connection.fetch(sql.PRUNE, before, _PRUNED))

        return await self._connections.run(prune, _WRITE_S)

    # Other gateways

    async def tend(self, running: Container[str]) -> list[LedgerCharge]:
        await self._prepared()

        async def tend(connection: PostgresConnection) -> list[LedgerCharge]:
            await connection.execute(sql.SEEN, self._run)
            rows = await connection.fetch(sql.TAKE, self._run, self._silent, _CHUNK)
            await connection.execute(sql.FORGET)
            left = [row["id"] for row in await connection.fetch(sql.LEFT, self._run, self._left, _CHUNK)]
            released = [id for id in left if id not in running]
            if released:
                async with connection.transaction():
                    held = await _end(connection, released)
                    await connection.fetch(sql.PERIODS, *columns(((*each, 0, held[each]) for each in sorted(held)), 5))
            return [_provisional(row) for row in rows]

        found = await self._connections.run(tend, _WRITE_S)
        await self._connections.warm(_WARM, _WRITE_S)
        return found

    # Alerts

    async def next_alert(self) -> BudgetAlert | None:
        await self._prepared()

        async def claim(connection: PostgresConnection) -> BudgetAlert | None:
            row = await connection.fetchrow(sql.CLAIM, _CLAIM_S)
            return None if row is None else BudgetAlert(BudgetScope(*tuple(row)[:3]), *tuple(row)[3:])

        return await self._connections.run(claim, _WRITE_S)

    async def alert_done(self, alert: BudgetAlert, *, sent: bool) -> None:
        async def done(connection: PostgresConnection) -> None:
            await connection.execute(sql.SENT, *alert.scope, alert.percent, sent)

        await self._connections.run(done, _WRITE_S)

    # Export

    async def sums(self, query: UsageQuery) -> AsyncIterator[list[SumRow]]:
        await self._prepared()
        where, values = _where(query)
        order = ", ".join(dict.fromkeys((*query.by, *DIMENSIONS, "source")))
        connection = await self._connections.connect(_WRITE_S)
        timer = asyncio.get_running_loop().call_later(_EXPORT_S, connection.terminate)
        try:
            # The reader may pause between two chunks.
            await connection.execute("SET idle_in_transaction_session_timeout = 0; SET statement_timeout = 60000")
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                statement = f"SELECT * FROM ledger_days WHERE {where} ORDER BY {order}"
                cursor = await connection.cursor(statement, *values)
                while rows := await cursor.fetch(_CHUNK):
                    yield [(DayKey(*row[:8]), DaySum(*row[8:])) for row in map(tuple, rows)]
        finally:
            timer.cancel()
            connection.terminate()

    async def sources(self, query: UsageQuery) -> list[str]:
        await self._prepared()
        where, values = _where(query)

        async def read(connection: PostgresConnection) -> list[str]:
            statement = f"SELECT DISTINCT source FROM ledger_days WHERE {where} AND source <> '' ORDER BY source"
            return [row[0] for row in await connection.fetch(statement, *values)]

        return await self._connections.run(read, _WRITE_S)


async def _version(connection: PostgresConnection) -> int:
    if await connection.fetchval("SELECT to_regclass('ledger_schema')") is None:
        return 0
    return await connection.fetchval("SELECT version FROM ledger_schema") or 0


async def _sorted_out(
    connection: PostgresConnection, charges: Sequence[LedgerCharge]
) -> tuple[list[LedgerCharge], list[LedgerCharge]]:
    """Those that are to be written, and those that they take the place of."""
    known: dict[str, Any] = {}
    if charges:
        known = {row["id"]: row for row in await connection.fetch(sql.KNOWN, [charge.id for charge in charges])}
    new: list[LedgerCharge] = []
    old: list[LedgerCharge] = []
    for charge in charges:
        row = known.get(charge.id)
        if row is None:
            new.append(charge)
        elif charge.settled.final and not row["final"]:
            new.append(charge)
            old.append(_charge(row))
    return new, old


async def _end(connection: PostgresConnection, ids: Sequence[str]) -> ScopeSums:
    """These exchanges run no more; what they held, as negative amounts."""
    held: ScopeSums = {}
    if ids:
        rows = await connection.fetch(sql.ENDING, ids)
        await connection.execute("DELETE FROM ledger_open WHERE id = ANY($1)", [row["id"] for row in rows])
        for row in rows:
            if row["held"]:
                for scope in scopes_of(row["tenant"], row["endpoint"], row["day"]):
                    held[scope] = held.get(scope, 0) - row["held"]
    return held


async def _record(connection: PostgresConnection, alert: BudgetAlert) -> bool:
    """False where it was recorded before."""
    values = (*alert.scope, alert.percent, alert.limit, alert.spent, alert.at)
    return await connection.fetchrow(sql.ALERT, *values) is not None


def _row(charge: LedgerCharge) -> tuple[Any, ...]:
    reserved, settled = charge
    entry = reserved.entry
    return (
        entry.id,
        reserved.day,
        reserved.at,
        entry.tenant,
        entry.key,
        entry.endpoint,
        entry.model,
        settled.variant,
        entry.surface,
        entry.counted,
        settled.ended,
        settled.prompt_tokens,
        settled.cached_tokens,
        settled.output_tokens,
        settled.machine_us,
        settled.micros,
        msgspec.json.encode(settled.saved).decode(),
        settled.final,
    )


def _charge(row: Any) -> LedgerCharge:
    """What `_row` has written, as far as sums go."""
    entry = LedgerEntry(
        id=row["id"],
        tenant=row["tenant"],
        endpoint=row["endpoint"],
        model=row["model"],
        variant=row["variant"],
        key=row["key"],
        surface=row["surface"],
        counted=row["counted"],
    )
    settled = Settlement(
        row["variant"],
        row["ended"],
        row["prompt_tokens"],
        row["cached_tokens"],
        row["output_tokens"],
        row["machine_us"],
        row["micros"],
        msgspec.json.decode(row["saved"], type=dict[str, int]),
        row["final"],
    )
    return LedgerCharge(ReservedCharge(entry, row["day"], row["at"], FREE), settled)


def _provisional(row: Any) -> LedgerCharge:
    """Of an exchange whose gateway is gone, what it would have been charged where it was last seen."""
    reserved = msgspec.json.decode(row["reserved"], type=ReservedCharge)
    tokens = row["output_tokens"]
    prompt = reserved.entry.prompt_tokens if tokens else 0
    amounts = (prompt, 0, tokens, row["machine_us"], row["micros"])
    return LedgerCharge(reserved, Settlement(reserved.entry.variant, CRASHED, *amounts, {}, final=False))


def _where(query: UsageQuery) -> tuple[str, tuple[Any, ...]]:
    where, values = "day BETWEEN $1 AND $2", (query.first_day, query.last_day)
    return (where, values) if query.tenant is None else (f"{where} AND tenant = $3", (*values, query.tenant))
