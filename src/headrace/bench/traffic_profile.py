"""Describes traffic by what a plan needs: lengths of prompts and answers, percentiles, rate and shared prefixes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from headrace.bench.load_generator.trace_reader import read_trace
from headrace.bench.load_generator.workloads import Session
from headrace.errors import RequestError

MOST_REQUESTS: Final = 100_000  # of a trace
_STEP: Final = 256  # a proposed context is a multiple of this


class TrafficProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens. `context` is proposed from the p95 of prompt and answer together."""

    requests: int
    prompt: float  # mean
    prompt_p95: float
    answer: float
    answer_p95: float
    total_p95: float
    total_most: int
    context: int
    beyond: float = 0.0  # share of the requests that such a context cannot hold
    reused: float = 0.0  # share of the prompt tokens that an earlier request of the same tenant had in front
    rate: float | None = None  # requests per second; None: the traffic has no times
    peak: float = 1.0  # highest rate of a tenth of the time, over the mean rate


def of_trace(path: Path) -> TrafficProfile:
    """Read a trace. Raise RequestError if it cannot be read, or holds texts instead of lengths."""
    if not path.is_file():
        raise RequestError(f"There is no trace {path}.", parameter="traffic")
    found = list(itertools.islice(read_trace(path), MOST_REQUESTS))
    if not found:
        raise RequestError(f"The trace {path} has no requests.", parameter="traffic")
    if any(session.text is not None for session in found):
        raise RequestError(
            f"The trace {path} has texts, and a profile needs lengths in tokens. Pass a trace with `prompt` and "
            "`answer`, or with `input_length` and `output_length`.",
            parameter="traffic",
        )
    return profile(found)


def of_lengths(prompt: int, answer: int, *, reused: float = 0.0) -> TrafficProfile:
    """Describe requests of one length."""
    total = prompt + answer
    return TrafficProfile(
        requests=1,
        prompt=prompt,
        prompt_p95=prompt,
        answer=answer,
        answer_p95=answer,
        total_p95=total,
        total_most=total,
        context=_rounded(total),
        reused=reused,
    )


def profile(found: Iterable[Session]) -> TrafficProfile:
    prompts: list[int] = []
    answers: list[int] = []
    times: list[float] = []
    seen: set[tuple[str, str]] = set()
    reused = 0
    for session in found:
        before = 0 if session.prefix is None else session.prefix.tokens
        if session.prefix is not None:
            key = (session.tenant, session.prefix.name)
            reused += before if key in seen else 0
            seen.add(key)
        fresh = 0
        for number, block in enumerate(session.blocks):
            key = (session.tenant, f"block {block}")
            if key in seen and fresh == number:
                reused += min(session.block_tokens, max(0, session.turns[0].tokens - number * session.block_tokens))
                fresh += 1
            seen.add(key)
        for place, turn in enumerate(session.turns):
            prompt = before + turn.tokens
            prompts.append(prompt)
            answers.append(turn.answer)
            reused += before if place else 0  # a later turn repeats the conversation
            before = prompt + turn.answer
        if session.at is not None:
            times.append(session.at)
    totals = np.array(prompts) + np.array(answers)
    p95 = float(np.percentile(totals, 95))
    context = _rounded(p95)
    seconds = times[-1] - times[0] if len(times) > 1 else 0.0
    rate = (len(times) - 1) / seconds if seconds > 0.0 else None
    return TrafficProfile(
        requests=len(prompts),
        prompt=float(np.mean(prompts)),
        prompt_p95=float(np.percentile(prompts, 95)),
        answer=float(np.mean(answers)),
        answer_p95=float(np.percentile(answers, 95)),
        total_p95=p95,
        total_most=int(totals.max()),
        context=context,
        beyond=float((totals > context).mean()),
        reused=reused / max(sum(prompts), 1),
        rate=rate,
        peak=_peak(times),
    )


def _rounded(tokens: float) -> int:
    return _STEP * math.ceil(tokens / _STEP)


def _peak(times: list[float]) -> float:
    if len(times) < 50 or times[-1] <= times[0]:
        return 1.0
    counts, _ = np.histogram(times, bins=10)
    return float(counts.max() / counts.mean())
