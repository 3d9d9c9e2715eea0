"""The ledger's bounds, what it counts, and how it says how it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

# What can be counted; each is a metric's label.
LedgerEvent: TypeAlias = Literal[
    "admitted",
    "fallback",  # sent to another variant for want of money
    "refused_budget",
    "refused_held",
    "refused_store",
    "refused_full",
    "stopped",  # progress said that there is no room for more
    "unchecked",  # served without asking the budgets, because the store was down
    "settled",
    "known",  # charges that the store had already, and did not count again
    "recovered",  # exchanges of a server that died
    "write_failed",
    "journal_failed",
    "lost",  # charges that could be kept nowhere; their amounts are in the log
    "alerts",
]
CountLedgerEvent: TypeAlias = Callable[[LedgerEvent, int], None]


class LedgerBounds(msgspec.Struct, frozen=True):
    exchanges: int = 16_384  # open, or not in the store yet
    wait_s: float = 0.05  # for the store, and that it may be behind before it counts as down
    gather_s: float = 0.004  # that charges are gathered before they are written together
    sync_s: float = 1.0  # between two times that the journal goes to the disk: what a power cut can take
    extension_tokens: int = 256  # that a running exchange reserves at once beyond its estimate
    ahead_tokens: int = 16  # that it reserves them early: what may still come after it was told to stop
    keep_days: int = 90  # that single charges are kept; their sums are kept for good
    drain_s: float = 5.0  # that the last charges have to be written at the end


class LedgerStatistics(msgspec.Struct, frozen=True):
    open: int  # exchanges that run
    waiting: int  # charges that are not in the store yet
    behind_s: float  # how long the oldest of these has waited
    journal: bool  # False: it cannot be written
