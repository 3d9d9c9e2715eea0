"""Prints what a real vLLM makes of prompts: run by a Python that has vLLM.

    python -P vllm_likelihoods.py MODEL PROMPTS COUNT

PROMPTS: a JSON file of lists of tokens. Prints a JSON object: `tokens`, COUNT greedy tokens after each prompt, and
`likelihoods`, the log-likelihood of each token of a prompt but the first.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path


def main(model: str, prompts: str, count: int) -> None:
    path = Path(__file__).with_name("vllm_program.py")
    spec = importlib.util.spec_from_file_location("vllm_program", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    importlib.metadata.version = program.version
    from vllm import LLM, SamplingParams  # pyright: ignore

    # A dummy run of few tokens; float32 is what the other side computes in, where the kernels take it.
    engine = LLM(
        model=model,
        dtype=os.environ.get("DTYPE", "float32"),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    asked = [{"prompt_token_ids": tokens} for tokens in json.loads(Path(prompts).read_text())]
    options = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, prompt_logprobs=1, detokenize=False)
    found = engine.generate(asked, options, use_tqdm=False)
    answer = {
        "tokens": [list(each.outputs[0].token_ids) for each in found],
        "likelihoods": [
            [
                place[token].logprob
                for token, place in zip(each.prompt_token_ids[1:], each.prompt_logprobs[1:], strict=True)
            ]
            for each in found
        ],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
