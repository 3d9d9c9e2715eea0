"""OpenVINO GenAI's ContinuousBatchingPipeline as an engine.

    drive_openvino.py MODEL THREADS CACHING

CACHING: 1 or 0, whether prompts reuse what begins alike. Steps are long; everything else that is not said here is the
library's default.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Final

from serve import Arrival, Arrivals, Generate, Late, Prompts, serve

KV_GIB: Final = 1  # room for the 8,192 tokens that the largest workload may hold, in every shape
MAX_SEQUENCES: Final = 64
STEP_TOKENS: Final = 2048  # faster than the default of 256 in prefills and batches


def load() -> tuple[Generate, dict[str, Any]]:
    model, threads, caching = sys.argv[1:]
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = KV_GIB
    scheduling.enable_prefix_caching = caching == "1"
    scheduling.max_num_seqs = MAX_SEQUENCES
    scheduling.max_num_batched_tokens = STEP_TOKENS
    pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": int(threads)})
    numbers = itertools.count()

    def generate(prompts: Prompts, new: int, late: list[Late] | None) -> dict[str, Any]:
        arrivals = Arrivals(prompts, new, late)
        handles: list[tuple[Arrival, Any]] = []
        while arrivals.more or pipeline.has_non_finished_requests():
            for arrival in arrivals.due():
                config = genai.GenerationConfig()
                config.max_new_tokens = arrival.new
                config.ignore_eos = True
                config.do_sample = False
                tokens = ov.Tensor(np.array([arrival.prompt], dtype=np.int64))
                handles.append((arrival, pipeline.add_request(next(numbers), tokens, config)))
            pipeline.step()
            now = arrivals.now()
            for arrival, handle in handles:
                while handle.can_read():
                    for output in handle.read().values():
                        arrival.times += [now - arrival.at] * len(output.generated_ids)
        return arrivals.answer()

    core = ov.Core()
    facts = {
        "inference_precision": str(core.get_property("CPU", "INFERENCE_PRECISION_HINT")),
        "kv_precision": str(core.get_property("CPU", "KV_CACHE_PRECISION")),
        "capabilities": list(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        "step_tokens": STEP_TOKENS,
        "kv_gib": KV_GIB,
    }
    return generate, facts


if __name__ == "__main__":
    serve(load)
