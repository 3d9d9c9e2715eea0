"""Option: a variant or profile to choose instead of a model. OptionQuality: what gates, canaries and shadows found.

Reads results; measures nothing itself. Results of `headrace gate --json` are files in the folder `safety.gates`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.lab.online.canaries import Canaries
from headrace.lab.online.shadows import Shadow
from headrace.observe.latency.latency_book import Slice

log: Final = logging.getLogger(__name__)

_MOST_FILES: Final = 64
_MOST_BYTES: Final = 16 * 1024**2


_ANSWERED: Final = frozenset(
    {"exact", "stale", "shared", "semantic", "extract", "catalogue"}
)  # routes of answers from caches


class Option(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str  # profile, variant, cascade or surface
    about: str
    request: Mapping[str, Any] = {}  # fields that choose it; empty: the operator's routing does
    variants: frozenset[str] = frozenset()  # that answer
    profile: str = "standard"
    surface: str = ""  # any, if empty
    is_cascade: bool = False

    def covers(self, slice: Slice) -> bool:
        return (
            slice.model in self.variants
            and slice.profile == self.profile
            and slice.route not in _ANSWERED
            and (slice.route == "cascade") == self.is_cascade
            and self.surface in ("", slice.surface)
        )


class _Metric(msgspec.Struct, frozen=True):
    """What is read of a gate's metric."""

    name: str
    verdict: str
    candidate: float | None = None
    baseline: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None


class _Gate(msgspec.Struct, frozen=True):
    """What is read of a gate's result."""

    passed: bool
    candidate: str
    baseline: str
    started_at: str
    cases: int
    metrics: list[_Metric]


class OptionQuality:
    def __init__(self, gates: Path | None, canaries: Canaries | None, shadows: Mapping[str, Shadow]) -> None:
        self._folder = gates
        self._canaries = canaries
        self._shadows = shadows
        self._read: dict[Path, tuple[int, _Gate | None]] = {}  # by the time of the file's last change

    def of(self, option: Option, base: str) -> list[dict[str, Any]]:
        """Return the evidence, the strongest first: gates, then canaries, then shadows."""
        found: list[dict[str, Any]] = []
        if option.kind == "variant":
            found += [_gate_json(gate) for gate in self._gates() if _names(gate) == (option.name, base)][:1]
            found += self._canary(option.name, base)
        for shadow in self._shadows.values():
            found += _shadow(shadow, option, base)
        return found

    def _canary(self, candidate: str, control: str) -> list[dict[str, Any]]:
        canaries = self._canaries
        record = None if canaries is None else canaries.operations.records().get(control)
        if canaries is None or record is None or record.candidate != candidate:
            return []
        shown = canaries.as_json(control)
        agreement = canaries.agreement.get(record.run)
        summary = f"canary {record.phase}"
        if agreement is not None and agreement.compared:
            summary += f", answers agree to {agreement.similarity / agreement.compared:.2f}"
        return [{"by": "canary", "phase": record.phase, "evidence": shown.get("evidence"), "summary": summary}]

    def _gates(self) -> list[_Gate]:
        """Return the results in the folder, the newest first. Files that are none are skipped."""
        if self._folder is None:
            return []
        try:
            files = sorted(self._folder.glob("*.json"))[:_MOST_FILES]
        except OSError:
            return []
        self._read = {path: each for path, each in self._read.items() if path in files}
        for path in files:
            self._read_file(path)
        gates = [gate for _, gate in self._read.values() if gate is not None]
        return sorted(gates, key=lambda gate: gate.started_at, reverse=True)

    def _read_file(self, path: Path) -> None:
        try:
            status = path.stat()
            known = self._read.get(path)
            if known is not None and known[0] == status.st_mtime_ns:
                return
            gate = None
            if status.st_size <= _MOST_BYTES:
                gate = msgspec.json.decode(path.read_bytes(), type=_Gate)
            self._read[path] = (status.st_mtime_ns, gate)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s is not the result of a gate and is skipped: %s", path, error)
            self._read[path] = (path.stat().st_mtime_ns if path.exists() else 0, None)


def _names(gate: _Gate) -> tuple[str, str]:
    """Return the variants, without the URL of a server that answered for one."""
    candidate, baseline = (name.rpartition("#")[2] for name in (gate.candidate, gate.baseline))
    return candidate, baseline


def _gate_json(gate: _Gate) -> dict[str, Any]:
    failed = [metric.name for metric in gate.metrics if metric.verdict == "fail"]
    open_ = sum(metric.verdict == "inconclusive" for metric in gate.metrics)
    summary = f"gate {'passed' if gate.passed else 'failed'} on {gate.cases} prompts"
    if failed:
        summary += f" ({', '.join(failed[:3])})"
    elif open_:
        summary += f" ({open_} of {len(gate.metrics)} metrics inconclusive)"
    metrics = [msgspec.to_builtins(metric) for metric in gate.metrics]
    return {
        "by": "gate",
        "passed": gate.passed,
        "prompts": gate.cases,
        "at": gate.started_at,
        "metrics": metrics,
        "summary": summary,
    }


def _shadow(shadow: Shadow, option: Option, base: str) -> list[dict[str, Any]]:
    """Return what a shadow found of an option's answers beside those of what it replaces, or the other way round."""
    if option.kind not in ("profile", "variant") or shadow.profile != option.profile:
        return []
    pair = {base, *option.variants}
    summaries = [summary for (served, _), summary in shadow.by_route.items() if {served, shadow.variant} == pair]
    if not summaries:
        return []
    found = max((each.as_json() for each in summaries), key=lambda each: each["compared"])
    error = "" if found["similarity_error"] is None else f" ± {found['similarity_error']:.2f}"
    summary = f"answers agree to {found['similarity']:.2f}{error} in {found['compared']} shadow comparisons"
    return [{"by": "shadow", "shadow": shadow.name, "differences": found, "summary": summary}]
