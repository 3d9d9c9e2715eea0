"""The requests for an engine, and the numbers computed from its responses.

Prompts are random token ids and never repeat in a run, so prefix caches help only where they are measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Final

Times = list[list[float]]  # of each sequence, seconds from the request to each token

LOWEST_TOKEN: Final = 300  # past the ids that vocabularies keep for single bytes and the like
HIGHEST_TOKEN: Final = 100_000  # below the special tokens of both shapes
CACHED_REPEATS: Final = 3  # requests with the same beginning after the first


@dataclass(frozen=True, slots=True)
class Late:
    """A prompt that arrives during the run."""

    at: float  # seconds after them
    prompt: list[int]
    new: int


@dataclass(frozen=True, slots=True)
class Answer:
    times: Times  # of the prompts
    late: Times  # of the late ones, from their own arrival
    host: dict[str, float] | None = None  # where the engine's time went meanwhile, if it says so


Generate = Callable[..., Answer]  # prompts, new, and `late` where somebody watches the streams


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    kind: str  # as --only says it
    sequences: int
    prompt: int  # tokens of each
    new: int
    warm_up: int  # new tokens of the request before the timed one
    shared: int = 0  # tokens with which all prompts of a measurement begin
    late: tuple[float, ...] = ()  # when long prompts arrive
    late_prompt: int = 0

    def short(self) -> Workload:
        new = {"decode": 32, "prefill": 2, "batch": 16, "cached": 2, "chats": 64}[self.kind]
        return replace(self, new=new, late=self.late[:1])


WORKLOADS: Final = (
    Workload("decode", "decode", sequences=1, prompt=32, new=128, warm_up=16),
    Workload("prefill-512", "prefill", sequences=1, prompt=512, new=2, warm_up=2),
    Workload("prefill-2048", "prefill", sequences=1, prompt=2048, new=2, warm_up=2),
    Workload("batch-8", "batch", sequences=8, prompt=128, new=64, warm_up=4),
    Workload("batch-32", "batch", sequences=32, prompt=128, new=64, warm_up=4),
    Workload("cached", "cached", sequences=1, prompt=1532, new=2, warm_up=2, shared=1500),
    Workload("chats", "chats", sequences=8, prompt=128, new=256, warm_up=4, late=(1.0, 2.0), late_prompt=4000),
)
KINDS: Final = ("start", *dict.fromkeys(workload.kind for workload in WORKLOADS))
FIRST_PROMPT: Final = 32  # tokens of the request that ends a start


class Prompts:
    """Generates prompts that never repeat in this process; the same seed gives the same run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, sequences: int, tokens: int, begin: Sequence[int] = ()) -> list[list[int]]:
        return [
            [*begin, *(self._random.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(tokens - len(begin)))]
            for _ in range(sequences)
        ]


def measure(workload: Workload, prompts: Prompts, generate: Generate) -> dict[str, float]:
    """Run one measurement on a warm engine; return its numbers by metric."""
    match workload.kind:
        case "cached":
            return _cached(workload, prompts, generate)
        case "chats":
            return _chats(workload, prompts, generate)
        case _:
            return _at_once(workload, generate(prompts.draw(workload.sequences, workload.prompt), workload.new))


def _at_once(workload: Workload, answer: Answer) -> dict[str, float]:
    times = answer.times
    if workload.kind == "decode":
        stream = times[0]
        return {"decode": (len(stream) - 1) / (stream[-1] - stream[0])}  # tokens/s, the first token's time apart
    if workload.kind == "prefill":
        return {workload.name: times[0][0]}  # seconds
    tokens = sum(len(stream) for stream in times)
    found = {
        workload.name: tokens / max(stream[-1] for stream in times),  # tokens/s, prefill included
        f"{workload.name}-ttft": sum(stream[0] for stream in times) / len(times),  # seconds, mean
    }
    if answer.host is not None and answer.host["steps"]:
        own = answer.host["between"] + answer.host["choosing"]
        found[f"{workload.name}-host"] = own / answer.host["steps"]  # seconds a step in which no step ran
        found[f"{workload.name}-host-share"] = own / (own + answer.host["device"])
    return found


def _cached(workload: Workload, prompts: Prompts, generate: Generate) -> dict[str, float]:
    """Measure TTFT of a prompt, and of further ones with the same prefix."""
    (first,) = prompts.draw(1, workload.prompt)
    cold = generate([first], workload.new).times[0][0]
    begin = first[: workload.shared]
    warm = [generate(prompts.draw(1, workload.prompt, begin), workload.new).times[0][0] for _ in range(CACHED_REPEATS)]
    return {"cold": cold, "cached": median(warm)}  # seconds


def _chats(workload: Workload, prompts: Prompts, generate: Generate) -> dict[str, float]:
    """Measure the gaps between tokens of running streams, alone and while long prompts arrive."""
    alone = generate(prompts.draw(workload.sequences, workload.prompt), workload.new, [])
    late = [Late(at, prompts.draw(1, workload.late_prompt)[0], 2) for at in workload.late]
    beside = generate(prompts.draw(workload.sequences, workload.prompt), workload.new, late)
    return {
        "chats-gap": _percentile(_gaps(alone.times), 0.99),  # seconds
        "chats-gap-beside": _percentile(_gaps(beside.times), 0.99),
        "late-ttft": sum(stream[0] for stream in beside.late) / len(beside.late),
    }


def _gaps(times: Times) -> list[float]:
    """Return the gaps between tokens after every stream has started; before that, prompts are computed."""
    begun = max(stream[0] for stream in times)
    gaps = [(before, after - before) for stream in times for before, after in pairwise(stream)]
    return [gap for since, gap in gaps if since >= begun]


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def request_of(prompts: Sequence[Sequence[int]], new: int, late: Sequence[Late] | None = None) -> dict[str, Any]:
    """Encode a request for an engine's process."""
    found: dict[str, Any] = {"prompts": prompts, "new": new}
    if late is not None:
        found["late"] = [{"at": each.at, "prompt": each.prompt, "new": each.new} for each in late]
    return found
