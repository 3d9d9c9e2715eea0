"""The ledger in Postgres, for several gateways that share tenants.

Keeps charges, sums and alerts as sqlite does, and leases slices of budgets to gateways, so that a budget holds across
all of them: see ledger_lease in postgres_schema.py. Each running request has a row with its progress. When a gateway is
silent for a while, another one takes over its rows and charges them provisionally. If the gateway was alive or returns
with its journal, its own charge replaces the provisional one and every sum changes by the difference.

Every wait is bounded. A statement that takes longer ends its connection and may or may not have taken effect; all
writes can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Container, Iterable, Sequence
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
    scopes_in,
)
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
from headrace.gateway.ledger.prices import FREE
from headrace.gateway.postgres_pool import MissingDriverError, PostgresConnection, PostgresPool

log: Final = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0  # timeout of a statement that requests wait for
_WRITE_S: Final = 30.0  # timeout of a batch, some ten statements
_EXPORT_S: Final = 600.0  # timeout of an export, including pauses of its reader
_CLAIM_S: Final = 300.0  # how long a gateway may take to send an alert before another one tries
_WARM: Final = 3  # connections opened in advance
_CHUNK: Final = 500  # rows
_RECORDED: Final = 10_000  # alerts
_PRUNED: Final = 1000  # charges deleted per transaction
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_LOCK: Final = 0x6865616472616365  # advisory lock: only one gateway creates the tables


class SchemaError(HeadraceError):
    """The database has tables of another version."""


class PostgresLedgerStore:
    shared = True

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "headrace",
        connections: int = 8,
        lease_s: float = 60.0,  # how long leases last without a renewal
        lease_percent: int = 25,  # of what is left, leased at a time by all gateways together
        silent_s: float | None = None,  # after which a gateway counts as dead; default: half of lease_s
        # After this long, a row of this gateway without a running request is removed. A timed-out statement that the
        # database still executed can leave such a row.
        left_s: float = 10.0,
    ) -> None:
        if not _SCHEMA.fullmatch(schema):
            raise SchemaError(f"Invalid schema '{schema}'. Use lower-case letters, digits and underscores.")
        self._schema = schema
        self._connections = PostgresPool(dsn, schema=schema, most=connections)
        self._lease = lease_s, lease_percent
        # Sooner than its leases end, so that what it spent is counted before others may lease it.
        self._silent = lease_s / 2 if silent_s is None else silent_s
        self._left = left_s
        self._recorded: set[str] = set()  # alerts, so that they are not written with every batch
        self._run = ""
        self._ready = False

    async def open(self, run: str, previous: str) -> None:
        """Start. A database that is down is retried later. Raise MissingDriverError without asyncpg."""
        self._run = run

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

    async def close(self) -> None:
        self._connections.close()

    # Leases

    async def lease(self, requests: Sequence[LeaseRequest]) -> dict[BudgetScope, BudgetReading]:
        await self._prepared()
        rows = columns(((*each.scope, each.limit, each.micros, each.least, each.version) for each in requests), 7)

        async def lease(connection: PostgresConnection) -> list[Any]:
            return await connection.fetch(sql.LEASE, self._run, self._lease[1], *rows)

        return _readings((each.scope for each in requests), await self._connections.run(lease, _ANSWER_S))

    async def renew(self) -> LeaseRenewal:
        await self._prepared()

        async def renew(connection: PostgresConnection) -> Any:
            return await connection.fetchrow(sql.RENEW, self._run, self._lease[0])

        lapsed, *wanted = await self._connections.run(renew, _ANSWER_S)
        return LeaseRenewal(lapsed, tuple(map(BudgetScope._make, zip(*wanted, strict=True))))

    async def end_leases(self, run: str) -> None:
        await self._prepared()
        await self._connections.run(lambda connection: connection.execute(sql.END_LEASES, run), _ANSWER_S)

    # Batches

    async def write(self, batch: LedgerBatch, watch: FindBudget, now: float) -> WriteResult:
        await self._prepared()

        async def write(connection: PostgresConnection) -> tuple[WriteResult, set[str]]:
            async with connection.transaction():
                return await self._write(connection, batch, watch, int(now))

        result, recorded = await self._connections.run(write, _WRITE_S)
        self._recorded = recorded if len(self._recorded) > _RECORDED else self._recorded | recorded
        return result

    async def _write(
        self, connection: PostgresConnection, batch: LedgerBatch, watch: FindBudget, now: int
    ) -> tuple[WriteResult, set[str]]:
        """Return the ids of all alerts that are recorded now, too."""
        new, old = await _insert(connection, batch.charges)
        days: DaySums = {}
        spent: ScopeSums = dict.fromkeys(scopes_in(batch.charges), 0)
        own: ScopeSums = {}
        for charge in old:
            add_charge(charge, days, spent, sign=-1)
        for charge in new:
            add_charge(charge, days, spent)
            if charge.settled.final:
                add_charge(charge, {}, own)
        if batch.opened:
            await connection.execute(sql.OPENED, *self._opened(batch.opened))
        if batch.moved:
            moved = [(each.id, each.output_tokens, each.machine_us, each.micros) for each in batch.moved]
            await connection.execute(sql.MOVED, *columns(moved, 4))
        if days:
            await connection.execute(sql.DAYS, *columns(((*key, *days[key]) for key in sorted(days)), 14))
        await connection.execute(sql.ENDED, [*(charge.id for charge in batch.charges), *batch.released])
        # Last, because gateways that want to lease something wait for these rows.
        readings: dict[BudgetScope, BudgetReading] = {}
        if spent:
            rows = columns(((*scope, spent[scope], own.get(scope, 0)) for scope in sorted(spent)), 5)
            readings = _readings(sorted(spent), await connection.fetch(sql.SPEND, self._run, *rows))
        alerts = [*batch.alerts]
        for scope, reading in readings.items():
            alerts += alerts_due(scope, watch(*scope), reading.spent, now)
        alerts = [each for each in alerts if each.id not in self._recorded]
        recorded = [each for each in alerts if await _record(connection, each)]
        known = {charge.id for charge in batch.charges} - {charge.id for charge in new}
        return WriteResult(frozenset(known), recorded, readings), {alert.id for alert in alerts}

    def _opened(self, opened: Sequence[ReservedCharge]) -> list[Any]:
        rows = [
            (each.entry.id, each.entry.tenant, each.entry.endpoint, each.day, msgspec.json.encode(each).decode())
            for each in opened
        ]
        first, *others = columns(rows, 5)
        return [first, self._run, *others]

    async def prune(self, before: str) -> int:
        await self._prepared()

        async def prune(connection: PostgresConnection) -> int:
            return len(await connection.fetch(sql.PRUNE, before, _PRUNED))

        return await self._connections.run(prune, _WRITE_S)

    # Other gateways

    async def tend(self, running: Container[str], day: str) -> list[LedgerCharge]:
        await self._prepared()

        async def tend(connection: PostgresConnection) -> list[LedgerCharge]:
            rows = await connection.fetch(sql.TAKE, self._run, self._silent, _CHUNK)
            await connection.execute(sql.FORGET)
            await connection.execute(sql.FORGET_LEASES, self._run, day)
            left = [row["id"] for row in await connection.fetch(sql.LEFT, self._run, self._left, _CHUNK)]
            if released := [id for id in left if id not in running]:
                await connection.execute(sql.ENDED, released)
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
        statement, values = sums_statement(query, "$")
        connection = await self._connections.connect(_WRITE_S)
        timer = asyncio.get_running_loop().call_later(_EXPORT_S, connection.terminate)
        try:
            # The reader may pause between two chunks.
            await connection.execute("SET idle_in_transaction_session_timeout = 0; SET statement_timeout = 60000")
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                cursor = await connection.cursor(statement, *values)
                while rows := await cursor.fetch(_CHUNK):
                    yield [(DayKey(*row[:8]), DaySum(*row[8:])) for row in map(tuple, rows)]
        finally:
            timer.cancel()
            connection.terminate()

    async def sources(self, query: UsageQuery) -> list[str]:
        await self._prepared()
        statement, values = sources_statement(query, "$")

        async def read(connection: PostgresConnection) -> list[str]:
            return [row[0] for row in await connection.fetch(statement, *values)]

        return await self._connections.run(read, _WRITE_S)


async def _version(connection: PostgresConnection) -> int:
    if await connection.fetchval("SELECT to_regclass('ledger_schema')") is None:
        return 0
    return await connection.fetchval("SELECT version FROM ledger_schema") or 0


async def _insert(
    connection: PostgresConnection, charges: Sequence[LedgerCharge]
) -> tuple[list[LedgerCharge], list[LedgerCharge]]:
    """Insert charges. Return those that are new, and the provisional ones that they replace."""
    new = await _inserted(connection, charges)
    if len(new) == len(charges):
        return new, []
    ids = {charge.id for charge in new}
    rest = {charge.id: charge for charge in charges if charge.id not in ids and charge.settled.final}
    rows = [row for row in await connection.fetch(sql.KNOWN, list(rest)) if not row["final"]]
    if rows:
        await connection.execute("DELETE FROM ledger_charges WHERE id = ANY($1)", [row["id"] for row in rows])
        new += await _inserted(connection, [rest[row["id"]] for row in rows])
    return new, [_charge(row) for row in rows]


async def _inserted(connection: PostgresConnection, charges: Sequence[LedgerCharge]) -> list[LedgerCharge]:
    if not charges:
        return []
    rows = [
        (*row[:9], charge.reserved.entry.counted, *row[9:], charge.settled.final)
        for charge in sorted(charges, key=lambda charge: charge.id)  # gateways lock rows in one order
        for row in (charge_row(charge),)
    ]
    ids = {row["id"] for row in await connection.fetch(sql.CHARGE, *columns(rows, 18))}
    return [charge for charge in charges if charge.id in ids]


def _readings(scopes: Iterable[BudgetScope], rows: Iterable[Any]) -> dict[BudgetScope, BudgetReading]:
    return {scope: BudgetReading(*tuple(row)) for scope, row in zip(scopes, rows, strict=True)}


def columns(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Transpose rows into the arrays that unnest takes."""
    found: list[list[Any]] = [[] for _ in range(width)]
    for row in rows:
        for column, value in zip(found, row, strict=True):
            column.append(value)
    return found


async def _record(connection: PostgresConnection, alert: BudgetAlert) -> bool:
    """Record an alert. Return False if it was recorded before."""
    values = (*alert.scope, alert.percent, alert.limit, alert.spent, alert.at)
    return await connection.fetchrow(sql.ALERT, *values) is not None


def _charge(row: Any) -> LedgerCharge:
    """Rebuild a charge from its row, as far as sums go."""
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
    """Return the charge of a dead gateway's request, up to its last known progress."""
    reserved = msgspec.json.decode(row["reserved"], type=ReservedCharge)
    tokens = row["output_tokens"]
    prompt = reserved.entry.prompt_tokens if tokens else 0
    amounts = (prompt, 0, tokens, row["machine_us"], row["micros"])
    return LedgerCharge(reserved, Settlement(reserved.entry.variant, CRASHED, *amounts, {}, final=False))
