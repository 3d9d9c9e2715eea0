"""An engine on the tiny model, and requests run to their end on it, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.variant import Variant

PROMPT = tuple(range(5, 60))


def open_tiny(folder: Path, **options: Any) -> OpenedVariant:
    """The tiny model as most tests want it; the books are checked whenever the engine is idle."""
    defaults: dict[str, Any] = {
        "weights": "int8",
        "threads": 2,
        "context": 256,
        "kv_tokens": 2048,
        "cache": False,
        "speculation": "none",
        "checks": True,
    }
    return open_variant(Variant.of(str(folder), **(defaults | options)))


def run(
    engine: Engine,
    requests: Iterable[GenerationRequest],
    *,
    output: dict[str, tuple[int, ...]] | None = None,
    at_step: Callable[[int], None] = lambda step: None,
) -> dict[str, list[SequenceResult]]:
    """All requests to their end, submitted together; `at_step` is called before every step with its number."""
    answers: dict[str, list[SequenceResult]] = {}
    for request in requests:
        admission = engine.submit(request, output=(output or {}).get(request.id, ()))
        assert admission.accepted, admission.why
        answers[request.id] = [SequenceResult(index) for index in range(request.n)]
    step = 0
    while not engine.idle:
        at_step(step)
        for made in engine.step():
            if made.request in answers:
                answers[made.request][made.index].add(made)
        step += 1
        assert step < 20_000
    engine.blocks.check()
    return answers


def one(engine: Engine, request: GenerationRequest, *, output: tuple[int, ...] = ()) -> SequenceResult:
    """The answer of a request with one sequence, run alone."""
    return run(engine, [request], output={request.id: output})[request.id][0]


def tokens(answers: dict[str, list[SequenceResult]]) -> dict[str, list[list[int]]]:
    return {id: [answer.tokens for answer in found] for id, found in answers.items()}
