"""Time and memory of attention through latents: KV memory that keeps the latent, beside one with expanded keys and
values.

`python -m benchmarks.latent_attention` prints the table. Weights are random, in the shape of DeepSeek-V2-Lite with four
layers whose MLP is as large as what a token's experts are together; the layers share them. Both forms take turns, and
the table has medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import choose_isa, describe
from headrace.models.packing import CoreTensor, pack_matrix
from headrace.models.precision import KvType, parse_precision
from headrace.models.spec import LatentSpec, LayerSpec, ModelSpec, RopeSpec
from headrace.models.tensor_shapes import is_product, tensor_shapes

LAYERS: Final = 4
ROWS: Final = 256  # of a step of a prompt
CONTEXTS: Final = (512, 2048, 8192, 16384)
ROUNDS: Final = 5


def shape() -> ModelSpec:
    inv_freq = tuple(float(np.float32(10000.0 ** (-i / 32))) for i in range(32))
    return ModelSpec(
        family="deepseek",
        architecture="DeepseekV2ForCausalLM",
        vocab_size=1024,
        hidden_size=2048,
        intermediate_size=8 * 1408,
        heads=16,
        kv_heads=16,
        head_size=192,
        layers=tuple(LayerSpec(rope=0) for _ in range(LAYERS)),
        context=1 << 20,
        norm_eps=1e-6,
        attention_scale=192**-0.5,
        ropes=(RopeSpec(inv_freq=inv_freq),),
        latent=LatentSpec(rank=512, turning=64, value_size=128),
    )


def random_tensors(spec: ModelSpec, weights: str, pool: _core.Pool) -> Mapping[str, CoreTensor]:
    random = np.random.default_rng(0)
    made: dict[tuple[str, tuple[int, ...]], CoreTensor] = {}
    tensors: dict[str, CoreTensor] = {}
    for name, sizes in tensor_shapes(spec).items():
        key = name.split(".", 2)[-1], sizes
        if key not in made:
            if is_product(name):
                values = random.standard_normal(sizes, dtype=np.float32) / np.float32(sizes[-1] ** 0.5)
                made[key] = pack_matrix(values, parse_precision(weights), pool)
            else:
                made[key] = np.ones(sizes, np.float32)
        tensors[name] = made[key]
    return tensors


class Engine:
    """A model of one form, and KV memory full of tokens."""

    def __init__(self, spec: ModelSpec, weights: str, kv: KvType, pool: _core.Pool, isa: str | None = None) -> None:
        self.spec = spec
        isa = choose_isa(isa)
        self._tensors = random_tensors(spec, weights, pool)
        self._model = _core.Model(describe(spec), self._tensors, pool, ROWS, isa)
        self.blocks = (max(CONTEXTS) + ROWS) // _core.BLOCK
        self._kv = _core.Kv(spec.kv_shapes, self.blocks, kv, spec.values_in_keys)
        self.step(0, _core.BLOCK)
        for block in range(1, self.blocks):
            self._kv.copy_block(0, block)

    @property
    def token_bytes(self) -> float:
        return self._kv.bytes_per_block / _core.BLOCK / LAYERS

    def step(self, computed: int, rows: int) -> tuple[float, float]:
        """Run a step of one sequence. Return its seconds, and those of its attention."""
        tables: NDArray[np.int32] = np.arange(self.blocks, dtype=np.int32)[None]
        out = np.empty((1, self.spec.vocab_size), np.float32)
        before, begin = self._model.stage_seconds()["attention"], time.perf_counter()
        self._model.step(
            self._kv,
            np.arange(rows, dtype=np.int32),
            np.array([0, rows], np.int32),
            np.array([computed], np.int32),
            tables,
            np.zeros(1, np.int32),
            np.array([rows - 1], np.int32),
            out,
            False,
        )
        return time.perf_counter() - begin, self._model.stage_seconds()["attention"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    spec = shape()
    assert spec.latent is not None
    forms = {"expanded": replace(spec, latent=replace(spec.latent, kept=False)), "latent": spec}
    pool = _core.Pool(options.threads)
    engines = {name: Engine(each, options.weights, options.kv, pool) for name, each in forms.items()}
    print(f"{choose_isa(None)}, {options.threads} threads, {options.weights} weights, {options.kv} KV, {LAYERS} layers")
    for name, engine in engines.items():
        print(f"{name}: {engine.token_bytes:,.0f} bytes of KV for a token and layer")
    print("| step | context | " + " | ".join(f"{name}: ms (attention)" for name in engines) + " | ratio |")
    print("|---|---:|" + "---:|" * (len(engines) + 1))
    for rows in (1, ROWS):
        for context in CONTEXTS:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for _ in range(ROUNDS):
                for name, engine in engines.items():
                    found[name].append(engine.step(context, rows))
            whole, attention = (
                {name: 1e3 * statistics.median(each[at] for each in times) for name, times in found.items()}
                for at in range(2)
            )
            cells = " | ".join(f"{whole[name]:.1f} ({attention[name]:.1f})" for name in engines)
            print(f"| {rows} | {context} | {cells} | {whole['latent'] / whole['expanded']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
