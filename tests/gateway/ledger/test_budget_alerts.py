"""Alerts: each threshold of each period once, whatever dies in between, and to a webhook that takes its time."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.config import LogConfig
from headrace.config.tenant_section import BudgetConfig
from headrace.gateway.database import Database
from headrace.gateway.ledger.budget_alerts import AlertSender, AlertWebhook
from headrace.gateway.ledger.budgets import Admitted
from headrace.gateway.ledger.ledger_records import BudgetScope
from headrace.gateway.ledger.ledger_store import BudgetAlert, LedgerBatch
from headrace.gateway.ledger.sqlite import SqliteLedgerStore
from headrace.observe.logs import configure_log
from tests.support.clock import Clock
from tests.support.file_storage import asynchronous
from tests.support.stores.ledgers import CHAT, DAY, NOON, Opened, budgets, entry, ledger_in, used

TODAY = "2025-11-22"


@dataclass
class Receiver:
    """A webhook. It answers what it is told to, in turn, and then 204."""

    answers: list[int] = field(default_factory=list[int])
    got: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    hangs: bool = False
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60.0)
        self.got.append((request.headers["idempotency-key"], json.loads(await request.read())))
        assert request.headers["authorization"] == "Bearer secret"
        return web.Response(status=self.answers.pop(0) if self.answers else 204)

    async def until(self, count: int) -> None:
        while len(self.got) < count:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def receiving(**options: Any) -> AsyncGenerator[Receiver, None]:
    receiver = Receiver(**options)
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    receiver.url = f"http://127.0.0.1:{port}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()


def webhook(url: str, **options: Any) -> AlertWebhook:
    given: dict[str, Any] = {"timeout_s": 5.0, "first_pause_s": 0.01, "longest_pause_s": 0.02, **options}
    return AlertWebhook(url=url, headers={"authorization": "Bearer secret"}, **given)


async def spend(opened: Opened, count: int, name: str) -> None:
    """30 micros each."""
    for number in range(count):
        await opened.exchange(f"{name} {number}")
    await opened.ledger.flush()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the server's log has, as JSON."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    stream = io.StringIO()
    configure_log(LogConfig(format="json"), stream)
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)


def test_each_threshold_is_told_once_and_also_over_restarts(tmp_path: Path, log: io.StringIO) -> None:
    async def test() -> None:
        clock = Clock(NOON)
        accounts = budgets(
            BudgetConfig(limit_micros=300, period="day"),
            BudgetConfig(limit_micros=600, period="month", endpoint=CHAT, alerts=(100,)),
        )
        runs: list[tuple[int, list[int]]] = [(4, []), (1, [50]), (0, [50]), (4, [50, 80]), (1, [50, 80, 100])]
        for number, (exchanges, percents) in enumerate(runs):
            async with ledger_in(tmp_path, accounts, clock=clock, abandoned=number == 1) as opened:
                await spend(opened, exchanges, f"run {number}")
                assert opened.alerts() == [("", TODAY, percent) for percent in percents]
        clock.now += DAY
        async with ledger_in(tmp_path, accounts, clock=clock) as opened:
            await spend(opened, 10, "next day")
            assert len(opened.alerts()) == 3 + 3 + 1
            assert (CHAT, "2025-11", 100) in opened.alerts()
            clock.now -= DAY
            assert not isinstance(await opened.ledger.reserve(entry("again"), output_tokens=10), Admitted)

    asynchronous(test)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    told = [line for line in lines if line["event"] == "budget alert"]
    days = [(each["period"], each.get("percent")) for each in told if "endpoint" not in each]
    assert days == [(day, percent) for day in (TODAY, "2025-11-23") for percent in (50, 80, 100)] + [(TODAY, None)]
    months = [(each["period"], each["alert"]) for each in told if "endpoint" in each]
    assert months == [("2025-11", "budget.threshold"), ("2025-11", "budget.refused")]
    assert told[0] == {
        "event": "budget alert",
        "logger": "headrace.budgets",
        "level": "warning",
        "timestamp": told[0]["timestamp"],
        "id": told[0]["id"],
        "alert": "budget.threshold",
        "tenant": "a",
        "period": TODAY,
        "percent": 50,
        "limit_micros": 300,
        "spent_micros": 150,
        "at": int(NOON),
    }


def test_a_charge_that_passes_several_thresholds_tells_all_of_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with ledger_in(tmp_path, budgets(BudgetConfig(limit_micros=30, period="day"))) as opened:
            await spend(opened, 1, "all")
            assert [percent for _, _, percent in opened.alerts()] == [50, 80, 100]

    asynchronous(test)


def test_a_charge_that_a_crash_left_tells_its_thresholds(tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(BudgetConfig(limit_micros=30, period="day"))
        async with ledger_in(tmp_path, accounts, abandoned=True) as opened:
            await opened.ledger.reserve(entry("one"), output_tokens=10)
            opened.store.open_gate.clear()
            opened.ledger.settle("one", used())
        async with ledger_in(tmp_path, accounts) as opened:
            await opened.ledger.flush()
            assert [percent for _, _, percent in opened.alerts()] == [50, 80, 100]

    asynchronous(test)


def test_the_first_refusal_of_a_period_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        accounts = budgets(
            BudgetConfig(limit_micros=40, period="day", alerts=(90,)),
            BudgetConfig(limit_micros=35, period="month", alerts=()),
        )
        async with ledger_in(tmp_path, accounts) as opened:
            await opened.ledger.reserve(entry("one"), output_tokens=10)
            await opened.ledger.reserve(entry("held"), output_tokens=5)  # of what "one" holds some may come back
            await opened.ledger.flush()
            assert opened.alerts() == []
            opened.ledger.settle("one", used())
            for number in range(3):
                assert not isinstance(await opened.ledger.reserve(entry(f"r{number}"), output_tokens=10), Admitted)
            await opened.ledger.flush()
            assert opened.alerts() == [("", TODAY, 0)]
            assert opened.counts["alerts"] == 1

    asynchronous(test)


def test_the_webhook_gets_each_alert_until_it_has_taken_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with receiving(answers=[500, 429, 302]) as receiver:
            accounts = budgets(BudgetConfig(limit_micros=60, period="day"))
            async with ledger_in(tmp_path, accounts, webhook=webhook(receiver.url)) as opened:
                await spend(opened, 2, "two")
                await receiver.until(6)
                while opened.rows("SELECT * FROM ledger_alerts WHERE sent IS NULL"):
                    await asyncio.sleep(0.01)
            assert [body["percent"] for _, body in receiver.got] == [50, 50, 50, 50, 80, 100]
            assert len({key for key, _ in receiver.got}) == 3
            assert all(key == body["id"] for key, body in receiver.got)

    asynchronous(test)


def alert(percent: int, at: int = 1) -> BudgetAlert:
    return BudgetAlert(BudgetScope("a", "", TODAY), percent, 100, percent, at)


@asynccontextmanager
async def stored(folder: Path, *alerts: BudgetAlert) -> AsyncGenerator[SqliteLedgerStore, None]:
    db = Database(folder)
    store = SqliteLedgerStore(db)
    try:
        await store.write(LedgerBatch(alerts=list(alerts)), lambda tenant, endpoint, period: None, 1.0)
        yield store
    finally:
        await db.close()


async def delivered(store: SqliteLedgerStore, hook: AlertWebhook | None, outcomes: list[str]) -> None:
    courier = AlertSender(store, hook, count=outcomes.append)
    running = asyncio.create_task(courier.run())
    while await store.next_alert() is not None:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_what_an_earlier_process_did_not_send_is_sent_at_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with receiving() as receiver, stored(tmp_path, alert(80, at=2), alert(50)) as store:
            outcomes: list[str] = []
            await delivered(store, webhook(receiver.url), outcomes)
            assert [body["percent"] for _, body in receiver.got] == [50, 80]
            assert outcomes == ["sent", "sent"]
            await delivered(store, webhook(receiver.url), outcomes)
            assert len(receiver.got) == 2

    asynchronous(test)


def test_a_webhook_that_never_answers_is_given_up_and_the_next_alert_has_its_turn(tmp_path: Path) -> None:
    async def test() -> None:
        async with receiving(hangs=True) as receiver, stored(tmp_path, alert(50), alert(80)) as store:
            outcomes: list[str] = []
            await delivered(store, webhook(receiver.url, timeout_s=0.02, tries=2), outcomes)
            assert outcomes == ["failed", "failed"]
            await delivered(store, webhook("http://127.0.0.1:1/hook", tries=2), outcomes)
            assert outcomes == ["failed", "failed"]

    asynchronous(test)


def test_the_log_of_a_webhook_that_fails_does_not_show_its_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with stored(tmp_path, alert(50)) as store:
            await delivered(store, webhook("http://127.0.0.1:1/secret-path", tries=1), [])

    asynchronous(test)
    assert "giving up" in caplog.text
    assert "secret" not in caplog.text


def test_without_a_webhook_alerts_are_recorded_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with stored(tmp_path, alert(50)) as store:
            outcomes: list[str] = []
            await delivered(store, None, outcomes)
            assert outcomes == []
            assert await store.write(LedgerBatch(alerts=[alert(50)]), lambda tenant, endpoint, period: None, 1.0)
            assert await store.next_alert() is None

    asynchronous(test)
