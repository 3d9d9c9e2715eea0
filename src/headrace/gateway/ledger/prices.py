"""What a variant's tokens cost, in whole numbers.

Owns Price, the one rounding rule, and how amounts are read from and written to text. Knows no request and no tenant.

Money is in micros: millionths of the currency, whichever that is. A price is in micros per million tokens, or per
second of machine time. What one exchange costs is the exact sum of its parts, rounded half up to whole micros, once:

    micros = ⌊(uncached · input + cached · cached + output · output + microseconds · second) / 1,000,000 + ½⌋

Times are whole microseconds before they get here, so that there is nothing in a sum that is not a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

from headrace.config.ledger_section import PriceConfig
from headrace.errors import HeadraceError

MICROS: Final = 1_000_000  # of one unit of the currency
MOST_PRICE: Final = 10**12  # micros: a million of the currency for a million tokens
MOST_BUDGET: Final = 10**17  # micros; sums stay below 2^63
MOST_TOKENS: Final = 10**9  # of one exchange; what an upstream says beyond that is not believed


class PriceError(HeadraceError):
    """An amount or a price that is none."""


class Price(msgspec.Struct, frozen=True, array_like=True):
    """Of one variant. The journal keeps it with each exchange: what was promised holds over a restart."""

    input: int = 0  # micros per million tokens of a prompt
    cached: int = 0  # of those that came from the prefix cache
    output: int = 0
    second: int = 0  # micros per second of machine time: prefill and decode
    hit_percent: int = 0  # of the price, for an answer that comes from a cache

    def micros(self, prompt: int, cached: int, output: int, machine_us: int = 0) -> int:
        """`cached` is a part of `prompt`."""
        return (self._exact(prompt, cached, output, machine_us) + MICROS // 2) // MICROS

    def of_hit(self, prompt: int, cached: int, output: int, machine_us: int = 0) -> int:
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
    """Prices by variants' full names. A variant without a price has its model's, and a model without one is free."""

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._prices = dict(prices or {})

    @classmethod
    def from_config(cls, prices: Mapping[str, PriceConfig]) -> PriceBook:
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
            }
        )

    def of(self, variant: str) -> Price:
        found = self._prices.get(variant)
        if found is None:
            found = self._prices.get(variant.partition("@")[0], FREE)
        return found


def make_price(
    *,
    input: str | float = 0,
    cached: str | float | None = None,  # as `input` by default
    output: str | float = 0,
    second: str | float = 0,
    hit_percent: int = 0,
) -> Price:
    """From amounts of the currency: per million tokens, and per second. PriceError for what is none."""
    if not 0 <= hit_percent <= 100:
        raise PriceError(f"a price for hits must be from 0 to 100 percent, and {hit_percent} is not")
    return Price(
        parse_micros(input),
        parse_micros(input if cached is None else cached),
        parse_micros(output),
        parse_micros(second),
        hit_percent,
    )


def parse_micros(amount: str | float | Decimal, *, most: int = MOST_PRICE) -> int:
    """0.15 → 150000. A float counts as the shortest decimal that it is written as. PriceError for what is none."""
    try:
        exact = Decimal(str(amount)).scaleb(6)
        found = int(exact)
    except (InvalidOperation, ValueError, OverflowError):
        raise PriceError(f"'{amount}' is no amount") from None
    if found != exact:
        raise PriceError(f"'{amount}' has more than six decimals")
    if not 0 <= found <= most:
        raise PriceError(f"'{amount}' is not from 0 to {most // MICROS}")
    return found


def format_micros(micros: int) -> str:
    """150000 → 0.150000."""
    whole, rest = divmod(abs(micros), MICROS)
    return f"{'-' if micros < 0 else ''}{whole}.{rest:06d}"


def microseconds(seconds: float) -> int:
    """A measured time as a whole number. What cannot have been measured counts as nothing."""
    if not math.isfinite(seconds) or seconds <= 0:
        return 0
    return min(math.floor(seconds * 1e6 + 0.5), 10**13)  # at most 115 days
