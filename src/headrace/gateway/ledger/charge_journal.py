"""ChargeJournal: what the ledger writes to its journal for each charge, and how it goes on when the disk fails.

A failure of the disk is counted, and logged once until it ends. Knows no budgets and no store; journal.py has the file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from headrace.gateway.ledger.charges import crash_settlement
from headrace.gateway.ledger.holds import OpenCharge
from headrace.gateway.ledger.journal import Journal, JournalError, JournalRecord
from headrace.gateway.ledger.ledger_bounds import CountLedgerEvent
from headrace.gateway.ledger.ledger_records import ReservedCharge, Settlement
from headrace.observe.outage_log import OutageLog

log: Final = logging.getLogger(__name__)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_reserved: Final = msgspec.msgpack.Decoder(ReservedCharge).decode
_decode_settled: Final = msgspec.msgpack.Decoder(Settlement).decode


class ChargeJournal:
    """Use from one event loop only."""

    def __init__(
        self,
        path: Path | None,  # None: nothing is written
        *,
        slots: int,
        run: str,  # name of this run
        count: CountLedgerEvent,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._slots = slots
        self._run = run
        self._count = count
        self._file: Journal | None = None
        self._outage = OutageLog(log, "cannot write the ledger's journal", clock=monotonic)
        self._failures = 0
        self._failures_before = 0  # those before the last sync

    @property
    def is_healthy(self) -> bool:
        return self._file is not None or self._path is None

    def open(self) -> tuple[str, list[OpenCharge]]:
        """Return the name of the previous run, and the charges that it left. After a disk failure, call `reopen`.

        Raise JournalError if another process has the journal.
        """
        if self._path is None:
            return "", []
        try:
            journal, records = Journal.open(self._path, slots=self._slots, run=self._run)
        except OSError as error:
            self._failed(error)
            return "", []
        self._file = journal
        if records or journal.torn:
            log.warning("the previous run left %d requests open; %d could not be read", len(records), journal.torn)
            self._count("recovered", len(records))
        return journal.previous_run, [open for record in records if (open := _recovered(record)) is not None]

    def reopen(self) -> list[OpenCharge]:
        """Try again to open a journal that could not be opened. Return what the previous run left."""
        try:
            return self.open()[1]
        except JournalError as error:
            self._failed(error)
            return []

    def reserve(self, open: OpenCharge) -> Literal["written", "full", "failed"]:
        """Write a reservation, after which the request may be served."""
        if self._path is None:
            return "written"
        try:
            if self._file is None:
                raise OSError("the journal could not be opened")
            open.slot = self._file.take()
            if open.slot is None:
                return "full"
            self._file.reserve(open.slot, _encode(open.reserved))
        except OSError as error:
            self._failed(error)
            return "failed"
        return "written"

    def reserve_late(self, open: OpenCharge) -> None:
        """Write the reservation of a request that was served without one, if there is room."""
        if self._file is not None and (slot := self._file.take()) is not None:
            open.slot = slot
            try:
                self._file.reserve(slot, _encode(open.reserved))
            except (OSError, JournalError) as error:
                self._failed(error)

    def progress(self, open: OpenCharge) -> None:
        if self._file is not None and open.slot is not None:
            try:
                self._file.progress(open.slot, open.sent_tokens, open.machine_us)
            except OSError as error:
                self._failed(error)

    def settle(self, open: OpenCharge) -> None:
        if self._file is not None and open.slot is not None:
            try:
                self._file.settle(open.slot, _encode(open.settled))
            except (OSError, JournalError) as error:
                self._failed(error)

    def free(self, open: OpenCharge) -> None:
        """Free the slot of a charge that is stored, or dropped."""
        if self._file is not None and open.slot is not None:
            try:
                self._file.free(open.slot)
            except OSError as error:
                self._failed(error)
            open.slot = None

    async def sync_changes(self) -> None:
        """Make what was written since the last call survive a power cut."""
        if self._file is not None and self._file.changed:
            try:
                await self.sync()
                if self._failures == self._failures_before:
                    self._outage.succeeded()
            except OSError as error:
                self._failed(error)
        self._failures_before = self._failures

    async def sync(self) -> None:
        """Make everything that was written survive a power cut. Raise OSError if the disk fails."""
        if self._file is not None:
            await asyncio.to_thread(self._file.sync)

    async def close(self) -> None:
        await self.sync()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _failed(self, error: Exception) -> None:
        self._count("journal_failed", 1)
        self._failures += 1
        self._outage.failed(error)


def _recovered(record: JournalRecord) -> OpenCharge | None:
    """Return what a crashed run left in a slot, settled; None if it cannot be read."""
    try:
        reserved = _decode_reserved(record.reserved)
        settled = None if record.settled is None else _decode_settled(record.settled)
    except msgspec.DecodeError:
        log.error("cannot read slot %d of the ledger's journal; it is kept unchanged", record.slot)
        return None
    if settled is None:
        settled = crash_settlement(reserved, record.output_tokens, record.machine_us)
    return OpenCharge(reserved, slot=record.slot, settled=settled)
