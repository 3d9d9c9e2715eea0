"""Usage of requests that a server answered, through its admin API."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from headrace.config import PriceConfig
from tests.support.accounts import declared
from tests.support.admin_server import ADMIN, administered
from tests.support.running_server import asynchronous, words


@asynchronous
async def test_what_was_charged_is_exported(tmp_path: Path) -> None:
    keys = (ADMIN, declared("app", "app-secret", tenant="red"), declared("blue", "blue-secret"))
    prices = {"mini": PriceConfig(input=1.0, output=2.0)}
    async with administered(tmp_path, keys=keys, prices=prices) as running:
        running.engine.answer = words("one ", "two")
        for secret in ("app-secret", "app-secret", "blue-secret"):
            assert (await running.chat(secret)).status == 200
        prompt = len(running.engine.streams[0].request.prompt)
        answer = await running.admin("GET", "usage?by=tenant")
        rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
        cost = prompt + 2 * 2
        assert [(row["tenant"], row["requests"], row["micros"]) for row in rows] == [
            ("blue", "1", str(cost)),
            ("red", "2", str(2 * cost)),
        ]
        answer = await running.admin("GET", "usage?tenant=red&format=json&by=tenant,key")
        (row,) = answer.json["rows"]
        assert (row["tenant"], row["key"], row["output_tokens"]) == ("red", "app", 4)
        assert (await running.admin("GET", "usage?last_day=2001-01-01&format=json")).json["rows"] == []
