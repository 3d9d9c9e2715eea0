"""The shared state in Postgres, for several gateways: the same records, epochs and audit log as in sqlite.

Owns the tables and their statements. Every change locks the one row of `shared_state` first, so changes come one after
another, epochs in their order, and whoever sees an epoch sees all that belongs to it. Times that gateways compare are
the database's. Every wait is bounded; a change that takes longer may have been made or not, and is told so.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from headrace.gateway.accounts.account_records import decode_records, encode_value
from headrace.gateway.accounts.account_rules import SCHEMA
from headrace.gateway.accounts.account_store import (
    REMEMBERED,
    AccountChange,
    AccountChanges,
    AuditPage,
    AuditRetention,
    CommitResult,
    VersionConflictError,
)
from headrace.gateway.accounts.audit_log import ZERO, AuditEntry, AuditRow, ChainPosition, pruning_entry, seal
from headrace.gateway.api_errors import ApiError
from headrace.gateway.database import storage_unavailable
from headrace.gateway.postgres_pool import MissingDriverError, PostgresConnection, PostgresPool

Result = TypeVar("Result")

_LOCK: Final = 0x6865616473746174  # advisory lock: only one gateway creates the tables
_AT_ONCE: Final = 500  # records that are decoded in the event loop
_NOW: Final = "extract(epoch FROM clock_timestamp())::double precision"

TABLES: Final = f"""
CREATE TABLE IF NOT EXISTS shared_state (
    one integer PRIMARY KEY CHECK (one = 1),
    epoch bigint NOT NULL,
    forgotten bigint NOT NULL,  -- the epoch up to which removed records are forgotten
    head_seq bigint NOT NULL, head_hash text NOT NULL,  -- of the audit log
    anchor_seq bigint NOT NULL, anchor_hash text NOT NULL  -- the last of its rows that was removed
);
INSERT INTO shared_state VALUES (1, 0, 0, 0, '{ZERO}', 0, '{ZERO}') ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS shared_records (
    kind text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    version bigint NOT NULL,  -- the epoch in which it was written
    body text,  -- JSON; NULL: it was removed
    PRIMARY KEY (kind, id)
);
CREATE INDEX IF NOT EXISTS shared_records_by_version ON shared_records (version);
CREATE TABLE IF NOT EXISTS key_uses (id text COLLATE "C" PRIMARY KEY, at bigint NOT NULL);
CREATE TABLE IF NOT EXISTS audit (
    seq bigint PRIMARY KEY, at bigint NOT NULL, body text NOT NULL, hash text NOT NULL
);
CREATE OR REPLACE RULE audit_never_changes AS ON UPDATE TO audit DO INSTEAD NOTHING;
"""

_VERSION: Final = "SELECT version FROM shared_records WHERE kind = $1 AND id = $2 AND body IS NOT NULL"
_PUT: Final = """
INSERT INTO shared_records (kind, id, version, body) VALUES ($1, $2, $3, $4)
ON CONFLICT (kind, id) DO UPDATE SET version = excluded.version, body = excluded.body
"""
_OLD: Final = "SELECT version FROM shared_records WHERE body IS NULL ORDER BY version DESC LIMIT 1 OFFSET $1"
_TOUCH: Final = """
INSERT INTO key_uses (id, at)
SELECT used.id, used.at FROM unnest($1::text[], $2::bigint[]) AS used (id, at)
WHERE EXISTS (SELECT 1 FROM shared_records r WHERE r.kind = 'key' AND r.id = used.id AND r.body IS NOT NULL)
ON CONFLICT (id) DO UPDATE SET at = greatest(key_uses.at, excluded.at)
"""
_UNUSED: Final = """
DELETE FROM key_uses WHERE NOT EXISTS
(SELECT 1 FROM shared_records r WHERE r.kind = 'key' AND r.id = key_uses.id AND r.body IS NOT NULL)
"""


class PostgresAccountStore:
    shared = True

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "headrace",
        retention: AuditRetention | None = None,
        answer_s: float = 5.0,
        connections: int = 2,
    ) -> None:
        """NoDriverError where asyncpg is missing, ValueError for a schema that is no plain name."""
        if importlib.util.find_spec("asyncpg") is None:
            raise MissingDriverError("Postgres needs the package asyncpg. Run: pip install 'headrace[postgres]'")
        if not SCHEMA.fullmatch(schema):
            raise ValueError(f"Invalid schema '{schema}'. Use lower-case letters, digits and underscores.")
        self._schema = schema
        self._connections = PostgresPool(dsn, schema=schema, most=connections)
        self._retention = retention or AuditRetention()
        self._answer_s = answer_s
        self._ready = False

    async def _run(self, work: Callable[[PostgresConnection], Awaitable[Result]]) -> Result:
        async def prepared(connection: PostgresConnection) -> Result:
            if not self._ready:
                await self._prepare(connection)
            return await work(connection)

        try:
            result = await self._connections.run(prepared, self._answer_s)
        except (ApiError, VersionConflictError, MissingDriverError):
            raise
        except TimeoutError:
            raise storage_unavailable(
                f"The database did not answer within {self._answer_s:g} s. A change may or may not have been made.",
                retry_after=1.0,
            ) from None
        except Exception as error:  # errors of asyncpg, the network or the server are not shown to clients
            raise storage_unavailable("The database cannot be used right now.", retry_after=1.0) from error
        self._ready = True
        return result

    async def _prepare(self, connection: PostgresConnection) -> None:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
            await connection.execute(TABLES)

    async def changes(self, since: int) -> AccountChanges:
        async def changes(connection: PostgresConnection) -> AccountChanges:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                state = await connection.fetchrow(f"SELECT epoch, forgotten, {_NOW} AS now FROM shared_state")
                epoch, now = int(state["epoch"]), float(state["now"])
                if since == epoch:
                    return AccountChanges(epoch=epoch, now=now, records=())
                whole = since < state["forgotten"] or since > epoch
                rows: list[Any] = await connection.fetch(
                    "SELECT kind, id, version, body FROM shared_records WHERE version > $1", 0 if whole else since
                )
            tuples = [(row["kind"], row["id"], row["version"], row["body"]) for row in rows]
            records = (
                decode_records(tuples) if len(tuples) <= _AT_ONCE else await asyncio.to_thread(decode_records, tuples)
            )
            return AccountChanges(epoch=epoch, now=now, records=records, whole=whole)

        return await self._run(changes)

    async def commit(self, change: AccountChange) -> CommitResult:
        async def commit(connection: PostgresConnection) -> CommitResult:
            async with connection.transaction():
                return await self._commit(connection, change)

        return await self._run(commit)

    async def _commit(self, connection: PostgresConnection, change: AccountChange) -> CommitResult:
        state = await connection.fetchrow(f"SELECT *, {_NOW} AS now FROM shared_state FOR UPDATE")
        epoch, now = int(state["epoch"]) + 1, float(state["now"])
        for kind, id, version in change.expects:
            await _check(connection, kind, id, version)
        for write in change.writes:
            await _check(connection, write.kind, write.id, write.replaces)
            body = None if write.value is None else encode_value(write.value)
            await connection.execute(_PUT, write.kind, write.id, epoch, body)
        forgotten = await connection.fetchval(_OLD, REMEMBERED)
        if forgotten is not None:
            await connection.execute("DELETE FROM shared_records WHERE body IS NULL AND version <= $1", forgotten)
        anchor = ChainPosition(state["anchor_seq"], state["anchor_hash"])
        head = await _append(connection, ChainPosition(state["head_seq"], state["head_hash"]), change.entry)
        head, anchor = await self._pruned(connection, head, anchor, now)
        await connection.execute(
            "UPDATE shared_state SET epoch = $1, forgotten = greatest(forgotten, $2), head_seq = $3, head_hash = $4, "
            "anchor_seq = $5, anchor_hash = $6",
            *(epoch, forgotten or 0, head.seq, head.hash, anchor.seq, anchor.hash),
        )
        return CommitResult(epoch, now, head)

    async def _pruned(
        self, connection: PostgresConnection, head: ChainPosition, anchor: ChainPosition, now: float
    ) -> tuple[ChainPosition, ChainPosition]:
        oldest = await connection.fetchval("SELECT at FROM audit ORDER BY seq LIMIT 1")
        cut = self._retention.cut(head.seq, anchor.seq, oldest, now)
        if cut is None:
            return head, anchor
        if cut.younger is not None:
            cut = cut.before(await connection.fetchval("SELECT min(seq) FROM audit WHERE at >= $1", int(cut.younger)))
        hash = await connection.fetchval("SELECT hash FROM audit WHERE seq = $1", cut.through)
        if hash is None or cut.through <= anchor.seq:
            return head, anchor  # if a row is missing, verification will report it
        removed = await connection.fetchval("SELECT count(*) FROM audit WHERE seq <= $1", cut.through)
        await connection.execute("DELETE FROM audit WHERE seq <= $1", cut.through)
        last = ChainPosition(cut.through, hash)
        return await _append(connection, head, pruning_entry(last, at=int(now), removed=removed, why=cut.why)), last

    async def touch(self, uses: Mapping[str, int]) -> None:
        async def touch(connection: PostgresConnection) -> None:
            async with connection.transaction():
                await connection.execute(_TOUCH, list(uses), list(uses.values()))
                await connection.execute(_UNUSED)

        await self._run(touch)

    async def uses(self) -> dict[str, int]:
        async def uses(connection: PostgresConnection) -> dict[str, int]:
            rows: list[Any] = await connection.fetch("SELECT id, at FROM key_uses")
            return {row["id"]: int(row["at"]) for row in rows}

        return await self._run(uses)

    async def audit(
        self, *, after: int = 0, before: int | None = None, limit: int = 100, newest: bool = False
    ) -> AuditPage:
        async def audit(connection: PostgresConnection) -> AuditPage:
            order = "DESC" if newest else "ASC"
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                state = await connection.fetchrow("SELECT * FROM shared_state")
                rows: list[Any] = await connection.fetch(
                    f"SELECT seq, body, hash FROM audit WHERE seq > $1 AND seq < $2 ORDER BY seq {order} LIMIT $3",
                    *(after, 2**62 if before is None else before, limit),
                )
            return AuditPage(
                tuple(AuditRow(row["seq"], row["body"], row["hash"]) for row in rows),
                ChainPosition(state["head_seq"], state["head_hash"]),
                ChainPosition(state["anchor_seq"], state["anchor_hash"]),
            )

        return await self._run(audit)

    async def close(self) -> None:
        self._connections.close()


async def _check(connection: PostgresConnection, kind: str, id: str, version: int) -> None:
    if (await connection.fetchval(_VERSION, kind, id) or 0) != version:
        raise VersionConflictError(kind, id)


async def _append(connection: PostgresConnection, head: ChainPosition, entry: AuditEntry) -> ChainPosition:
    row = seal(head, entry)
    await connection.execute(
        "INSERT INTO audit (seq, at, body, hash) VALUES ($1, $2, $3, $4)", row.seq, entry.at, row.body, row.hash
    )
    return ChainPosition(row.seq, row.hash)
