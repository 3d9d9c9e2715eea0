"""Time of attention by what the KV cache keeps and by context, one thread.

    python benchmarks/attention.py [--rounds 3] [--isa avx512] [--kv bf16,int8,int4]

Weights are random, in the shape of Qwen2.5 0.5B with four layers. Types of KV take turns; the table has the least times
of a layer: of a prompt's step of 256 tokens that ends at a context, and of a single token there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import headrace._core as _core
from benchmarks.latent_attention import Engine
from headrace.engine.executors.cpu_executor import choose_isa
from headrace.models.precision import KvType
from headrace.models.spec import LayerSpec, ModelSpec, RopeSpec

LAYERS: Final = 4
CONTEXTS: Final = (2048, 8192, 16384)
STEP: Final = 256
TOKENS: Final = 15  # single tokens of a round


def shape() -> ModelSpec:
    inv_freq = tuple(float(np.float32(1e6 ** (-i / 32))) for i in range(32))
    return ModelSpec(
        family="qwen2",
        architecture="Qwen2ForCausalLM",
        vocab_size=1024,
        hidden_size=896,
        intermediate_size=256,
        heads=14,
        kv_heads=2,
        head_size=64,
        layers=tuple(LayerSpec(rope=0) for _ in range(LAYERS)),
        context=1 << 20,
        norm_eps=1e-6,
        attention_scale=64**-0.5,
        ropes=(RopeSpec(inv_freq=inv_freq),),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of attention by KV type and context.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", default=choose_isa(None))
    parser.add_argument("--kv", default="bf16,int8,int4")
    options = parser.parse_args()
    pool = _core.Pool(1)
    types = [cast("KvType", each) for each in options.kv.split(",")]
    engines = {each: Engine(shape(), "int8", each, pool, isa=options.isa) for each in types}
    least: dict[tuple[str, int, int], float] = {}
    for _ in range(options.rounds):
        for rows, times in ((STEP, 2), (1, TOKENS)):
            for context in CONTEXTS:
                for kv, engine in engines.items():
                    found = min(engine.step(context - rows, rows)[1] for _ in range(times))
                    key = kv, rows, context
                    least[key] = min(found, least.get(key, found))
    print(f"{options.isa}, one thread, milliseconds of a layer\n")
    cells = [f"{STEP} tokens at {context:,}" for context in CONTEXTS]
    cells += [f"one at {context:,}" for context in CONTEXTS]
    print(f"| KV | {' | '.join(cells)} |\n|---|{'---:|' * len(cells)}")
    for kv in types:
        times = [least[kv, rows, context] * 1e3 / LAYERS for rows in (STEP, 1) for context in CONTEXTS]
        print(f"| `{kv}` | {' | '.join(f'{each:.2f}' for each in times)} |")


if __name__ == "__main__":
    main()
