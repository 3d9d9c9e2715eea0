"""SQL tools on a real Postgres server: parameters, bounds, and no writes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.sql_tool import sql_tool
from headrace.pipelines.tools.tool import ToolError
from tests.support.programs.postgres_server import Server, serving, why_not

if importlib.util.find_spec("asyncpg") is None:
    pytest.skip("asyncpg is not there: pip install 'headrace[postgres]'", allow_module_level=True)
if (reason := why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

SHOP = """
CREATE TABLE orders (id integer, state text, sum numeric);
INSERT INTO orders SELECT n, 'sent', n / 4.0 FROM generate_series(0, 499) AS n;
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    import asyncpg

    async def fill(dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(SHOP)
        finally:
            await connection.close()

    with serving() as found:
        asyncio.run(fill(found.dsn))
        yield found


def ask(server: Server, arguments: dict[str, Any], **config: Any) -> dict[str, Any]:
    async def it() -> dict[str, Any]:
        declared = ToolConfig(kind="sql", dsn_env="SHOP_DSN", **config)
        (spec,) = await sql_tool("shop", declared, {"SHOP_DSN": server.dsn}).tools()
        return json.loads(await spec.call(arguments, "acme"))

    return asyncio.run(asyncio.wait_for(it(), 60))


def test_a_declared_statement_takes_its_parameters(server: Server) -> None:
    statement = "SELECT id, state, sum FROM orders WHERE id = :id::text::integer AND :id::text <> ''"
    found = ask(server, {"id": "7"}, statement=statement, parameters={"id": "Number of the order."})
    assert found == {"columns": ["id", "state", "sum"], "rows": [[7, "sent", "1.7500000000000000"]]}


def test_a_parameter_is_a_value_and_never_sql(server: Server) -> None:
    statement = "SELECT id FROM orders WHERE state = :state"
    found = ask(server, {"state": "x' OR 1=1 --"}, statement=statement, parameters={"state": "State."})
    assert found["rows"] == []


def test_rows_are_bounded(server: Server) -> None:
    found = ask(server, {"sql": "SELECT id FROM orders ORDER BY id"}, rows=3)
    assert found["rows"] == [[0], [1], [2]]
    assert found["more"] == "Only the first 3 rows are shown."


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO orders VALUES (1000, 'sent', 1)",
        "DROP TABLE orders",
        "WITH gone AS (DELETE FROM orders RETURNING id) SELECT * FROM gone",
        "SELECT 1; DELETE FROM orders",
    ],
)
def test_nothing_is_written(server: Server, sql: str) -> None:
    with pytest.raises(ToolError, match="The query failed"):
        ask(server, {"sql": sql})
    assert ask(server, {"sql": "SELECT count(*) FROM orders"})["rows"] == [[500]]


def test_a_slow_query_ends_at_its_timeout(server: Server) -> None:
    with pytest.raises(ToolError, match="statement timeout"):
        ask(server, {"sql": "SELECT pg_sleep(60)"}, timeout_s=1.0)  # enough to connect on a busy machine


def test_a_frozen_server_ends_the_call(server: Server) -> None:
    with server.frozen(), pytest.raises(ToolError, match="cannot be reached"):
        ask(server, {"sql": "SELECT 1"}, timeout_s=0.2)
