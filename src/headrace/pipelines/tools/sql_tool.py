"""SQL tools: read-only queries on a SQLite file or a Postgres database, with bounds on rows and time.

SQLite files are opened read-only, and an authorizer admits reads alone. Postgres runs each query in a read-only
transaction with a statement timeout; give it a role that may read only what the model may know.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.tool import FixedTools, ToolError, make_spec, text_argument, text_schema

_READS: Final = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
)
_UNSAFE: Final = frozenset(("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"))
_OPCODES: Final = 1000  # of SQLite between two looks at the clock
_NAMED: Final = re.compile(r"(?<![:\w]):(\w+)")
_CELL_CHARS: Final = 2000
_VALUE_BYTES: Final = 1_000_000  # of one value that SQLite computes
_STATEMENT_CHARS: Final = 10_000
_OWN_SQL: Final = "Runs one read-only SQL query and returns its rows."

Rows = tuple[list[str], list[Sequence[Any]], bool]  # columns, rows, and whether there are more


def sql_tool(name: str, config: ToolConfig, environ: Mapping[str, str]) -> FixedTools:
    fixed = config.statement

    async def call(arguments: Mapping[str, Any], tenant: str) -> str:
        if fixed is None:
            statement, values = text_argument(arguments, "sql")[:_STATEMENT_CHARS], dict[str, str]()
        else:
            statement, values = fixed, {each: text_argument(arguments, each) for each in config.parameters}
        if config.database is not None:
            query = asyncio.to_thread(_read_sqlite, config.database, statement, values, config.rows, config.timeout_s)
            return _shown(*await query)
        return _shown(*await _read_postgres(environ[config.dsn_env or ""], statement, values, config))

    schema = text_schema(config.parameters if fixed is not None else {"sql": "A SELECT statement."})
    return FixedTools(make_spec(config, name, call, schema, description=_OWN_SQL))


def _read_sqlite(path: str, statement: str, values: Mapping[str, str], most: int, seconds: float) -> Rows:
    end = time.monotonic() + seconds
    uri = f"{Path(path).expanduser().resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=seconds)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES)
            connection.set_authorizer(_authorize)
            connection.set_progress_handler(lambda: time.monotonic() > end, _OPCODES)
            cursor = connection.execute(statement, dict(values))
            rows = cursor.fetchmany(most + 1)
            return [each[0] for each in cursor.description or ()], rows[:most], len(rows) > most
    except sqlite3.Error as error:
        if "interrupted" in str(error):
            raise ToolError(f"The query did not end within {seconds:g} s.") from None
        raise ToolError(f"The query failed: {error}.") from None


def _authorize(action: int, one: str | None, two: str | None, database: str | None, trigger: str | None) -> int:
    if action not in _READS or (action == sqlite3.SQLITE_FUNCTION and (two or "").lower() in _UNSAFE):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


async def _read_postgres(dsn: str, statement: str, values: Mapping[str, str], config: ToolConfig) -> Rows:
    try:
        asyncpg: Any = importlib.import_module("asyncpg")
    except ImportError:
        raise ToolError("This server lacks the extra 'postgres'.") from None
    numbered, order = numbered_parameters(statement)
    try:
        connection: Any = await asyncpg.connect(dsn, timeout=config.timeout_s)
    except (OSError, TimeoutError, asyncpg.PostgresError):
        raise ToolError("The database cannot be reached.") from None
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(f"SET LOCAL statement_timeout = {int(config.timeout_s * 1000)}")
            prepared = await connection.prepare(numbered)
            cursor = await prepared.cursor(*(values[name] for name in order))
            rows: list[Any] = await cursor.fetch(config.rows + 1)
            columns = [each.name for each in prepared.get_attributes()]
            return columns, [tuple(row) for row in rows[: config.rows]], len(rows) > config.rows
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise ToolError(f"The query failed: {str(error)[:300]}.") from None
    finally:
        connection.terminate()


def numbered_parameters(statement: str) -> tuple[str, list[str]]:
    """Turn :name into $1 and so on, and return the names in order. Casts (::text) stay."""
    order: list[str] = []

    def number(mark: re.Match[str]) -> str:
        if mark[1] not in order:
            order.append(mark[1])
        return f"${order.index(mark[1]) + 1}"

    return _NAMED.sub(number, statement), order


def _shown(columns: Sequence[str], rows: Sequence[Sequence[Any]], more: bool) -> str:
    """Return the rows as JSON, which names the columns once."""
    cells = [[_cell(value) for value in row] for row in rows]
    found: dict[str, Any] = {"columns": list(columns), "rows": cells}
    if more:
        found["more"] = f"Only the first {len(cells)} rows are shown."
    return msgspec.json.encode(found).decode()


def _cell(value: Any) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case bytes():
            return f"{len(value)} bytes"
        case _:
            return str(value)[:_CELL_CHARS]
