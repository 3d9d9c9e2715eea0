"""Makes the requests of a tuning's measurements from a trace or a workload: the same lengths and prefixes, other words.

Each measurement number has texts of its own, so a prefix cache gains only what the traffic shares.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.bench.engine_runs import EngineJob
from headrace.bench.evaluation.documents import Document, tokenise
from headrace.bench.load_generator.text_generator import WORDS
from headrace.bench.load_generator.trace_reader import read_trace
from headrace.bench.load_generator.workloads import WORKLOADS, Session, scaled, sessions
from headrace.bench.traffic_profile import TrafficProfile, of_trace, profile
from headrace.errors import RequestError
from headrace.models.text.tokenizer import Tokenizer

_DRAWN: Final = 2000  # sessions of a workload, for its profile


class TuningTraffic(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sessions: list[Session]  # whose requests are measured
    profile: TrafficProfile  # of all
    users: int | None  # None: requests arrive at the trace's times

    @property
    def at_once(self) -> int:
        return self.users or max(1, len(self.sessions) // 2)


def tuning_traffic(
    trace: Path | None, workload: str, *, requests: int, users: int, scale: float, seed: int = 0
) -> TuningTraffic:
    if trace is not None:
        whole = of_trace(trace)
        found = list(itertools.islice(read_trace(trace), requests))
        timed = all(session.at is not None for session in found)
        return TuningTraffic(name=trace.name, sessions=found, profile=whole, users=None if timed else users)
    if workload not in WORKLOADS:
        raise RequestError(
            f"Unknown workload '{workload}'. Expected one of {', '.join(WORKLOADS)}.", parameter="workload"
        )
    mix = [(scaled(WORKLOADS[workload], scale), 1.0)]
    drawn = list(itertools.islice(sessions(mix, seed=seed), max(requests, _DRAWN)))
    return TuningTraffic(name=workload, sessions=drawn[:requests], profile=profile(drawn), users=users)


def make_jobs(
    traffic: TuningTraffic,
    tokenizer: Tokenizer,
    *,
    number: int,
    context: int,
    prompts: Sequence[Document] = (),
    seed: int = 0,
) -> list[EngineJob]:
    """Make the jobs of a measurement. With `prompts`, the own part of a request is one of them, whatever its length.

    What does not fit `context` is cut, as every setting must serve the same.
    """
    texts = [_before_answer(document, tokenizer) for document in prompts]
    chosen = random.Random(f"{seed} {number} prompts")
    jobs: list[EngineJob] = []
    for session in traffic.sessions:
        tokens: list[int] = []
        if session.prefix is not None:
            tokens += _words(tokenizer, f"{seed} {number} {session.prefix.name}", session.prefix.tokens)
        for block in session.blocks:
            tokens += _words(tokenizer, f"{seed} {number} block {block}", session.block_tokens)
        for place, turn in enumerate(session.turns):
            if session.blocks:
                tokens = tokens[: turn.tokens]
            elif texts:
                tokens = [*tokens, *chosen.choice(texts)]
            else:
                tokens = [*tokens, *_words(tokenizer, f"{seed} {number} {session.name} {place}", turn.tokens)]
            answer = max(1, min(turn.answer, context // 2))
            jobs.append(
                EngineJob(
                    prompt=tuple(tokens[: context - answer]),
                    answer=answer,
                    at=session.at or 0.0,
                    tenant=session.tenant,
                )
            )
            # The next turn repeats the conversation; the answer stands in for what the model will say.
            tokens = [*tokens, *_words(tokenizer, f"{seed} {number} {session.name} answer {place}", turn.answer)]
    return jobs


def _before_answer(document: Document, tokenizer: Tokenizer) -> list[int]:
    found = tokenise(document, tokenizer)
    body = found.body[: found.score_from] if found.score_from else found.body
    return [*found.prefix, *body] or [0]


def _words(tokenizer: Tokenizer, name: str, count: int) -> list[int]:
    """Return so many tokens of common words, always the same for a name."""
    rng = random.Random(name)
    tokens: list[int] = []
    while len(tokens) < count:
        text = " " + " ".join(rng.choices(WORDS, k=max(8, count - len(tokens))))
        tokens += tokenizer.encode(text, add_special_tokens=False)
    return tokens[:count]
