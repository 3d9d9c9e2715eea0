"""Measures the steps of an engine on this machine: prefill and decode apart, as a step-time model and as rates.

Runs an engine's own loop (plan, launch, sample, settle), so that the host's time counts as it does in service. Prompts
are drawn from a seed, so no prefix is found in the cache.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.engine.engine import Engine
from headrace.engine.interface.request import GenerationRequest
from headrace.engine.process.open_engine import OpenedVariant
from headrace.engine.scheduling.step_time import StepTimeModel, pairs_of

DECODED: Final = 24  # tokens of each stream
_SHORT: Final = 32  # tokens of a stream's prompt
BATCHES: Final = (1, 4, 16)
PROMPTS: Final = (64, 256, 1024)
_SEEN: Final = 8  # times that each kind of step is shown to the model, which trusts what it saw often


class MeasuredStep(msgspec.Struct, frozen=True):
    rows: int
    pairs: int
    seconds: float


class StepMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the steps of each kind."""

    steps: list[MeasuredStep]
    prefill: float  # tokens per second of one long prompt
    decode: float  # tokens per second of one stream
    decode_batch: float  # of the largest batch
    batch: int
    host_share: float  # of a decode step that the device is not at work

    def model(self) -> StepTimeModel:
        """Return the engine's model of step times, fitted to these."""
        found = StepTimeModel()
        for _ in range(_SEEN):
            for step in self.steps:
                found.observe(step.rows, step.pairs, step.seconds)
        return found


def measure_steps(
    opened: OpenedVariant,
    *,
    batches: Sequence[int] = BATCHES,
    prompts: Sequence[int] = PROMPTS,
    seed: int = 0,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> StepMeasurement:
    """Measure. Kinds take turns, so that a disturbance hits all of them. Sizes beyond the engine's bounds are left
    out."""
    engine, capacity = opened.engine, opened.executor.capacity
    rng = random.Random(seed)
    vocab = opened.executor.spec.vocab_size
    known = [count for count in batches if count <= opened.variant.max_sequences]
    room = capacity.blocks * capacity.block_tokens
    known = [count for count in known if count * (_SHORT + DECODED + capacity.block_tokens) <= room] or [1]
    lengths = [count for count in prompts if count + 1 < capacity.context] or [max(1, capacity.context // 2)]
    streams: dict[int, list[MeasuredStep]] = {count: [] for count in known}
    chunks: dict[tuple[int, int], list[float]] = {}
    whole: dict[int, list[float]] = {count: [] for count in lengths}

    def request(name: str, tokens: int, answer: int) -> GenerationRequest:
        prompt = tuple(rng.randrange(vocab) for _ in range(tokens))
        return GenerationRequest(id=name, prompt=prompt, max_tokens=answer, speculate=False, surface="agent")

    for number in range(rounds + 1):  # the first warms up
        for count in lengths:
            found = _prefill(engine, request(f"prompt {number} {count}", count, 1), clock)
            if number:
                whole[count].append(sum(step.seconds for step in found))
                for step in found:
                    chunks.setdefault((step.rows, step.pairs), []).append(step.seconds)
        for count in known:
            every = [request(f"stream {number} {count} {place}", _SHORT, DECODED) for place in range(count)]
            found = _decode(engine, every, clock)
            if number:
                streams[count] += found
    steps = [MeasuredStep(rows, pairs, statistics.median(times)) for (rows, pairs), times in sorted(chunks.items())]
    typical: dict[int, float] = {}
    for count, found in streams.items():
        typical[count] = statistics.median(step.seconds for step in found)
        pairs = round(statistics.median(step.pairs for step in found))
        steps.append(MeasuredStep(count, pairs, typical[count]))
    largest = max(known)
    longest = max(lengths)
    return StepMeasurement(
        steps=steps,
        prefill=longest / statistics.median(whole[longest]),
        decode=1.0 / typical[min(known)],
        decode_batch=largest / typical[largest],
        batch=largest,
        host_share=_host_share(engine, request("host", _SHORT, DECODED), clock),
    )


def _prefill(engine: Engine, request: GenerationRequest, clock: Callable[[], float]) -> list[MeasuredStep]:
    engine.submit(request)
    found: list[MeasuredStep] = []
    done = 0
    while not engine.idle:
        rows, began = engine.timing.rows, clock()
        engine.step()
        seconds, rows = clock() - began, engine.timing.rows - rows
        if rows:
            found.append(MeasuredStep(rows, pairs_of(done, rows), seconds))
            done += rows
    return found


def _decode(engine: Engine, requests: Sequence[GenerationRequest], clock: Callable[[], float]) -> list[MeasuredStep]:
    """Return the steps in which every stream decoded."""
    for request in requests:
        engine.submit(request)
    found: list[MeasuredStep] = []
    held = sum(len(request.prompt) for request in requests)
    while not engine.idle:
        rows, tokens, began = engine.timing.rows, engine.timing.tokens, clock()
        engine.step()
        seconds = clock() - began
        rows, tokens = engine.timing.rows - rows, engine.timing.tokens - tokens
        if rows == tokens == len(requests):
            found.append(MeasuredStep(rows, held, seconds))
        held += tokens
    return found


def _host_share(engine: Engine, request: GenerationRequest, clock: Callable[[], float]) -> float:
    device, began = engine.timing.device, clock()
    _decode(engine, [request], clock)
    total = clock() - began
    share = (engine.timing.device - device) / total if total else 1.0
    return max(0.0, 1.0 - min(share, 1.0))
