"""vLLM's CPU build as an engine, in one process, driven step by step.

    drive_vllm.py MODEL CACHING

Threads, KV memory and preloads come by the environment, as its documentation says (see
../engines.py). CACHING: 1 or 0, whether prompts reuse what begins alike.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any, Final

from serve import Arrival, Arrivals, Generate, Late, Prompts, serve

MAX_LENGTH: Final = 4096
MAX_SEQUENCES: Final = 64


def load() -> tuple[Generate, dict[str, Any]]:
    model, caching = sys.argv[1:]
    import torch
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=caching == "1",
            disable_log_stats=True,
            generation_config="vllm",
        )
    )
    numbers = itertools.count()

    def generate(prompts: Prompts, new: int, late: list[Late] | None) -> dict[str, Any]:
        arrivals = Arrivals(prompts, new, late)
        named: dict[str, Arrival] = {}
        while arrivals.more or engine.has_unfinished_requests():
            for arrival in arrivals.due():
                sampling = SamplingParams(max_tokens=arrival.new, temperature=0, ignore_eos=True, detokenize=False)
                name = f"request{next(numbers)}"
                named[name] = arrival
                engine.add_request(name, {"prompt_token_ids": arrival.prompt}, sampling)
            outputs = engine.step()
            now = arrivals.now()
            for output in outputs:
                arrival = named[output.request_id.partition("-")[0]]  # it may add a suffix of its own
                arrival.times += [now - arrival.at] * (len(output.outputs[0].token_ids) - len(arrival.times))
        return arrivals.answer()

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
