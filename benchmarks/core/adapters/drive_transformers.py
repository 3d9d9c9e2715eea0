"""Adapter for transformers, the baseline for any server: `generate` in bf16 on a static batch."""

from __future__ import annotations

import sys
import time
from typing import Any

from serve import Generate, Late, Prompts, serve


def load() -> tuple[Generate, dict[str, Any]]:
    model_path, threads = sys.argv[1:]
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    class Clock(StoppingCriteria):
        """Notes when each step was done and stops nothing."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def generate(prompts: Prompts, new: int, late: list[Late] | None) -> dict[str, Any]:
        assert not late, "a static batch takes nobody in"
        started = time.perf_counter()
        clock = Clock()
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return {"times": [[moment - started for moment in clock.times] for _ in prompts]}

    return generate, {"attention": "sdpa", "dtype": "bfloat16", "threads": torch.get_num_threads()}


if __name__ == "__main__":
    serve(load)
