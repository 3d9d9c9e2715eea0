"""Measures the mean key of each layer, KV head and channel on texts: what key offsets are.

The executor itself computes the keys, in f32 KV memory, so every model that it runs can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner
from headrace.models.key_offsets import KeyOffsets, key_shapes
from headrace.models.model_folder import ModelFolder


def measure_key_offsets(
    folder: ModelFolder,
    sequences: Sequence[Sequence[int]],
    *,
    weights: str = "auto",
    threads: int | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> KeyOffsets:
    """Return the mean keys of a model over all tokens. RequestError for a model that cannot have key offsets.

    `watch` hears how many tokens are done, and of how many.
    """
    shapes = key_shapes(folder.spec)
    total = sum(map(len, sequences))
    longest = max(map(len, sequences))
    executor = CpuExecutor.load(
        folder, weights=weights, kv="f32", threads=threads, context=longest, kv_tokens=longest, adapter_bytes=0
    )
    sums = {layer: np.zeros(shape, np.float64) for layer, shape in shapes.items()}
    done = 0
    try:
        runner = Runner(executor)
        for tokens in sequences:
            watch(done, total)
            sequence = runner.open(tokens)
            while work := runner.plan([sequence]):
                runner.step(work, [])
            for place, layer in enumerate(shapes):
                keys = executor.read_keys(place, sequence.blocks)[: len(tokens)]
                sums[layer] += keys.sum(axis=0, dtype=np.float64)
            runner.close(sequence)
            done += len(tokens)
    finally:
        executor.close()
    return KeyOffsets({layer: (values / total).astype(np.float32) for layer, values in sums.items()})
