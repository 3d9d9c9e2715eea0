"""What an exchange is expected to cost, what it is worth so far, and what it is charged.

Owns those three calculations, and the learned pace of variants that are paid by machine time. A price is the one of the
moment of the reservation. No sums and no limits here.
"""

from __future__ import annotations

from typing import Final

from headrace.gateway.ledger.holds import OpenCharge
from headrace.gateway.ledger.ledger_records import CRASHED, LedgerEntry, ReservedCharge, Settlement
from headrace.gateway.ledger.prices import MOST_TOKENS, PriceBook, microseconds
from headrace.gateway.requests.text_request import TokenUsage

_SOURCE: Final = 64  # characters of the name of what saved money


class ChargeCalculator:
    def __init__(self, prices: PriceBook) -> None:
        self.prices = prices
        self._pace: dict[str, float] = {}  # microseconds of machine time per token, by variant

    def estimate(self, entry: LedgerEntry, variant: str, output_tokens: int, machine_s: float) -> int:
        """Nothing of a prompt counts as cached before that is known."""
        price = self.prices.of(variant)
        machine_us = microseconds(machine_s) or self._paced(variant, entry.prompt_tokens + output_tokens)
        return price.micros(entry.prompt_tokens, 0, output_tokens, machine_us if price.second else 0)

    def advance(self, open: OpenCharge, output_tokens: int, machine_s: float) -> None:
        """It has come this far."""
        open.output_tokens = output_tokens = _believed(output_tokens)
        entry = open.reserved.entry
        if open.reserved.price.second:
            open.machine_us = microseconds(machine_s) or self._paced(entry.variant, entry.prompt_tokens + output_tokens)

    def worth(self, open: OpenCharge, output_tokens: int) -> int:
        """What it would be charged with so many."""
        price, entry = open.reserved.price, open.reserved.entry
        machine_us = open.machine_us + self._paced(entry.variant, max(0, output_tokens - open.output_tokens))
        return price.micros(entry.prompt_tokens, 0, output_tokens, machine_us if price.second else 0)

    def judge(
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
        prompt, output = _believed(usage.prompt_tokens), _believed(usage.output_tokens)
        tokens = (prompt, min(_believed(usage.cached_tokens), prompt), output)
        if not hit:
            self._learn(variant, prompt + output, machine_us)
        if not machine_us and price.second:  # nobody has measured it: a client left, a limit ended it, it is a hit
            machine_us = self._paced(variant, prompt + output)
        micros = price.micros(*tokens, machine_us)
        saved: dict[str, int] = {}
        if hit:
            whole, micros = micros, price.of_hit(*tokens, machine_us)
            saved[hit[:_SOURCE]] = whole - micros
            machine_us = 0
        else:
            if tokens[1]:
                saved["prefix"] = price.micros(prompt, 0, output, machine_us) - micros
            if instead_of and instead_of != variant:
                saved[route[:_SOURCE]] = self.prices.of(instead_of).micros(*tokens, machine_us) - micros
        return Settlement(variant, ended, *tokens, machine_us, micros, saved)

    def _learn(self, variant: str, tokens: int, machine_us: int) -> None:
        if tokens and machine_us and self.prices.of(variant).second:
            seen = machine_us / tokens
            self._pace[variant] = seen + 0.9 * (self._pace.get(variant, seen) - seen)

    def _paced(self, variant: str, tokens: int) -> int:
        return int(self._pace.get(variant, 0.0) * tokens)


def _believed(tokens: int) -> int:
    """An upstream may say anything."""
    return max(0, min(tokens, MOST_TOKENS))


def crash_settlement(reserved: ReservedCharge, output_tokens: int, machine_us: int) -> Settlement:
    """Of an exchange whose server died: what it had come to, and nothing where that was nothing."""
    if not output_tokens:
        return Settlement(reserved.entry.variant, CRASHED, 0, 0, 0, 0, 0, {})
    prompt = reserved.entry.prompt_tokens
    micros = reserved.price.micros(prompt, 0, output_tokens, machine_us)
    return Settlement(reserved.entry.variant, CRASHED, prompt, 0, output_tokens, machine_us, micros, {})
