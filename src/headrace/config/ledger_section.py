"""Prices, and how what was used is kept.

Owns these sections with their defaults. What a request costs is gateway.ledger's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Text

Amount = Annotated[float, Meta(ge=0, le=1_000_000)]  # of the currency, with six decimals at most


class PriceConfig(Section, frozen=True):
    """Of a variant, or of a model and all its variants without one of their own."""

    input: Amount = 0.0  # for a million tokens of prompts
    cached: Amount | None = None  # for those of them that the prefix cache had; as `input` by default
    output: Amount = 0.0  # for a million tokens of answers
    second: Amount = 0.0  # for a second of machine time: prefill and decode
    hit_percent: Annotated[int, Meta(ge=0, le=100)] = 0  # of the price, for an answer from a cache of answers


class LedgerConfig(Section, frozen=True):
    keeps: Literal["auto", "on", "off"] = "auto"  # auto: where there are prices, tenants or keys
    store: Literal["sqlite", "postgres"] = "sqlite"  # sqlite: in the storage folder
    dsn_env: Text = "HEADRACE_LEDGER_DSN"  # the environment variable that has Postgres's address
    schema: Text = "headrace"  # in Postgres
    utc_offset_minutes: Annotated[int, Meta(ge=-840, le=840)] = 0  # that local days begin before those of UTC
    exchanges: Annotated[int, Meta(ge=16, le=1_000_000)] = 16_384  # that run or wait to be written; 1 KiB each on disk
    wait_ms: Milliseconds = 50.0  # that the store has for an answer, and may be behind
    gather_ms: Milliseconds = 4.0  # that charges are gathered before they are written together
    sync_s: Seconds = 1.0  # between two times that the journal goes to the disk
    keep_days: Count = 90  # that single charges are kept
    webhook_url_env: Text | None = None  # the environment variable that has the address that alerts are posted to
    webhook_header_env: Text | None = None  # the one that has the value of its `Authorization` header
