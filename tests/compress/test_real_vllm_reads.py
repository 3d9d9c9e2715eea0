"""A real vLLM reads what `headrace compress` writes, and computes what the stored weights say.

It takes a minute for each file and needs a Python that has vLLM, which HEADRACE_TEST_VLLM names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.compress.compression import compress_model, products_of, scale_type
from headrace.compress.recipe import Recipe
from headrace.engine.executors.cpu_executor import CpuExecutor
from headrace.engine.executors.runner import greedy, logits
from headrace.models.model_folder import BUNDLED, open_model

PYTHON = os.environ.get("HEADRACE_TEST_VLLM", "")
PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "vllm_likelihoods.py"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "2",
}
QUESTIONS = (
    "The river runs past the old mill, and in spring the water turns the wheel again.",
    '{"name": "Ada", "age": 36, "city": "London"}',
    "Please cancel my order from Tuesday and send the money back to my account.",
)
ANSWER = 12  # tokens

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_TEST_VLLM names no Python that has vLLM"),
    pytest.mark.timeout(1800),
]


def compressed(out: Path, method: str, bits: int, **options: Any) -> Path:
    folder = open_model(BUNDLED / "mini")
    recipe = Recipe(
        method=method,
        bits=dict.fromkeys(products_of(folder), bits),
        scale_type=scale_type(folder),
        **{"group": 0, "symmetric": True, **options},
    )
    prompts = [folder.tokenizer.encode(text) for text in QUESTIONS]
    compress_model(folder, out, prompts, recipe).publish(out)
    return out


def read_by_vllm(model: Path, prompts: list[list[int]], dtype: str, folder: Path) -> dict[str, Any]:
    asked = folder / "prompts.json"
    asked.write_text(json.dumps(prompts))
    command = [PYTHON, "-P", str(PROGRAM), str(model), str(asked), str(ANSWER)]
    environment = {**os.environ, **ENVIRONMENT, "DTYPE": dtype}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("method", "bits", "options", "dtype", "nats"),
    [
        # How far a token's log-likelihood is from that of the stored weights in f32, in the mean. vLLM rounds the
        # inputs of W8A8 to 8 bits and those of FP8 to FP8, and computes W4A16 in bf16.
        ("smoothquant", 8, {}, "float32", 0.1),
        ("rtn", 4, {"group": 128, "symmetric": False}, "bfloat16", 0.08),
        ("rtn", 4, {"group": 128}, "bfloat16", 0.08),
        ("fp8", 8, {}, "bfloat16", 0.3),
    ],
)
def test_vllm_computes_with_the_stored_weights(
    method: str, bits: int, options: dict[str, Any], dtype: str, nats: float, tmp_path: Path
) -> None:
    model = compressed(tmp_path / "small", method, bits, **options)
    folder = open_model(model)
    prompts = [folder.tokenizer.encode(text) for text in QUESTIONS]
    found = read_by_vllm(model, prompts, dtype, tmp_path)
    executor = CpuExecutor.load(folder, weights="f32", kv="f32", threads=1)
    try:
        rows = logits(executor, prompts)
        mine = greedy(executor, prompts, ANSWER)
    finally:
        executor.close()
    for tokens, row, theirs in zip(prompts, rows, found["likelihoods"], strict=True):
        each = row[:-1].astype(np.float64)
        ours = each[np.arange(len(tokens) - 1), tokens[1:]] - np.logaddexp.reduce(each, axis=1)
        assert np.abs(ours - np.array(theirs)).mean() < nats
    same = sum(
        a == b for one, other in zip(mine, found["tokens"], strict=True) for a, b in zip(one, other, strict=True)
    )
    assert same >= len(prompts) * ANSWER * 2 // 3
