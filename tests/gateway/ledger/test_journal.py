"""The journal: what was written is found, what was torn or is of another exchange is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.gateway.ledger.journal import Journal, JournalError, JournalRecord

SLOT, HEADER = 1024, 4096


def opened(path: Path, *, slots: int = 8, run: str = "run") -> tuple[Journal, list[JournalRecord]]:
    return Journal.open(path, slots=slots, run=run)


def take(journal: Journal) -> int:
    slot = journal.take()
    assert slot is not None
    return slot


def spoil(path: Path, offset: int, data: bytes = b"\xff\xff\xff\xff") -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_each_record_of_each_slot_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, found = opened(path, run="first")
    assert (found, journal.previous_run) == ([], "")
    slots = [take(journal) for _ in range(4)]
    for slot in slots:
        journal.reserve(slot, b"reserved %d" % slot)
    journal.progress(slots[1], 7, 2**40)
    journal.progress(slots[2], 1, 0)
    journal.progress(slots[2], 2, 3)
    journal.settle(slots[2], b"settled")
    journal.free(slots[3])
    journal.sync()
    journal.close()

    journal, found = opened(path, run="second")
    assert journal.previous_run == "first"
    assert sorted(found, key=lambda each: each.slot) == [
        JournalRecord(slots[0], b"reserved %d" % slots[0], 0, 0, None),
        JournalRecord(slots[1], b"reserved %d" % slots[1], 7, 2**40, None),
        JournalRecord(slots[2], b"reserved %d" % slots[2], 2, 3, b"settled"),
    ]
    taken = {take(journal) for _ in range(5)}
    assert taken.isdisjoint(slots[:3])
    assert journal.take() is None
    journal.close()


@pytest.mark.parametrize("second", [b"another", b"first"])
def test_a_slot_used_again_has_nothing_of_before(tmp_path: Path, second: bytes) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path, slots=1)
    slot = take(journal)
    journal.reserve(slot, b"first")
    journal.progress(slot, 5, 5)
    journal.settle(slot, b"settled")
    journal.free(slot)
    assert take(journal) == slot
    journal.reserve(slot, second)
    journal.close()
    _, found = opened(path, slots=1)
    assert found == [JournalRecord(slot, second, 0, 0, None)]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (8, None),  # the reservation: nothing was served yet
        (640, JournalRecord(0, b"reserved", 0, 0, b"settled")),
        (704 + 8, JournalRecord(0, b"reserved", 4, 9, None)),
        (704, JournalRecord(0, b"reserved", 4, 9, None)),  # a length beyond the slot
    ],
)
def test_a_torn_record_takes_no_other_with_it(tmp_path: Path, offset: int, expected: JournalRecord | None) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path, slots=1)
    slot = take(journal)
    journal.reserve(slot, b"reserved")
    journal.progress(slot, 4, 9)
    journal.settle(slot, b"settled")
    journal.close()
    spoil(path, HEADER + offset)
    journal, found = opened(path, slots=1)
    assert found == ([] if expected is None else [expected])
    assert journal.torn == (expected is None)


def test_a_longer_journal_keeps_its_length_and_a_shorter_one_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path, slots=600)
    slots = [take(journal) for _ in range(600)]
    journal.reserve(slots[-1], b"last")
    journal.close()
    journal, found = opened(path, slots=2)
    assert (journal.slots, len(found)) == (600, 1)
    journal.close()
    journal, found = opened(path, slots=700)
    assert (journal.slots, len(found)) == (700, 1)
    assert path.stat().st_size == HEADER + 700 * SLOT


def test_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"somebody's letters" * 1000)
    with pytest.raises(JournalError, match="Move the file away"):
        opened(path)
    assert path.read_bytes() == b"somebody's letters" * 1000


def test_a_record_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "journal")
    slot = take(journal)
    with pytest.raises(JournalError):
        journal.reserve(slot, bytes(633))
    journal.reserve(slot, bytes(632))
    with pytest.raises(JournalError):
        journal.settle(slot, bytes(313))
    journal.settle(slot, bytes(312))


def test_another_process_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path)
    script = f"import fcntl, os; fcntl.lockf(os.open({str(path)!r}, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "BlockingIOError" in run.stderr
    journal.close()
    assert os.access(path, os.R_OK)
