"""The journal of charges: what a run leaves is charged by the next one, and a disk that fails costs a count."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from headrace.gateway.ledger.charge_journal import ChargeJournal
from headrace.gateway.ledger.charges import ChargeCalculator
from headrace.gateway.ledger.holds import OpenCharge
from headrace.gateway.ledger.journal import Journal
from headrace.gateway.ledger.ledger_bounds import LedgerEvent
from headrace.gateway.ledger.ledger_records import CRASHED, ReservedCharge
from tests.support.stores.ledgers import PRICES, entry, used

CHARGES = ChargeCalculator(PRICES)


class Opened:
    def __init__(self, path: Path | None, *, slots: int = 4, run: str = "run") -> None:
        self.counts: Counter[LedgerEvent] = Counter()
        self.journal = ChargeJournal(path, slots=slots, run=run, count=self.add)

    def add(self, event: LedgerEvent, number: int) -> None:
        self.counts[event] += number


def charge(id: str, *, sent: int = 0) -> OpenCharge:
    return OpenCharge(ReservedCharge(entry(id), "2025-11-22", 1, PRICES.of("mini")), sent_tokens=sent)


def settled(open: OpenCharge, output: int) -> OpenCharge:
    open.settled = CHARGES.settlement(
        open.reserved, used(output=output), "finished", variant="", hit="", instead_of="", route="route"
    )
    return open


def test_the_next_run_gets_what_a_run_left_settled_or_by_its_progress(tmp_path: Path) -> None:
    first = Opened(tmp_path / "journal", run="first")
    assert first.journal.open() == ("", [])
    charges = {id: charge(id) for id in ("running", "settled", "stored")}
    assert [first.journal.reserve(each) for each in charges.values()] == ["written"] * 3
    charges["running"].sent_tokens = 3
    first.journal.progress(charges["running"])
    first.journal.settle(settled(charges["settled"], 10))
    first.journal.free(charges["stored"])
    assert charges["stored"].slot is None
    asyncio.run(first.journal.close())

    second = Opened(tmp_path / "journal", run="second")
    previous, left = second.journal.open()
    assert previous == "first"
    found = {each.id: each.settled for each in left}
    assert found.keys() == {"running", "settled"}
    assert found["settled"] == charges["settled"].settled
    crashed = found["running"]
    assert crashed is not None
    assert (crashed.ended, crashed.output_tokens, crashed.micros) == (CRASHED, 3, 10 + 2 * 3)
    assert second.counts == {"recovered": 2}
    asyncio.run(second.journal.close())


def test_a_full_journal_reserves_no_more_and_a_late_charge_goes_on_without_a_slot(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "journal", slots=1)
    opened.journal.open()
    assert opened.journal.reserve(charge("one")) == "written"
    assert opened.journal.reserve(charge("two")) == "full"
    late = charge("three")
    opened.journal.reserve_late(late)
    assert late.slot is None
    assert opened.counts == {}
    asyncio.run(opened.journal.close())


def test_a_journal_that_cannot_be_opened_is_counted_and_opened_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()  # in the file's place
    opened = Opened(path)
    assert opened.journal.open() == ("", [])
    assert not opened.journal.is_healthy
    assert opened.journal.reserve(charge("one")) == "failed"
    assert opened.journal.reopen() == []
    assert opened.counts == {"journal_failed": 3}
    path.rmdir()
    assert opened.journal.reopen() == []
    assert opened.journal.is_healthy
    assert opened.journal.reserve(charge("one")) == "written"
    asyncio.run(opened.journal.sync_changes())
    asyncio.run(opened.journal.close())


def test_a_slot_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    file, _ = Journal.open(path, slots=1, run="of another version")
    slot = file.take()
    assert slot is not None
    file.reserve(slot, b"no charge")
    file.close()
    opened = Opened(path, slots=1)
    assert opened.journal.open() == ("of another version", [])
    assert opened.journal.reserve(charge("one")) == "full"
    asyncio.run(opened.journal.close())


def test_without_a_path_nothing_is_written() -> None:
    opened = Opened(None)
    assert opened.journal.open() == ("", [])
    assert opened.journal.is_healthy
    one = charge("one")
    assert opened.journal.reserve(one) == "written"
    opened.journal.progress(one)
    opened.journal.settle(settled(one, 1))
    opened.journal.free(one)
    asyncio.run(opened.journal.close())
    assert (one.slot, opened.counts) == (None, {})
