"""Reads the gate's thresholds from a TOML file: the level, a limit for each metric, prices. Every key has a default."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from headrace.config.ledger_section import PriceConfig
from headrace.errors import RequestError, similar_names
from headrace.gateway.ledger.prices import PriceBook, PriceError
from headrace.lab.gate.metrics import ESTIMATES, METRICS, NAMES

OFF: Final = False  # in a file: this metric is shown and not tested


class GateSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Annotated[float, Meta(gt=0, lt=0.5)] = 0.05  # chance that a candidate as good as the limits fails
    strict: bool = False  # fail, too, if there are too few prompts to exclude a breach
    few: Annotated[int, Meta(ge=1, le=1000)] = 5  # fewer values are not tested
    seed: int = 0  # of bootstrap and permutations


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gate: GateSection = GateSection()
    limits: dict[str, float | bool] = {}
    prices: dict[str, PriceConfig] = {}


class GateThresholds(msgspec.Struct, frozen=True, kw_only=True):
    gate: GateSection = GateSection()
    limits: Mapping[str, float | None]  # by metric; None: not tested
    prices: PriceBook | None = None  # of "candidate" and "baseline"


def default_limits() -> dict[str, float | None]:
    return {metric.name: metric.limit for metric in (*METRICS, *ESTIMATES)}


def read_thresholds(path: Path | None = None) -> GateThresholds:
    """Return the defaults, or those of a file over them. RequestError that names the key for a mistake."""
    limits = default_limits()
    if path is None:
        return GateThresholds(limits=limits)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(raw, _File)
    except FileNotFoundError:
        raise RequestError(f"There is no file {path}.", parameter="thresholds") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise RequestError(f"{path}: {error}", parameter="thresholds") from None
    for name, limit in cast(dict[str, Any], found.limits).items():
        if name not in NAMES:
            similar = similar_names(name, NAMES, cutoff=0.6)
            hint = f"Did you mean '{similar[0]}'?" if similar else f"Known: {', '.join(NAMES)}."
            raise RequestError(f"{path}: unknown metric 'limits.{name}'. {hint}", parameter="thresholds")
        if limit is True:
            continue  # the default
        limits[name] = None if limit is False else _checked(path, name, float(limit))
    return GateThresholds(gate=found.gate, limits=limits, prices=_prices(path, found.prices))


def _checked(path: Path, name: str, limit: float) -> float:
    kinds = {metric.name: str(metric.kind) for metric in (*METRICS, *ESTIMATES)}
    least, most = (1.0, 1000.0) if kinds[name] in ("ratio", "drift") else (0.0, 1000.0 if name == "kl" else 1.0)
    if not least <= limit <= most:
        raise RequestError(
            f"{path}: limits.{name} must be {least:g} to {most:g}, not {limit:g}.", parameter="thresholds"
        )
    return limit


def _prices(path: Path, prices: Mapping[str, PriceConfig]) -> PriceBook | None:
    for name in prices:
        if name not in ("candidate", "baseline"):
            raise RequestError(
                f"{path}: unknown table prices.{name}. Known: candidate, baseline.", parameter="thresholds"
            )
    try:
        return PriceBook.from_config(prices) if prices else None
    except PriceError as error:
        raise RequestError(f"{path}: prices: {error}.", parameter="thresholds") from None


def thresholds_toml() -> str:
    """Return a file with every default, as `headrace gate --print-thresholds` prints it."""
    lines = ["[gate]"]
    lines += [f"{name} = {_toml(value)}" for name, value in msgspec.structs.asdict(GateSection()).items()]
    lines += ["", "[limits]  # false: shown, but not tested"]
    for metric in (*METRICS, *ESTIMATES):
        lines.append(
            f"{metric.name} = {_toml(OFF if metric.limit is None else metric.limit)}  # {_meaning(metric.kind)}"
        )
    lines += [
        "",
        "# Prices per million tokens, for the metric cost; keys as in [prices.NAME] of headrace.toml",
        "#[prices.candidate]",
        "#input = 0.10",
        "#output = 0.40",
        "#[prices.baseline]",
        "#input = 0.15",
        "#output = 0.60",
    ]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _meaning(kind: str) -> str:
    return {
        "share": "share of answers, at least",
        "mean": "mean, at least",
        "drop": "drop of the share of good answers against the baseline, at most",
        "mean_drop": "drop of the mean against the baseline, at most",
        "ratio": "candidate / baseline, at most",
        "drift": "candidate / baseline, at most, and at least its inverse",
    }.get(kind, kind)
