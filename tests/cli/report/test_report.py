"""The report of a running server has its two weeks, and no text of others becomes markup in it."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.config import SloConfig
from headrace.config.ledger_section import LedgerConfig, PriceConfig
from headrace.config.tenant_section import BudgetConfig, TenantConfig
from headrace.gateway.database import Database
from headrace.gateway.observation.latency_history import LatencyHistory
from headrace.observe.latency.latency_book import LatencyBook, RequestSample, Slice
from headrace.observe.slo.objectives import Objectives, objectives_of
from tests.support.admin_server import ROOT, administered
from tests.support.clock import Clock
from tests.support.running_server import asynchronous, words

SLO = {"chat": SloConfig(ttft_p95_ms=150.0, availability=0.99)}
HOSTILE = "<img src=x onerror=alert(1)>"


async def live_two_weeks(folder: Path) -> None:
    """Fill the storage with a week, and a slower one."""
    database = Database(folder)
    wall, monotonic = Clock(time.time() // 3600 * 3600 - 14 * 86_400.0), Clock(0.0)
    book, objectives = LatencyBook(monotonic), Objectives(objectives_of(SLO), monotonic, wall)
    history = LatencyHistory(database, book, objectives, clock=wall)
    for step in range(2 * 7 * 8 - 1):  # each three hours
        slower = 2.0 if step > 7 * 8 else 1.0
        for number in range(20):
            slice = Slice("mini", "chat", HOSTILE, "/v1/chat/completions", "<=128", "exact" if number < 2 else "direct")
            seconds = {"ttft": 0.1 * slower * (1 + number / 100), "e2e": 0.5 * slower}
            sample = RequestSample(slice, seconds, stages={"decode": 0.4, "prefill": 0.1}, output_tokens=50, micros=30)
            if number < 2:
                sample.cache, sample.saved_s, sample.saved_micros = "exact", 0.5, 30
            sample.good = objectives.judge(sample)
            book.record(sample)
        await history.flush()
        wall.now += 3 * 3600.0
        monotonic.now += 3 * 3600.0
    await database.close()


@asynchronous
async def test_a_week_is_compared_with_the_week_before(tmp_path: Path) -> None:
    await live_two_weeks(tmp_path / "storage")
    red = TenantConfig(budgets=(BudgetConfig(period="day", limit_micros=10),))
    patch = pytest.MonkeyPatch()
    patch.setenv("HEADRACE_ADMIN_KEY", ROOT)
    async with administered(
        tmp_path / "storage",
        slo=SLO,
        tenants={"red": red},
        prices={"mini": PriceConfig(input=0.01, output=0.02)},
        ledger=LedgerConfig(currency="EUR"),
    ) as server:
        server.engine.answer = words("a ", "b")
        await server.chat("caller-secret")
        path = tmp_path / "week.html"
        arguments = ["report", "--since", "7d", "-o", str(path), "--url", server.url]
        assert await asyncio.to_thread(main, arguments) == 0
        assert await asyncio.to_thread(main, ["report", "--since", "7 days", "--url", server.url]) == 2
    patch.undo()
    text = path.read_text(encoding="utf-8")
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert not re.search(r"(src|href)=\"?https?:", text)
    assert "default-src &#x27;none&#x27;" in text
    cells = re.findall(r"<tr><th[^>]*>([^<]*)</th>((?:<td>[^<]*</td>)*)</tr>", text)
    rows = [(name, re.findall(r"<td>([^<]*)</td>", values)) for name, values in cells]
    ttft = next(values for name, values in rows if name == "chat mini" and values[:1] == ["TTFT p95"])
    assert ttft[3].startswith("+")
    assert 95.0 < float(ttft[3].split()[0]) < 105.0
    assert ttft[-1] == "worse"
    objective = next(values for name, values in rows if name == "chat ttft_p95_ms")
    assert (objective[0], objective[2], objective[-1]) == ("95.0 %", "100 %", "missed")
    availability = next(values for name, values in rows if name == "chat availability")
    assert (availability[1], availability[-1]) == ("100 %", "met")
    exact = next(values for name, values in rows if name == "exact" and values[-1] != "-" and values[3].endswith(" s"))
    assert exact[0] == "108"
    assert ("decode", "400 ms") in [(name, values[0]) for name, values in rows if values]
