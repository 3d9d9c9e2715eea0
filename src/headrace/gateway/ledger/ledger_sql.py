"""The parts that the ledger's sqlite and Postgres stores share: rows of charges and the statements of the export.

`mark` is the dialect's sign of a numbered parameter: "?" or "$".
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.ledger.ledger_records import LedgerCharge
from headrace.gateway.ledger.ledger_store import DIMENSIONS, UsageQuery


def charge_row(charge: LedgerCharge) -> tuple[Any, ...]:
    reserved, settled = charge
    entry = reserved.entry
    return (
        entry.id,
        reserved.day,
        reserved.at,
        entry.tenant,
        entry.key,
        entry.endpoint,
        entry.model,
        settled.variant,
        entry.surface,
        settled.ended,
        settled.prompt_tokens,
        settled.cached_tokens,
        settled.output_tokens,
        settled.machine_us,
        settled.micros,
        msgspec.json.encode(settled.saved).decode(),
    )


def sums_statement(query: UsageQuery, mark: str) -> tuple[str, tuple[Any, ...]]:
    where, values = _where(query, mark)
    order = ", ".join(dict.fromkeys((*query.by, *DIMENSIONS, "source")))
    return f"SELECT * FROM ledger_days WHERE {where} ORDER BY {order}", values


def sources_statement(query: UsageQuery, mark: str) -> tuple[str, tuple[Any, ...]]:
    where, values = _where(query, mark)
    return f"SELECT DISTINCT source FROM ledger_days WHERE {where} AND source <> '' ORDER BY source", values


def _where(query: UsageQuery, mark: str) -> tuple[str, tuple[Any, ...]]:
    where, values = f"day BETWEEN {mark}1 AND {mark}2", (query.first_day, query.last_day)
    return (where, values) if query.tenant is None else (f"{where} AND tenant = {mark}3", (*values, query.tenant))
