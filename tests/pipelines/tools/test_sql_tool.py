"""SQL tools read and never write, and are bounded in rows and time."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.sql_tool import numbered_parameters, sql_tool
from headrace.pipelines.tools.tool import ToolError


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER, state TEXT)")
        connection.executemany("INSERT INTO orders VALUES (?, ?)", [(n, "sent") for n in range(500)])
    return path


def ask(arguments: dict[str, Any], **config: Any) -> dict[str, Any]:
    async def it() -> dict[str, Any]:
        (spec,) = await sql_tool("shop", ToolConfig(kind="sql", **config), {}).tools()
        return json.loads(await spec.call(arguments, "acme"))

    return asyncio.run(it())


def test_a_declared_statement_takes_its_parameters(database: Path) -> None:
    found = ask(
        {"id": "7' OR 1=1 --"},
        database=str(database),
        statement="SELECT state FROM orders WHERE id = :id",
        parameters={"id": "Number of the order."},
    )
    assert found == {"columns": ["state"], "rows": []}


def test_rows_are_bounded_and_the_model_knows(database: Path) -> None:
    found = ask({"sql": "SELECT * FROM orders"}, database=str(database), rows=3)
    assert len(found["rows"]) == 3
    assert "first 3 rows" in found["more"]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM orders",
        "UPDATE orders SET state = 'x'",
        "DROP TABLE orders",
        "CREATE TABLE x (y)",
        "ATTACH DATABASE '/tmp/x.sqlite' AS x",
        "PRAGMA query_only = OFF",
        "INSERT INTO orders VALUES (1, 'x') RETURNING id",
        "SELECT load_extension('x')",
        "SELECT 1; DELETE FROM orders",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "SELECT zeroblob(900000000)",
    ],
)
def test_nothing_can_be_changed_or_exhausted(database: Path, sql: str) -> None:
    before = database.read_bytes()
    with pytest.raises((ToolError, sqlite3.Warning)):
        ask({"sql": sql}, database=str(database))
    assert database.read_bytes() == before


def test_an_endless_query_ends_with_the_time(database: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(ToolError, match=r"did not end within 0\.1 s"):
        ask({"sql": endless}, database=str(database), timeout_s=0.1)


def test_named_parameters_become_numbers_and_casts_stay() -> None:
    statement, order = numbered_parameters("SELECT x::text FROM t WHERE a = :a AND b = :b OR a = :a")
    assert statement == "SELECT x::text FROM t WHERE a = $1 AND b = $2 OR a = $1"
    assert order == ["a", "b"]
