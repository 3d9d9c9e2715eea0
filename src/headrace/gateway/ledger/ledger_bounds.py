"""Bounds, countable events and statistics of the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

# Labels of the ledger's event metric.
LedgerEvent: TypeAlias = Literal[
    "admitted",
    "fallback",  # moved to the fallback variant because the budget is spent
    "refused_budget",
    "refused_held",
    "refused_store",
    "refused_full",
    "stopped",  # a response was stopped because the budget has no room for more
    "store_down",  # the store failed several times in a row
    "unchecked",  # served without a budget check, because the store was down
    "settled",
    "known",  # charges that the store already had
    "recovered",  # requests of a server that died
    "write_failed",
    "journal_failed",
    "lost",  # charges that could not be stored anywhere; the log has their amounts
    "alerts",
]
CountLedgerEvent: TypeAlias = Callable[[LedgerEvent, int], None]


class LedgerBounds(msgspec.Struct, frozen=True):
    exchanges: int = 16_384  # requests open or not stored yet
    wait_s: float = 2.0  # a request waits this long for the store; also how far behind it may be
    lease_s: float = 60.0  # leases of budgets last this long without a renewal
    gather_s: float = 0.004  # charges are gathered this long for one batch
    sync_s: float = 1.0  # between two fsyncs of the journal: what a power cut can lose
    extension_tokens: int = 256  # reserved at a time beyond the estimate of a running request
    ahead_tokens: int = 16  # reserved ahead: what may still arrive after a stop
    keep_days: int = 90  # single charges are kept this long; sums are kept for good
    drain_s: float = 5.0  # to write the last charges at shutdown


class LedgerStatistics(msgspec.Struct, frozen=True):
    open: int  # running requests
    waiting: int  # charges not stored yet
    behind_s: float  # age of the oldest of these
    journal: bool  # False: the journal cannot be written
    down: bool  # the store has failed several times in a row
