"""Runs the same requests with the engine and with ways to serve that lack one technique; the tokens are the same.

Each mode leaves out one thing: prefix reuse, continuous batching, any batching, or the KV cache.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

import msgspec

from headrace.bench.engine_runs import EngineJob, run_jobs
from headrace.engine.executors.runner import Runner
from headrace.engine.process.open_engine import OpenedVariant, open_variant
from headrace.errors import HeadraceError
from headrace.models.model_folder import ModelFolder
from headrace.variant import Variant

ModeName = Literal["engine", "no-prefix-reuse", "static-batches", "one-at-a-time", "no-kv-cache"]
MODES: Final[tuple[ModeName, ...]] = get_args(ModeName)


class ModeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the rounds; times in seconds."""

    mode: ModeName
    seconds: float
    tokens_per_s: float
    ttft_p50: float
    e2el_p50: float
    rows: int  # tokens computed
    times: float  # the engine's tokens per second over these
    same_tokens: bool  # as the engine's


def reference_jobs(
    vocab: int, *, requests: int, prompt: int, answer: int, shared: float = 0.5, seed: int = 0
) -> list[EngineJob]:
    """Draw requests that arrive at once, start with the same tokens and have answers of half to one and a half times
    `answer`."""
    rng = random.Random(seed)
    prefix = tuple(rng.randrange(vocab) for _ in range(round(prompt * shared)))
    jobs: list[EngineJob] = []
    for _ in range(requests):
        own = tuple(rng.randrange(vocab) for _ in range(max(1, prompt - len(prefix))))
        count = max(1, rng.randint(answer - answer // 2, answer + answer // 2))
        jobs.append(EngineJob(prompt=prefix + own, answer=count, surface="batch"))
    return jobs


def compare_modes(
    folder: ModelFolder,
    variant: Variant,
    jobs: Sequence[EngineJob],
    *,
    modes: Sequence[ModeName] = MODES,
    batch: int = 8,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _text: None,
) -> list[ModeResult]:
    """Run the modes in turns. Raise HeadraceError if a mode gives other tokens than the engine."""
    plain = msgspec.structs.replace(variant, speculation="none", draft_model=None, draft_heads=None, skip_layers=())
    found: dict[str, list[tuple[float, int, float, float, int]]] = {mode: [] for mode in modes}
    expected: list[list[int]] | None = None
    order: list[ModeName] = ["engine", *(mode for mode in modes if mode != "engine")]
    for number in range(rounds):
        for mode in order:
            progress(f"round {number + 1} of {rounds}: {mode}")
            # Each run gets an empty prefix cache.
            opened = open_variant(
                msgspec.structs.replace(plain, prefix_cache=mode not in ("no-prefix-reuse", "no-kv-cache")),
                folder=folder,
                cuts_texts=False,
            )
            try:
                tokens, row = _run(mode, opened, jobs, batch)
            finally:
                opened.engine.close()
            expected = tokens if expected is None else expected
            if tokens != expected:
                raise HeadraceError(f"The mode {mode} gave other tokens than the engine. This is a bug.")
            if mode in found:
                found[mode].append(row)
    rates = {mode: statistics.median(row[1] / row[0] for row in rows) for mode, rows in found.items()}
    base = rates.get("engine") or max(rates.values())
    return [
        ModeResult(
            mode=mode,
            seconds=statistics.median(row[0] for row in found[mode]),
            tokens_per_s=rates[mode],
            ttft_p50=statistics.median(row[2] for row in found[mode]),
            e2el_p50=statistics.median(row[3] for row in found[mode]),
            rows=found[mode][0][4],
            times=base / rates[mode],
            same_tokens=True,
        )
        for mode in modes
    ]


def _run(
    mode: ModeName, opened: OpenedVariant, jobs: Sequence[EngineJob], batch: int
) -> tuple[list[list[int]], tuple[float, int, float, float, int]]:
    if mode == "no-kv-cache":
        return _recomputed(opened, jobs)
    batching = {"static-batches": "static", "one-at-a-time": "serial"}.get(mode, "continuous")
    run = run_jobs(opened, jobs, batching=batching, batch=batch)  # pyright: ignore[reportArgumentType]
    row = (run.seconds, run.output_tokens, statistics.median(run.ttft), statistics.median(run.e2el), run.rows)
    return run.tokens, row


def _recomputed(
    opened: OpenedVariant, jobs: Sequence[EngineJob]
) -> tuple[list[list[int]], tuple[float, int, float, float, int]]:
    """Compute the whole sequence anew for every token, one request after the other."""
    runner = Runner(opened.executor)
    began = time.perf_counter()
    answers: list[list[int]] = []
    firsts: list[float] = []
    ends: list[float] = []
    rows = 0
    for job in jobs:
        tokens: list[int] = []
        for _ in range(job.answer):
            sequence = runner.open([*job.prompt, *tokens])
            rows += len(sequence.tokens)
            tokens.append(int(runner.prefill([sequence])[0].argmax()))
            runner.close(sequence)
            if len(tokens) == 1:
                firsts.append(time.perf_counter() - began)
        ends.append(time.perf_counter() - began)
        answers.append(tokens)
    seconds = time.perf_counter() - began
    row = (seconds, sum(map(len, answers)), statistics.median(firsts), statistics.median(ends), rows)
    return answers, row
