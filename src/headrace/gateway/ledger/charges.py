"""Calculates a request's estimated cost, its cost so far, and its final charge.

Uses the price at the time of the reservation. Learns the machine time per token of variants that are priced by it.
"""

from __future__ import annotations

from typing import Final

from headrace.gateway.ledger.holds import OpenCharge
from headrace.gateway.ledger.ledger_records import CRASHED, LedgerEntry, ReservedCharge, Settlement
from headrace.gateway.ledger.prices import MOST_TOKENS, PriceBook, microseconds
from headrace.gateway.requests.text_request import TokenUsage

_SOURCE_CHARACTERS: Final = 64  # of the name of a source of savings


class ChargeCalculator:
    def __init__(self, prices: PriceBook) -> None:
        self.prices = prices
        self._pace: dict[str, float] = {}  # microseconds of machine time per token, by variant

    def estimate(self, entry: LedgerEntry, variant: str, output_tokens: int, machine_s: float) -> int:
        """Estimate the cost in micros, assuming that no prompt token is cached."""
        price = self.prices.of(variant)
        machine_us = microseconds(machine_s) or self._paced(variant, entry.prompt_tokens + output_tokens)
        return price.micros(entry.prompt_tokens, 0, output_tokens, machine_us if price.second else 0)

    def advance(self, open: OpenCharge, output_tokens: int, machine_s: float) -> None:
        """Record the progress of a running request."""
        open.output_tokens = output_tokens = _clamp_tokens(output_tokens)
        entry = open.reserved.entry
        if open.reserved.price.second:
            open.machine_us = microseconds(machine_s) or self._paced(entry.variant, entry.prompt_tokens + output_tokens)

    def cost_at(self, open: OpenCharge, output_tokens: int) -> int:
        """Return the charge in micros if the request had this many output tokens."""
        price, entry = open.reserved.price, open.reserved.entry
        machine_us = open.machine_us + self._paced(entry.variant, max(0, output_tokens - open.output_tokens))
        return price.micros(entry.prompt_tokens, 0, output_tokens, machine_us if price.second else 0)

    def settlement(
        self,
        reserved: ReservedCharge,
        usage: TokenUsage,
        ended: str,
        *,
        variant: str,
        hit: str,
        instead_of: str,
        route: str,
    ) -> Settlement:
        variant = variant or reserved.entry.variant
        price = reserved.price if variant == reserved.entry.variant else self.prices.of(variant)
        machine_us = microseconds(usage.prefill_s + usage.decode_s)
        prompt, output = _clamp_tokens(usage.prompt_tokens), _clamp_tokens(usage.output_tokens)
        tokens = (prompt, min(_clamp_tokens(usage.cached_tokens), prompt), output)
        if not hit:
            self._learn(variant, prompt + output, machine_us)
        if not machine_us and price.second:  # not measured: the client left, a limit ended it, or it is a cache hit
            machine_us = self._paced(variant, prompt + output)
        micros = price.micros(*tokens, machine_us)
        saved: dict[str, int] = {}
        if hit:
            whole, micros = micros, price.hit_micros(*tokens, machine_us)
            saved[hit[:_SOURCE_CHARACTERS]] = whole - micros
            machine_us = 0
        else:
            if tokens[1]:
                saved["prefix"] = price.micros(prompt, 0, output, machine_us) - micros
            if instead_of and instead_of != variant:
                saved[route[:_SOURCE_CHARACTERS]] = self.prices.of(instead_of).micros(*tokens, machine_us) - micros
        return Settlement(variant, ended, *tokens, machine_us, micros, saved)

    def _learn(self, variant: str, tokens: int, machine_us: int) -> None:
        if tokens and machine_us and self.prices.of(variant).second:
            seen = machine_us / tokens
            self._pace[variant] = seen + 0.9 * (self._pace.get(variant, seen) - seen)

    def _paced(self, variant: str, tokens: int) -> int:
        return int(self._pace.get(variant, 0.0) * tokens)


def _clamp_tokens(tokens: int) -> int:
    """Clamp a token count that an upstream reported."""
    return max(0, min(tokens, MOST_TOKENS))


def crash_settlement(reserved: ReservedCharge, output_tokens: int, machine_us: int) -> Settlement:
    """Settle a request whose server died by its last progress; without output it costs nothing."""
    if not output_tokens:
        return Settlement(reserved.entry.variant, CRASHED, 0, 0, 0, 0, 0, {})
    prompt = reserved.entry.prompt_tokens
    micros = reserved.price.micros(prompt, 0, output_tokens, machine_us)
    return Settlement(reserved.entry.variant, CRASHED, prompt, 0, output_tokens, machine_us, micros, {})
