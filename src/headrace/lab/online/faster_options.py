"""FasterOptions: what a caller may choose instead of a model, and its measured price: latency, cost and quality.

Latency and cost come from this server's own traffic, since it started. Both sides are compared request for request of
the same surface and prompt length only, so that a different mix of requests does not count as a difference. Quality
comes from OptionQuality. Chooses nothing itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from headrace.config import Config, names_of
from headrace.gateway.ledger.prices import Price, PriceBook, format_micros
from headrace.lab.online.option_quality import Option, OptionQuality
from headrace.observe.latency.latency_book import LatencyBook, Row
from headrace.observe.latency.sketch import Sketch

LEAST: Final = 20  # requests of each side, for a comparison
MEASURES: Final = ("ttft", "tpot", "e2e")
_NOTE_S: Final = 30.0  # seconds that a note of an answer stays as it is

Stratum = tuple[str, str]  # surface and prompt length


class FasterOptions:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        config: Config,
        book: LatencyBook,
        quality: OptionQuality,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._book = book
        self._quality = quality
        self._prices = PriceBook.from_config(config.prices, config.models)
        self._clock = clock
        self._names = frozenset(names_of(config))
        self._notes: dict[tuple[str, str], tuple[float, dict[str, Any] | None]] = {}

    def options(self, variant: str, surface: str, allowed: Iterable[str]) -> list[Option]:
        """Return what there is instead of a variant. `surface`: its default; `allowed`: variants of the caller."""
        found = [self._fast(variant)]
        base, names = _without_variant(variant), list(allowed)
        for name in names:
            if name != variant and _without_variant(name) == base:
                about, request = f"the variant {name}", {"model": name}
                found.append(
                    Option(name=name, kind="variant", about=about, request=request, variants=frozenset({name}))
                )
        for name, cascade in self._config.routing.cascades.items():
            if cascade.large == variant and cascade.small in names:
                about = f"{cascade.small} answers where it is confident, {cascade.large} otherwise"
                both = frozenset({cascade.small, cascade.large})
                found.append(Option(name=name, kind="cascade", about=about, variants=both, is_cascade=True))
        used = {slice.surface for slice, _ in self._book.total() if slice.model == variant} - {"-", surface}
        for name in sorted(used | set(self._config.surfaces) - {surface}):
            about, request = f"the surface {name} in place of {surface}", {"surface": name}
            variants = frozenset({variant})
            found.append(
                Option(name=name, kind="surface", about=about, request=request, variants=variants, surface=name)
            )
        return found

    def _fast(self, variant: str) -> Option:
        fast = self._config.profiles.fast
        about = f"at most {fast.max_tokens} tokens, temperature up to {fast.temperature:g}, top_p up to {fast.top_p:g}"
        if not fast.think:
            about += ", no reasoning"
        if (answers := self._fast_variant(variant)) != variant:
            about += f", answered by {answers}"
        variants = frozenset({answers})
        return Option(
            name="fast", kind="profile", about=about, request={"profile": "fast"}, variants=variants, profile="fast"
        )

    def _fast_variant(self, variant: str) -> str:
        """Return what answers requests in the fast profile: the model's variant `fast`, if there is one."""
        name = f"{variant}@fast"
        return name if "@" not in variant and name in self._names else variant

    def as_json(self, variant: str, surface: str, allowed: Iterable[str]) -> dict[str, Any]:
        base = Option(name=variant, kind="variant", about="", variants=frozenset({variant}))
        data = [self._priced(base, surface, each) for each in self.options(variant, surface, allowed)]
        return {
            "object": "list",
            "model": variant,
            "currency": self._config.ledger.currency,
            "price": _price(self._prices.of(variant)),
            "requests": sum(row.requests for slice, row in self._book.total() if base.covers(slice)),
            "data": data,
        }

    def note(self, variant: str, option: str) -> dict[str, Any] | None:
        """Return the price of an option in short, for the answer to a request that chose it; None if none is known."""
        model = variant.removesuffix(f"@{option}")
        variant = model if self._fast_variant(model) == variant else variant
        now, key = self._clock(), (variant, option)
        known = self._notes.get(key)
        if known is None or now - known[0] > _NOTE_S:
            self._notes[key] = known = (now, self._short(variant, option))
        return known[1]

    def _short(self, variant: str, option: str) -> dict[str, Any] | None:
        base = Option(name=variant, kind="variant", about="", variants=frozenset({variant}))
        priced = self._priced(base, "", self._fast(variant))
        if priced["latency"] is None and not priced["quality"]:
            return None
        return {"name": option, "price": priced["summary"]}

    def _priced(self, base: Option, surface: str, option: Option) -> dict[str, Any]:
        is_surface = option.kind == "surface"
        if is_surface:
            base = msgspec.structs.replace(base, surface=surface)
        ours, theirs = self._strata(option, is_surface), self._strata(base, is_surface)
        shared = ours.keys() & theirs.keys()
        requests = sum(ours[each].requests for each in shared)
        latency = cost = None
        if min(requests, sum(theirs[each].requests for each in shared)) >= LEAST:
            latency = {name: found for name in MEASURES if (found := _compared(ours, theirs, shared, name)) is not None}
            cost = _costs(ours, theirs, shared)
        quality = self._quality.of(option, base.name)
        entry: dict[str, Any] = {
            "option": option.name,
            "kind": option.kind,
            "about": option.about,
            "request": dict(option.request),
            "requests": sum(row.requests for row in ours.values()),
            "compared": requests,
            "latency": latency or None,
            "cost": cost,
            "quality": quality,
        }
        if option.kind == "variant":
            entry["price"] = _price(self._prices.of(option.name))
        entry["summary"] = _summary(entry)
        return entry

    def _strata(self, option: Option, is_surface: bool) -> dict[Stratum, Row]:
        found: dict[Stratum, Row] = {}
        for slice, row in self._book.total():
            if option.covers(slice):
                key = ("" if is_surface else slice.surface, slice.length)
                found.setdefault(key, Row()).merge(row)
        return found


