"""Gates the lossy levels of a tuning by their answers, with the lab's gate: its metrics, tests and thresholds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from headrace.bench.tuning.quality_gate import AnswersGate
from headrace.bench.tuning.search import Gate
from headrace.lab.answering.model_server import AnswererSpec
from headrace.lab.cases.prompt_file import read_cases
from headrace.lab.gate.gate import run_gate
from headrace.lab.gate.thresholds import read_thresholds
from headrace.variant import Variant

_SPEED: Final = ("ttft", "tpot", "e2el")


def answers_gate(prompts: Path, thresholds: Path | None = None) -> AnswersGate:
    """Return a gate on the prompts of a file. Raise RequestError now for a file that cannot be read."""
    cases = read_cases(prompts)
    limits = read_thresholds(thresholds)
    if thresholds is None:  # the tuning measures speed itself, in pairs
        limits = replace(limits, limits={**limits.limits, **dict.fromkeys(_SPEED)})

    def gate(candidate: Variant, reference: Variant) -> Gate:
        specs = [AnswererSpec(name=each.name, variant=each) for each in (candidate, reference)]
        result = asyncio.run(run_gate(cases, specs[0], specs[1], limits))
        failed = [metric.name for metric in result.metrics if metric.verdict == "fail"]
        reason = f"answers to {result.cases} prompts pass" if result.passed else f"answers fail: {', '.join(failed)}"
        return Gate(passed=result.passed, reason=reason, figures={"cases": float(result.cases)})

    return gate
