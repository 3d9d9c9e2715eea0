"""vLLM's CPU build as an engine, in one process, driven step by step.

    drive_vllm.py MODEL

Threads, KV memory and preloads come by the environment, as its documentation says (see ../engines.py).
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any, Final

from serve import Generate, Prompts, Times, serve

MAX_LENGTH: Final = 4096
MAX_SEQUENCES: Final = 64


def load() -> tuple[Generate, dict[str, Any]]:
    (model,) = sys.argv[1:]
    import torch
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=False,
            disable_log_stats=True,
            generation_config="vllm",
        )
    )
    numbers = itertools.count()

    def generate(prompts: Prompts, new: int) -> Times:
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        times: Times = [[] for _ in prompts]
        streams: dict[str, list[float]] = {}
        started = time.perf_counter()
        for stream, prompt in zip(times, prompts, strict=True):
            name = f"request{next(numbers)}"
            streams[name] = stream
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                stream = streams[output.request_id.partition("-")[0]]  # it may add a suffix of its own
                stream += [now] * (len(output.outputs[0].token_ids) - len(stream))
        return times

    preloads = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    facts = {
        "threads": torch.get_num_threads(),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "preloads": preloads,
        "kv_gib": os.environ.get("VLLM_CPU_KVCACHE_SPACE"),
    }
    return generate, facts


if __name__ == "__main__":
    serve(load)
