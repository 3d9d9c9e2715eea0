"""Where the time of a model's steps goes: component by component, and against what the machine allows at best.

Runs a prefill and single-token steps on an executor of its own. Components are timed by the core, once for all layers
together, so the time of a layer is their mean.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner
from headrace.errors import RequestError

DECODE_STEPS: Final = 32
PROMPT_TOKENS: Final = 512
_ONCE: Final = frozenset({"embed", "prepare", "head"})  # components outside the layers


class ComponentTime(msgspec.Struct, frozen=True):
    component: str
    ms: float  # of one step
    share: float
    ms_per_layer: float | None  # mean; None for what is done once


class PhaseProfile(msgspec.Struct, frozen=True):
    """One phase: a prefill, or the mean step of a decode."""

    phase: str
    tokens: int  # of the step
    ms: float
    floor_ms: float  # that no program can beat on this machine
    bytes_per_s: float  # of weights and KV that had to be read
    operations_per_s: float
    bound: str  # what the floor is made of: bandwidth or compute
    components: list[ComponentTime]

    @property
    def efficiency(self) -> float:
        """The share of the time that the floor explains."""
        return self.floor_ms / self.ms if self.ms else 0.0


def profile(executor: CpuExecutor, *, bandwidth: float, peak: float) -> list[PhaseProfile]:
    """Profile a decoder. `bandwidth`: bytes per second that this machine can read; `peak`: operations per second."""
    if not executor.spec.causal:
        raise RequestError("Only models that generate text have a profile.", parameter="model")
    prompt = min(PROMPT_TOKENS, executor.capacity.context - DECODE_STEPS - 1)
    rows = min(prompt, executor.capacity.max_rows)
    runner = Runner(executor)
    vocabulary = executor.spec.vocab_size
    tokens = [(7 * place + 3) % vocabulary for place in range(prompt)]
    warm_up = runner.open(tokens[:rows])
    runner.step([(warm_up, rows)], [rows - 1])
    runner.close(warm_up)
    sequence = runner.open(tokens, total=prompt + DECODE_STEPS)
    work = executor.work
    phases: list[PhaseProfile] = []

    def measured(phase: str, steps: int, size: int, bytes_read: float, operations: float, began: float) -> None:
        seconds = (time.perf_counter() - began) / steps
        after = executor.stage_seconds()
        spent = {name: (value - before[name]) / steps for name, value in after.items()}
        by_bandwidth, by_compute = bytes_read / bandwidth, operations / peak
        phases.append(
            PhaseProfile(
                phase,
                size,
                seconds * 1e3,
                max(by_bandwidth, by_compute) * 1e3,
                bytes_read / seconds,
                operations / seconds,
                "bandwidth" if by_bandwidth >= by_compute else "compute",
                _components(spent, seconds, len(executor.spec.layers)),
            )
        )

    before, began = executor.stage_seconds(), time.perf_counter()
    read = operations = 0.0
    while sequence.pending:
        count = min(sequence.pending, rows)
        pairs = count * sequence.computed + count * (count + 1) // 2
        read += work.bytes_read(sequence.computed + count)
        operations += work.operations(count, int(count == sequence.pending), pairs)
        runner.step([(sequence, count)], [count - 1] if count == sequence.pending else [])
    measured("prefill", 1, prompt, read, operations, began)

    before, began = executor.stage_seconds(), time.perf_counter()
    read = operations = 0.0
    for _ in range(DECODE_STEPS):
        sequence.tokens.append(3)
        read += work.bytes_read(sequence.computed + 1)
        operations += work.operations(1, 1, sequence.computed + 1)
        runner.step([(sequence, 1)], [0])
    measured("decode", DECODE_STEPS, 1, read / DECODE_STEPS, operations / DECODE_STEPS, began)
    return phases


def _components(spent: dict[str, float], seconds: float, layers: int) -> list[ComponentTime]:
    rest = max(0.0, seconds - sum(spent.values()))
    found = [
        ComponentTime(
            name,
            value * 1e3,
            value / seconds,
            None if name in _ONCE else value * 1e3 / layers,
        )
        for name, value in spent.items()
        if value
    ]
    return [*found, ComponentTime("outside the core", rest * 1e3, rest / seconds, None)]
