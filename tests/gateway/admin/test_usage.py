"""Usage from a real ledger through the admin API."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from millrace.gateway.admin.usage import LedgerUsage
from millrace.gateway.asked import Usage
from millrace.gateway.database import Database
from millrace.gateway.ledger.ledger import Ledger
from millrace.gateway.ledger.prices import Price, PriceBook
from millrace.gateway.ledger.records import Entry
from millrace.gateway.ledger.sqlite_ledger import SqliteLedger
from tests.gateway.admin.administering import administered
from tests.gateway.edging import asynchronous


@asynchronous
async def test_what_was_charged_is_exported(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger")
    prices = PriceBook({"mini": Price(1_000_000, 1_000_000, 2_000_000)})
    ledger = Ledger(SqliteLedger(database), prices=prices)
    await ledger.open()
    for number, tenant in enumerate(("red", "red", "blue")):
        entry = Entry(id=str(number), tenant=tenant, endpoint="/v1/completions", model="mini", variant="mini", key="k")
        await ledger.reserve(entry, output_tokens=5)
        await ledger.settle(str(number), Usage(prompt_tokens=10, output_tokens=5), ended="finished")
    async with administered(tmp_path / "state", usage=LedgerUsage(ledger)) as running:
        answer = await running.admin("GET", "usage?by=tenant")
        rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
        assert [(row["tenant"], row["requests"], row["micros"]) for row in rows] == [
            ("blue", "1", "20"),
            ("red", "2", "40"),
        ]
        answer = await running.admin("GET", "usage?tenant=red&format=json&by=tenant,key")
        (row,) = answer.json["rows"]
        assert (row["tenant"], row["key"], row["output_tokens"]) == ("red", "k", 10)
        assert (await running.admin("GET", "usage?last_day=2001-01-01&format=json")).json["rows"] == []
    await ledger.close()
    await database.close()
