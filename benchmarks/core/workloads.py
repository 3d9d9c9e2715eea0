"""What is asked of an engine, and what number each answer becomes.

Owns the workloads and the prompts: random token ids, never the same twice in a run, so that no prefix cache can help.
Knows nothing of engines.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

Times = list[list[float]]  # of each sequence, seconds from the request to each token

LOWEST_TOKEN: Final = 300  # past the ids that vocabularies keep for single bytes and the like
HIGHEST_TOKEN: Final = 100_000  # below the special tokens of both shapes


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    kind: str  # decode, prefill or batch, as --only says it
    sequences: int
    prompt: int  # tokens of each
    new: int
    warm_up: int  # new tokens of the request before the timed one

    def short(self) -> Workload:
        return replace(self, new={"decode": 32, "prefill": 2, "batch": 16}[self.kind])


WORKLOADS: Final = (
    Workload("decode", "decode", sequences=1, prompt=32, new=128, warm_up=16),
    Workload("prefill-512", "prefill", sequences=1, prompt=512, new=2, warm_up=2),
    Workload("prefill-2048", "prefill", sequences=1, prompt=2048, new=2, warm_up=2),
    Workload("batch-8", "batch", sequences=8, prompt=128, new=64, warm_up=4),
    Workload("batch-32", "batch", sequences=32, prompt=128, new=64, warm_up=4),
)
KINDS: Final = ("start", "decode", "prefill", "batch")
FIRST_PROMPT: Final = 32  # tokens of the request that ends a start


class Prompts:
    """Prompts that no run has seen before in this process; the same seed gives the same run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, sequences: int, tokens: int) -> list[list[int]]:
        return [[self._random.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(tokens)] for _ in range(sequences)]


def metrics(workload: Workload, times: Times) -> dict[str, float]:
    """The numbers of one answer, by metric."""
    if workload.kind == "decode":
        stream = times[0]
        return {"decode": (len(stream) - 1) / (stream[-1] - stream[0])}  # tokens/s, the first token's time apart
    if workload.kind == "prefill":
        return {workload.name: times[0][0]}  # seconds
    tokens = sum(len(stream) for stream in times)
    return {
        workload.name: tokens / max(stream[-1] for stream in times),  # tokens/s, prefill included
        f"{workload.name}-ttft": sum(stream[0] for stream in times) / len(times),  # seconds, mean
    }
