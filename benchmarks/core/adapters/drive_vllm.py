"""vLLM's CPU build as an engine, in one process, driven step by step.

    drive_vllm.py MODEL CACHING

Threads, KV memory and preloads come by the environment, as its documentation says (see
../engines.py). CACHING: 1 or 0, whether prompts reuse what begins alike.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any, Final

from serve import Generate, Late, Prompts, Times, serve

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
        streams: dict[str, tuple[list[float], float]] = {}  # times, and the arrival that they count from

        def add(stream: list[float], prompt: list[int], count: int, at: float) -> None:
            sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
            name = f"request{next(numbers)}"
            streams[name] = stream, at
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

        times: Times = [[] for _ in prompts]
        late = late or []
        late_times: Times = [[] for _ in late]
        coming = list(zip(late_times, late, strict=True))
        started = time.perf_counter()
        for stream, prompt in zip(times, prompts, strict=True):
            add(stream, prompt, new, 0.0)
        while engine.has_unfinished_requests() or coming:
            while coming and time.perf_counter() - started >= coming[0][1]["at"]:
                stream, each = coming.pop(0)
                add(stream, each["prompt"], each["new"], each["at"])
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                stream, at = streams[output.request_id.partition("-")[0]]  # it may add a suffix of its own
                stream += [now - at] * (len(output.outputs[0].token_ids) - len(stream))
        return {"times": times, "late": late_times}

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
