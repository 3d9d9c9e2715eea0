"""Adapter for Headrace's bare core: prompts prefilled in chunks, then all sequences decoded together.

drive_headrace.py MODEL WEIGHTS THREADS CACHE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from serve import Generate, Late, Prompts, Times, serve

from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import Runner
from headrace.models.model_folder import open_model

CONTEXT: Final = 4096  # tokens of one sequence
KV_TOKENS: Final = 8192  # of all sequences together


def load() -> tuple[Generate, dict[str, Any]]:
    model, weights, threads, cache = sys.argv[1:]
    executor = CpuExecutor.load(
        open_model(Path(model)),
        weights=weights,
        threads=int(threads),
        context=CONTEXT,
        kv_tokens=KV_TOKENS,
        cache=Path(cache),
    )
    runner = Runner(executor)
    report = executor.load_report
    facts = {
        "isa": executor.isa,
        "weights": executor.plan.name,
        "kv": executor.kv_type,
        "step_rows": executor.capacity.max_rows,
        "weights_mapped": report.mapped,
        "weight_bytes": report.weight_bytes,
    }

    def generate(prompts: Prompts, new: int, late: list[Late] | None) -> dict[str, Any]:
        assert not late, "the bare core has no scheduler"
        started = time.perf_counter()
        sequences = [runner.open(prompt, total=len(prompt) + new) for prompt in prompts]
        places = {id(sequence): index for index, sequence in enumerate(sequences)}
        times: Times = [[] for _ in prompts]
        chosen = [0 for _ in prompts]
        while work := runner.plan(sequences):
            ends = np.cumsum([count for _, count in work]) - 1
            finishing = [index for index, (sequence, count) in enumerate(work) if count == sequence.pending]
            rows = runner.step(work, [int(ends[index]) for index in finishing])
            now = time.perf_counter() - started
            for row, index in zip(rows, finishing, strict=True):
                place = places[id(work[index][0])]
                chosen[place] = int(row.argmax())
                times[place].append(now)
        for _ in range(new - 1):
            for sequence, token in zip(sequences, chosen, strict=True):
                sequence.tokens.append(token)
            rows = runner.step([(sequence, 1) for sequence in sequences], range(len(sequences)))
            chosen = [int(token) for token in rows.argmax(axis=1)]
            now = time.perf_counter() - started
            for stream in times:
                stream.append(now)
        for sequence in sequences:
            runner.close(sequence)
        return {"times": times}

    return generate, facts


if __name__ == "__main__":
    serve(load)
