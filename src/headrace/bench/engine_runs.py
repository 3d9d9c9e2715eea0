"""Runs requests on an engine in this process and times them, for measurements without a server.

Requests arrive at their own times. Where the engine has nothing to do, the time until the next arrival is skipped, so a
run takes as long as its work. Times are those of the engine's loop: no network and no gateway.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.process.open_engine import OpenedVariant
from headrace.errors import HeadraceError

BatchingMode = Literal["continuous", "static", "serial"]


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    prompt: tuple[int, ...]
    answer: int  # tokens; nothing else ends it
    at: float = 0.0  # seconds from the start
    tenant: str = ""
    surface: str = "chat"


class EngineRun(msgspec.Struct, kw_only=True):
    """Times in seconds, by request in the order of the jobs; `itl` has the gaps of all requests."""

    seconds: float
    ttft: list[float]
    e2el: list[float]
    itl: list[float]
    tokens: list[list[int]]
    rows: int
    drafted: int = 0
    accepted: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def latencies(self) -> dict[str, float]:
        """Return the percentiles that objectives name: ttft_p95, itl_p50, ... in seconds."""
        tpot = [
            (end - first) / (len(tokens) - 1)
            for first, end, tokens in zip(self.ttft, self.e2el, self.tokens, strict=True)
            if len(tokens) > 1
        ]
        found: dict[str, float] = {}
        for name, values in (("ttft", self.ttft), ("itl", self.itl), ("tpot", tpot), ("e2el", self.e2el)):
            for point in (50, 90, 95, 99):
                found[f"{name}_p{point}"] = float(np.percentile(values, point)) if values else 0.0
        return found


def run_jobs(
    opened: OpenedVariant,
    jobs: Sequence[EngineJob],
    *,
    batching: BatchingMode = "continuous",
    batch: int = 8,
    speculate: bool = True,
    users: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineRun:
    """Run all jobs to their end.

    `static` starts a batch of `batch` requests and the next one when all of it has ended; `serial` runs one at a time.
    With `users`, jobs arrive as so many users send them: the next one when one has ended, whatever their times say.
    Raise HeadraceError if the engine rejects a request or fails one.
    """
    engine = opened.engine
    order = range(len(jobs)) if users else sorted(range(len(jobs)), key=lambda number: jobs[number].at)
    waiting = deque(order)
    # Of a job that waits for a user, the arrival is not known yet.
    arrival = [0.0 if number < users else math.inf for number in order] if users else [job.at for job in jobs]
    unsent = deque(order)
    for _ in range(min(users or 0, len(jobs))):
        unsent.popleft()
    size = {"continuous": len(jobs), "static": batch, "serial": 1}[batching]
    ttft, e2el = [0.0] * len(jobs), [0.0] * len(jobs)
    itl: list[float] = []
    tokens: list[list[int]] = [[] for _ in jobs]
    last = [0.0] * len(jobs)
    numbers = {f"job {number}": number for number in range(len(jobs))}
    rows = engine.timing.rows
    drafted, held = (engine.speculator.drafted, engine.speculator.held) if engine.speculator else (0, 0)
    running = 0
    began, skipped = clock(), 0.0
    while waiting or running:
        now = clock() - began + skipped
        if not running and waiting and arrival[waiting[0]] > now:
            skipped += arrival[waiting[0]] - now
            now = arrival[waiting[0]]
        room = size - running if batching != "static" or not running else 0
        while waiting and room > 0 and arrival[waiting[0]] <= now:
            number = waiting.popleft()
            job = jobs[number]
            admission = engine.submit(
                GenerationRequest(
                    id=f"job {number}",
                    prompt=job.prompt,
                    max_tokens=job.answer,
                    tenant=job.tenant,
                    salt=job.tenant,
                    surface=job.surface,
                    speculate=speculate,
                    arrival=time.monotonic() - (now - arrival[number]),  # on the engine's clock
                )
            )
            if not admission.accepted:
                raise HeadraceError(f"The engine rejected a request of the measurement: {admission.why}")
            running += 1
            room -= 1
        for output in engine.step():
            number = numbers.get(output.request)
            if number is None:
                continue
            now = clock() - began + skipped
            if output.tokens:
                if not tokens[number]:
                    ttft[number] = now - arrival[number]
                else:
                    itl.append(now - last[number])
                last[number] = now
                tokens[number] += output.tokens
            if output.ending is not None:
                if output.ending.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise HeadraceError(f"A request of the measurement ended early: {output.ending.finish}")
                e2el[number] = now - arrival[number]
                running -= 1
                if users and unsent:
                    arrival[unsent.popleft()] = now
    speculator = engine.speculator
    return EngineRun(
        seconds=clock() - began,
        ttft=ttft,
        e2el=e2el,
        itl=itl,
        tokens=tokens,
        rows=engine.timing.rows - rows,
        drafted=speculator.drafted - drafted if speculator else 0,
        accepted=speculator.held - held if speculator else 0,
    )


def percentile(values: Iterable[float], point: float) -> float:
    found = list(values)
    return float(np.percentile(found, point)) if found else 0.0
