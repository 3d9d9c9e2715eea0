"""What the admin API needs of other parts: the ledger's usage, and caches that can forget.

Owns the two contracts. Who keeps them is not known here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Literal, Protocol

import msgspec

from headrace.gateway.ledger.ledger_store import Dimension

BY: Final[tuple[Dimension, ...]] = ("day", "tenant", "key", "endpoint", "model", "variant")


class UsageFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage is exported, and what it is told apart by."""

    tenant: str | None = None  # None: all of them
    first_day: str = "0000-00-00"
    last_day: str = "9999-99-99"  # with it
    by: tuple[Dimension, ...] = BY
    format: Literal["csv", "json"] = "csv"


class UsageExport(Protocol):
    def usage(self, filters: UsageFilters) -> AsyncIterator[bytes]:
        """The export piece by piece, in order: CSV with a heading, or one JSON object."""
        ...
