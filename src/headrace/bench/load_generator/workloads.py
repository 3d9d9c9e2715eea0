"""Workloads: lengths of prompts and answers, shared prefixes, conversations; all drawn from a seed.

Knows lengths only: no texts, no tokens, no timing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, Protocol

import msgspec
from msgspec.structs import replace

from headrace.bench.simulation.synthetic_traffic import LogNormalLengths

PrefixKind = Literal["system", "few-shot", "documents"]
EXAMPLES: Final = 4  # pairs of messages of a few-shot prefix
MOST_THINK: Final = 10.0  # times the mean: the longest think time


class LengthSampler(Protocol):
    """Draws lengths in tokens."""

    def draw(self, rng: random.Random) -> int: ...


class UniformLengths(msgspec.Struct, frozen=True):
    """Uniform between tokens * (1 - ratio) and tokens * (1 + ratio)."""

    tokens: int
    ratio: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if not self.ratio:
            return self.tokens
        return max(1, rng.randint(round(self.tokens * (1 - self.ratio)), round(self.tokens * (1 + self.ratio))))


class SharedPrefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes that requests share."""

    count: int  # of different prefixes
    tokens: int  # of each
    kind: PrefixKind = "system"
    share: float = 1.0  # of the sessions with a shared prefix


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    own: LengthSampler  # tokens per user message; the first includes the chat template
    answer: LengthSampler
    shared: SharedPrefixes | None = None
    turns: tuple[int, int] = (1, 1)  # minimum and maximum per conversation
    think: float = 0.0  # mean seconds between an answer and the next turn, exponentially distributed


class PromptPrefix(msgspec.Struct, frozen=True):
    name: str  # prefixes of the same name have the same text
    kind: PrefixKind
    tokens: int


class ConversationTurn(msgspec.Struct, frozen=True):
    tokens: int  # of the user's message
    answer: int  # tokens; 0: no limit
    think: float = 0.0  # seconds before it


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation; later turns carry the earlier answers."""

    number: int
    turns: tuple[ConversationTurn, ...]
    name: str  # seeds its unique texts
    tenant: str = ""
    surface: str = ""
    workload: str = ""
    prefix: PromptPrefix | None = None
    at: float | None = None  # seconds from a trace's start
    blocks: tuple[str, ...] = ()  # instead of a prefix: named blocks of the prompt, `block_tokens` each
    block_tokens: int = 0
    text: str | None = None  # the literal prompt
    priority: int = 0
    deadline: float | None = None  # seconds from its arrival


WORKLOADS: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload(
            name="chat",
            own=LogNormalLengths(median=120, spread=0.9, most=2000),
            answer=LogNormalLengths(median=150, most=600),
            shared=SharedPrefixes(count=1, tokens=200),
        ),
        Workload(
            name="rag",
            own=LogNormalLengths(median=40, spread=0.5, most=200),
            answer=LogNormalLengths(median=120, most=400),
            shared=SharedPrefixes(count=50, tokens=1500, kind="documents"),
        ),
        Workload(
            name="agent",
            own=LogNormalLengths(median=250, spread=0.9, most=2000),
            answer=LogNormalLengths(median=60, most=300),
            shared=SharedPrefixes(count=4, tokens=1500),
            turns=(2, 6),
            think=0.5,
        ),
        Workload(
            name="summarise",
            own=LogNormalLengths(median=2500, spread=0.5, most=8000),
            answer=LogNormalLengths(median=150, most=400),
            shared=SharedPrefixes(count=1, tokens=40),
        ),
        Workload(
            name="extract",
            own=LogNormalLengths(median=400, most=2000),
            answer=LogNormalLengths(median=60, most=200),
            shared=SharedPrefixes(count=2, tokens=600, kind="few-shot"),
        ),
    )
}


def scaled(workload: Workload, scale: float) -> Workload:
    """Multiply all lengths of a workload."""

    def lengths(draws: LengthSampler) -> LengthSampler:
        match draws:
            case LogNormalLengths():
                return replace(draws, median=draws.median * scale, most=max(1, round(draws.most * scale)))
            case UniformLengths():
                return replace(draws, tokens=max(1, round(draws.tokens * scale)))
            case _:
                return draws

    shared = workload.shared
    if shared is not None:
        shared = replace(shared, tokens=max(1, round(shared.tokens * scale)))
    return replace(workload, own=lengths(workload.own), answer=lengths(workload.answer), shared=shared)


def sessions(
    mix: Sequence[tuple[Workload, float]], *, seed: int, tenant: str = "", surface: str = ""
) -> Iterator[Session]:
    """Yield sessions without end. `mix`: workloads and their shares."""
    sums = list(itertools.accumulate(share for _, share in mix))
    for number in itertools.count():
        rng = random.Random(f"{seed} {tenant} {number}")
        workload = rng.choices([each for each, _ in mix], cum_weights=sums)[0]
        turns = tuple(
            ConversationTurn(workload.own.draw(rng), workload.answer.draw(rng), _think(workload, rng) if place else 0.0)
            for place in range(rng.randint(*workload.turns))
        )
        shared, prefix = workload.shared, None
        if shared is not None and shared.count > 0 and rng.random() < shared.share:
            # Tenants do not share prefixes, since caches must not share entries between tenants either.
            name = f"{tenant} {workload.name} {rng.randrange(shared.count)}"
            prefix = PromptPrefix(name, shared.kind, shared.tokens)
        yield Session(
            number=number,
            turns=turns,
            name=f"{tenant} {number}",
            tenant=tenant,
            surface=surface,
            workload=workload.name,
            prefix=prefix,
        )


def _think(workload: Workload, rng: random.Random) -> float:
    mean = workload.think
    return min(rng.expovariate(1.0 / mean), MOST_THINK * mean) if mean > 0.0 else 0.0
