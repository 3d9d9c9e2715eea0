"""Configuration of prices and of the usage ledger. headrace.gateway.ledger applies it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Text

Amount = Annotated[float, Meta(ge=0, le=1_000_000)]  # of the currency, at most six decimals


class PriceConfig(Section, frozen=True):
    """Price of a variant, or of a model and its variants without their own price."""

    input: Amount = 0.0  # per million prompt tokens, in your currency
    cached: Amount | None = None  # per million prompt tokens from the prefix cache; default: as input
    output: Amount = 0.0  # per million output tokens
    second: Amount = 0.0  # per second of machine time
    hit_percent: Annotated[int, Meta(ge=0, le=100)] = 0  # percent of the price charged for a response cache hit


class LedgerConfig(Section, frozen=True):
    keeps: Literal["auto", "on", "off"] = "auto"  # auto: on when there are prices, tenants or keys
    store: Literal["sqlite", "postgres"] = "sqlite"  # sqlite (in storage.folder) or postgres (shared by gateways)
    dsn_env: Text = "HEADRACE_LEDGER_DSN"  # environment variable with the Postgres URL
    schema: Text = "headrace"  # Postgres schema
    currency: str = ""  # name of your currency, such as EUR, shown by `headrace admin usage` and `budgets`
    utc_offset_minutes: Annotated[int, Meta(ge=-840, le=840)] = 0  # that local time is ahead of UTC
    exchanges: Annotated[int, Meta(ge=16, le=1_000_000)] = (
        16_384  # running or waiting to be written; 1 KiB each on disk
    )
    wait_ms: Milliseconds = 2000.0  # milliseconds a request waits for the store
    lease_s: Annotated[float, Meta(ge=10, le=86_400)] = 60.0  # seconds a gateway's lease lasts without contact
    lease_percent: Annotated[int, Meta(ge=1, le=100)] = 25  # percent of what is left, leased at a time by all gateways
    gather_ms: Milliseconds = 4.0  # milliseconds to gather charges before writing them in one batch
    sync_s: Seconds = 1.0  # seconds between two fsyncs of the journal
    keep_days: Count = 90  # days to keep single charges; sums are kept for good
    webhook_url_env: Text | None = None  # environment variable with the URL that budget alerts are posted to
    webhook_header_env: Text | None = None  # environment variable with the webhook's `Authorization` header
