"""Checks the routing configuration beyond the types of its values: names that exist, shares that add up.

Yields every problem with its key, so that all of them are reported at once before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headrace.config.routing_section import ChainConfig, RoutingConfig, RuleConditions, RuleConfig
from headrace.config.toml_text import key_path, quoted
from headrace.gateway.language_detection import LANGUAGES
from headrace.gateway.routing.calibration import CalibrationError, read_labelled
from headrace.gateway.routing.complexity import ClassifierError, read_classifier
from headrace.gateway.routing.rewrite import NO_REWRITE
from headrace.gateway.routing.rules import parse_hours
from headrace.gateway.routing.splits import Split
from headrace.surfaces import SURFACES

Finding = tuple[str, str]  # a key by its path, and what is wrong with it

PROFILES: Final = ("standard", "fast", "golden")
_TARGETS: Final = ("variant", "split", "cascade", "chain", "opening")


def findings(config: RoutingConfig, variants: Collection[str], *, where: str = "routing") -> Iterator[Finding]:
    """Yield every problem. `variants`: the full names of all served variants, upstreams included."""
    try:
        ZoneInfo(config.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        yield f"{where}.timezone", f"unknown time zone {quoted(config.timezone)}"
    if config.complexity is not None:
        try:
            read_classifier(Path(config.complexity).expanduser())
        except (ClassifierError, RuntimeError) as error:
            yield f"{where}.complexity", str(error)
    names: dict[str, int] = {}
    for place, rule in enumerate(config.rules):
        here = f"{where}.rules[{place}]"
        first = names.setdefault(rule.name, place)
        if first != place:
            yield f"{here}.name", f"duplicate name {quoted(rule.name)}: rules[{first}] has it too"
        yield from _rule(rule, config, variants, here)
    for name, split in config.splits.items():
        here = f"{where}.{key_path('splits', name)}.percent"
        for variant in split.percent:
            yield from _known("variant", variant, variants, f"{here}.{key_path(variant)}")
        try:
            Split.of(name, split.percent, split.salt)
        except ValueError as error:
            yield here, str(error)
    for name, cascade in config.cascades.items():
        here = f"{where}.{key_path('cascades', name)}"
        yield from _known("variant", cascade.small, variants, f"{here}.small")
        yield from _known("variant", cascade.large, variants, f"{here}.large")
        if cascade.small == cascade.large:
            yield f"{here}.large", "expected a variant other than `small`"
        if (cascade.threshold is None) == (cascade.calibration is None):
            given = "none" if cascade.threshold is None else "both"
            yield here, f"expected exactly one of threshold and calibration, found {given}"
        elif cascade.calibration is not None:
            try:
                read_labelled(Path(cascade.calibration).expanduser())
            except (CalibrationError, RuntimeError) as error:
                yield f"{here}.calibration", str(error)
    for name, opening in config.openings.items():
        here = f"{where}.{key_path('openings', name)}"
        yield from _known("variant", opening.small, variants, f"{here}.small")
        yield from _known("variant", opening.large, variants, f"{here}.large")
        if opening.small == opening.large:
            yield f"{here}.large", "expected a variant other than `small`"
    yield from _rewrites(config, variants, where)
    for name, chain in config.chains.items():
        yield from _chain(chain, variants, f"{where}.{key_path('chains', name)}")
    for variant, hedge in config.hedges.items():
        here = f"{where}.{key_path('hedges', variant)}"
        yield from _known("variant", variant, variants, here)
        if hedge.least_ms > hedge.most_ms:
            yield f"{here}.most_ms", f"expected at least least_ms, {hedge.least_ms:g}, found {hedge.most_ms:g}"
    golden = config.golden
    if golden.variant is not None:
        yield from _known("variant", golden.variant, variants, f"{where}.golden.variant")
    elif golden.checks and not any(name.endswith("@golden") for name in variants):
        yield f"{where}.golden.variant", "no model has a variant named golden. Add one, or name another variant here"
    for place, variant in enumerate(golden.of):
        yield from _known("variant", variant, variants, f"{where}.golden.of[{place}]")
    for name, shadow in config.shadows.items():
        here = f"{where}.{key_path('shadows', name)}"
        yield from _known("variant", shadow.variant, variants, f"{here}.variant")
        for place, variant in enumerate(shadow.of):
            yield from _known("variant", variant, variants, f"{here}.of[{place}]")
        if shadow.of == (shadow.variant,) and shadow.profile == "standard":
            yield f"{here}.of", "expected a variant other than `variant`"
        if shadow.pairs and shadow.judge != "shadow":
            yield f"{here}.pairs", 'no pairs are kept without judge = "shadow". Set that, or remove `pairs`'
    yield from config.breaker.check(f"{where}.breaker")


def _rule(rule: RuleConfig, config: RoutingConfig, variants: Collection[str], where: str) -> Iterator[Finding]:
    given = [name for name in _TARGETS if getattr(rule, name) is not None]
    if len(given) != 1:
        yield where, f"expected exactly one of {', '.join(_TARGETS)}, found {' and '.join(given) or 'none'}"
    tables: Mapping[str, Collection[str]] = {
        "variant": variants,
        "split": config.splits,
        "cascade": config.cascades,
        "chain": config.chains,
        "opening": config.openings,
    }
    for target in given:
        yield from _known(target, getattr(rule, target), tables[target], f"{where}.{target}")
    yield from _when(rule.when, f"{where}.when")


def _when(when: RuleConditions, where: str) -> Iterator[Finding]:
    for name, values, known in (
        ("surfaces", when.surfaces, SURFACES),
        ("profiles", when.profiles, PROFILES),
        ("languages", when.languages, sorted(LANGUAGES)),
    ):
        for place, value in enumerate(values):
            yield from _known(name[:-1], value, known, f"{where}.{name}[{place}]")
    for place, hours in enumerate(when.hours):
        try:
            parse_hours(hours)
        except ValueError:
            yield f"{where}.hours[{place}]", f'expected hours such as "22:00-06:00", found {quoted(hours)}'
    for name in ("tokens", "characters", "complexity"):
        least: Any = getattr(when, f"least_{name}")
        most: Any = getattr(when, f"most_{name}")
        if least is not None and most is not None and least > most:
            yield f"{where}.most_{name}", f"expected at least least_{name}, {least:g}, found {most:g}"


def _rewrites(config: RoutingConfig, variants: Collection[str], where: str) -> Iterator[Finding]:
    by_surface: dict[str, str] = {}
    for name, rewrite in config.rewrites.items():
        here = f"{where}.{key_path('rewrites', name)}"
        if name == NO_REWRITE:
            yield here, f'expected a name other than "{NO_REWRITE}", with which a request declines to be rewritten'
        if rewrite.variant is not None:
            yield from _known("variant", rewrite.variant, variants, f"{here}.variant")
        for place, surface in enumerate(rewrite.surfaces):
            yield from _known("surface", surface, SURFACES, f"{here}.surfaces[{place}]")
            other = by_surface.setdefault(surface, name)
            if other != name:
                yield f"{here}.surfaces[{place}]", f"{quoted(surface)} is rewritten by {quoted(other)} already"


def _chain(chain: ChainConfig, variants: Collection[str], where: str) -> Iterator[Finding]:
    if not chain.steps:
        yield f"{where}.steps", "expected at least one step"
    for place, step in enumerate(chain.steps):
        yield from _known("variant", step.variant, variants, f"{where}.steps[{place}].variant")


def _known(kind: str, name: str, known: Collection[str], where: str) -> Iterator[Finding]:
    if name not in known:
        expected = ", ".join(map(quoted, known)) or "none"
        yield where, f"unknown {kind} {quoted(name)}; known {kind}s: {expected}"