def _without_variant(name: str) -> str:
    """Return the model, with its adapter: `mini` of `mini@int4`, and `mini:orders` of `mini@int4:orders`."""
    model, _, variant = name.partition("@")
    _, colon, adapter = variant.partition(":")
    return model + colon + adapter


def _compared(
    ours: Mapping[Stratum, Row], theirs: Mapping[Stratum, Row], shared: Iterable[Stratum], name: str
) -> dict[str, Any] | None:
    """Return the medians of a latency, and the mean change of the median within one surface and prompt length."""
    mine, other, change, weights = Sketch(), Sketch(), 0.0, 0
    for each in shared:
        its, base = ours[each].sketches.get(name), theirs[each].sketches.get(name)
        if its is None or base is None:
            continue
        mine.merge(its)
        other.merge(base)
        weight = min(its.count, base.count)
        (one,), (two,) = its.quantiles((0.5,)), base.quantiles((0.5,))
        if weight and one > 0.0 and two > 0.0:
            change += weight * math.log(one / two)
            weights += weight
    if not weights:
        return None
    (p50,), (base_p50,) = mine.quantiles((0.5,)), other.quantiles((0.5,))
    return {
        "p50_ms": round(1e3 * p50, 3),
        "base_p50_ms": round(1e3 * base_p50, 3),
        "change": round(math.exp(change / weights) - 1.0, 4),
    }


def _costs(
    ours: Mapping[Stratum, Row], theirs: Mapping[Stratum, Row], shared: Iterable[Stratum]
) -> dict[str, Any] | None:
    """Return the price of a thousand requests of the option's mix, by the option and by what it replaces; None if both
    are free."""
    requests, mine, other, machine, other_machine = 0, 0.0, 0.0, 0.0, 0.0
    for each in shared:
        row, base = ours[each], theirs[each]
        requests += row.requests
        mine += row.micros
        machine += row.machine_s
        other += base.micros / base.requests * row.requests
        other_machine += base.machine_s / base.requests * row.requests
    scale = 1000.0 / requests
    return {
        "micros_per_1000_requests": round(mine * scale),
        "base_micros_per_1000_requests": round(other * scale),
        "change": round(mine / other - 1.0, 4) if other else None,
        "machine_s_per_1000_requests": round(machine * scale, 3),
        "base_machine_s_per_1000_requests": round(other_machine * scale, 3),
        "machine_change": round(machine / other_machine - 1.0, 4) if other_machine else None,
    }


def _price(price: Price) -> dict[str, str] | None:
    """Return amounts of the currency: per million tokens, and per second of machine time."""
    if price.free:
        return None
    return {name: format_micros(getattr(price, name)) for name in ("input", "cached", "output", "second")}


def _summary(entry: Mapping[str, Any]) -> str:
    parts: list[str] = []
    latency, cost = entry["latency"], entry["cost"]
    if latency is None:
        parts.append(f"latency and cost not measured yet: {entry['compared']} of {LEAST} comparable requests")
    else:
        names = {"ttft": "first token", "e2e": "whole answer"}
        parts += [f"{names[name]} {_change(latency[name]['change'])}" for name in names if name in latency]
    if cost is not None:
        if cost["change"] is not None:
            parts.append(f"price {_change(cost['change'])}")
        elif cost["machine_change"] is not None:
            parts.append(f"machine time {_change(cost['machine_change'])}")
    parts += [each["summary"] for each in entry["quality"]] or ["quality not measured"]
    return "; ".join(parts)


def _change(share: float) -> str:
    return f"{100.0 * share:+.0f} %".replace("-", "\N{MINUS SIGN}")
