"""Prices of variants, in integer arithmetic, and parsing and formatting of amounts.

Money is in micros, millionths of the currency. Prices are micros per million tokens or per second of machine time. The
cost of a request is the exact sum of its parts, rounded half up to whole micros once:

    micros = ⌊(uncached · input + cached · cached + output · output + microseconds · second) / 1,000,000 + ½⌋

Times are whole microseconds, so every term is an integer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

from headrace.config.ledger_section import PriceConfig
from headrace.errors import HeadraceError

MICROS: Final = 1_000_000  # of one unit of the currency
MOST_PRICE: Final = 10**12  # micros: a million of the currency for a million tokens
MOST_TOKENS: Final = 10**9  # per request; larger counts from upstreams are clamped


class PriceError(HeadraceError):
    """An invalid amount or price."""


class Price(msgspec.Struct, frozen=True, array_like=True):
    """The price of a variant. The journal stores it with each request, so it survives a restart."""

    input: int = 0  # micros per million prompt tokens
    cached: int = 0  # micros per million prompt tokens from the prefix cache
    output: int = 0
    second: int = 0  # micros per second of machine time: prefill and decode
    hit_percent: int = 0  # percent of the price for a response cache hit

    def micros(self, prompt: int, cached: int, output: int, machine_us: int = 0) -> int:
        """Return the cost in micros. `cached` tokens are part of `prompt`."""
        return (self._exact(prompt, cached, output, machine_us) + MICROS // 2) // MICROS

    def hit_micros(self, prompt: int, cached: int, output: int, machine_us: int = 0) -> int:
        exact = self._exact(prompt, cached, output, machine_us) * self.hit_percent
        return (exact + 50 * MICROS) // (100 * MICROS)

    def _exact(self, prompt: int, cached: int, output: int, machine_us: int) -> int:
        cached = min(cached, prompt)
        return (prompt - cached) * self.input + cached * self.cached + output * self.output + machine_us * self.second

    @property
    def free(self) -> bool:
        return not (self.input or self.cached or self.output or self.second)


FREE: Final = Price()


class PriceBook:
    """Prices by full variant name. A variant without a price has its model's, and an adapter its variant's; a model
    without one is free."""

    def __init__(self, prices: Mapping[str, Price] | None = None, models: Collection[str] = ()) -> None:
        """`models`: all names of models, some of which may have a colon in them without being adapters."""
        self._prices = dict(prices or {})
        self._models = frozenset(models)

    @classmethod
    def from_config(cls, prices: Mapping[str, PriceConfig], models: Collection[str] = ()) -> PriceBook:
        return cls(
            {
                name: make_price(
                    input=each.input,
                    cached=each.cached,
                    output=each.output,
                    second=each.second,
                    hit_percent=each.hit_percent,
                )
                for name, each in prices.items()
            },
            models,
        )

    @property
    def is_empty(self) -> bool:
        return not self._prices

    def of(self, variant: str) -> Price:
        found = self._prices.get(variant)
        if found is None:
            model, _, name = variant.partition("@")
            if ":" in name or (":" in model and not name and model not in self._models):
                return self.of(variant.rpartition(":")[0])  # an adapter
            found = self._prices.get(model, FREE)
        return found


def make_price(
    *,
    input: str | float = 0,
    cached: str | float | None = None,  # default: as input
    output: str | float = 0,
    second: str | float = 0,
    hit_percent: int = 0,
) -> Price:
    """Build a price from amounts per million tokens and per second. Raise PriceError for invalid amounts."""
    if not 0 <= hit_percent <= 100:
        raise PriceError(f"expected hit_percent from 0 to 100, found {hit_percent}")
    return Price(
        parse_micros(input),
        parse_micros(input if cached is None else cached),
        parse_micros(output),
        parse_micros(second),
        hit_percent,
    )


def parse_micros(amount: str | float | Decimal, *, most: int = MOST_PRICE) -> int:
    """0.15 → 150000. A float is read as its shortest decimal form. Raise PriceError for an invalid amount."""
    try:
        exact = Decimal(str(amount)).scaleb(6)
        found = int(exact)
    except (InvalidOperation, ValueError, OverflowError):
        raise PriceError(f"expected an amount, found '{amount}'") from None
    if found != exact:
        raise PriceError(f"expected at most six decimals, found '{amount}'")
    if not 0 <= found <= most:
        raise PriceError(f"expected an amount from 0 to {most // MICROS}, found '{amount}'")
    return found


def format_micros(micros: int) -> str:
    """150000 → 0.150000."""
    whole, rest = divmod(abs(micros), MICROS)
    return f"{'-' if micros < 0 else ''}{whole}.{rest:06d}"


def microseconds(seconds: float) -> int:
    """Convert a measured time; invalid and negative values give 0."""
    if not math.isfinite(seconds) or seconds <= 0:
        return 0
    return min(math.floor(seconds * 1e6 + 0.5), 10**13)  # at most 115 days
