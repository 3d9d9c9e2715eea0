"""Invariant 1: a sequence's logits are the same bits, whatever else is computed, and however its own tokens came in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

import headrace._core as _core
from headrace.models.precision import KvType, WeightFormat
from headrace.models.spec import LatentSpec, LayerSpec, ModelSpec
from tests.core.tiny import (
    ENCODERS,
    ISAS,
    SPECS,
    Floats,
    Share,
    Tiny,
    core_tensors,
    random_tensors,
    same_bits,
    spec,
    text,
)

LENGTH = 70  # tokens: past one attention chunk, and 4.4 blocks
IN_ORDER = (0, 1, 2, 3, 4)
SCATTERED = (31, 7, 22, 13, 2)

PRECISIONS: list[tuple[WeightFormat, int]] = [
    ("f32", 0),
    ("bf16", 0),
    ("int8", 32),
    ("int8", 128),
    ("int8", 0),
    ("int4", 32),
    ("int4", 64),
    ("int4", 0),
]
KV_TYPES: list[KvType] = ["f32", "bf16", "int8"]


def ways(
    model: ModelSpec, format: WeightFormat, group: int, kv: KvType, isa: str
) -> Iterator[tuple[str, Floats, Floats]]:
    """Ways to compute one sequence: what is done, what comes of it, and what came of it alone and whole."""

    def fresh(threads: int = 1) -> Tiny:
        return Tiny(model, format, group, kv=kv, isa=isa, threads=threads)

    tokens = text(LENGTH, model)
    alone = fresh().rows(tokens, IN_ORDER)
    tiny = fresh()
    for chunk in (1, 7, 16, 64):
        yield f"prefill in chunks of {chunk}", tiny.rows(tokens, IN_ORDER, chunk=chunk), alone

    spoil(tiny)
    yield "reused blocks in another order", tiny.rows(tokens, SCATTERED, chunk=33), alone

    yield "3 threads", fresh(3).rows(tokens, SCATTERED), alone
    two_threads = fresh(2)
    yield "2 threads", two_threads.rows(tokens, SCATTERED), alone
    yield from in_a_ragged_batch(two_threads, tokens, alone)

    # Preempted: its blocks go to another sequence, and it starts again elsewhere.
    tiny.rows(tokens[:45], IN_ORDER)
    tiny.rows(text(60, model, seed=9), IN_ORDER)
    yield "recomputed after a preemption", tiny.rows(tokens, SCATTERED, chunk=50), alone

    # Two full blocks of another sequence with the same first tokens, then its own.
    tiny.rows(tokens[:32] + text(20, model, seed=8), (10, 11, 12, 13))
    shared = tiny.rows(tokens, (10, 11, 20, 21, 22), computed=32, chunk=30)
    yield "prefix in shared blocks", shared, alone[32:]

    # A copy of a partial block, whose first owner goes on with other tokens.
    tiny.rows(tokens[:41], (10, 11, 12))
    tiny.kv.copy_block(12, 24)
    tiny.rows(tokens[:41] + text(7, model, seed=7), (10, 11, 12), computed=41)
    yield "prefix with a copied block", tiny.rows(tokens, (10, 11, 24, 25, 26), computed=41), alone[41:]


def in_a_ragged_batch(tiny: Tiny, tokens: list[int], alone: Floats) -> Iterator[tuple[str, Floats, Floats]]:
    """Beside a prefill, a short prompt and a decoding sequence; ours in four pieces of different sizes."""
    others = [text(length, tiny.spec, seed=length) for length in (1, 90, 33)]
    tables = [(5,), (6, 7, 8, 9, 10, 11), (12, 13, 14)]
    tiny.rows(others[2][:30], tables[2])
    computed = [0, 0, 30]
    pieces: list[Floats] = []
    start = 0
    for place, (end, counts) in enumerate([(1, (1, 50, 1)), (18, (0, 9, 1)), (67, (0, 31, 1)), (LENGTH, (0, 0, 0))]):
        shares = [
            Share(others[i][computed[i] : computed[i] + count], computed[i], tables[i])
            for i, count in enumerate(counts)
            if count
        ]
        computed = [done + count for done, count in zip(computed, counts, strict=True)]
        at = min(place, len(shares))
        shares.insert(at, Share(tokens[start:end], start, IN_ORDER))
        first = sum(len(share.tokens) for share in shares[:at])
        pieces.append(tiny.step(shares)[first : first + end - start])
        start = end
    yield "in a ragged batch", np.concatenate(pieces), alone


def spoil(tiny: Tiny) -> None:
    """Fills every KV block with infinities and NaN, as a sequence of a broken model would leave them."""
    shapes = tiny.spec.kv_shapes
    size, value_size = shapes[0][1:]
    latent = None if value_size == size else LatentSpec(rank=2, turning=1, value_size=value_size, kept=False)
    if tiny.spec.values_in_keys:
        latent = LatentSpec(rank=value_size, turning=size - value_size, value_size=1)
        size = latent.turning + 1
    model = spec(
        hidden_size=2,
        vocab_size=2,
        heads=math.lcm(*(heads for heads, _, _ in shapes)),
        kv_heads=shapes[0][0],
        head_size=size,
        layers=tuple(
            LayerSpec(rope=None, kv_heads=heads, head_size=size if latent else wide) for heads, wide, _ in shapes
        ),
        latent=latent,
        pre_norm=False,
        final_norm=False,
    )
    largest = np.float32(3e38)
    tensors = dict(random_tensors(model))
    # Keys and values of token 0 are infinities, those of token 1 their difference.
    tensors["embed"] = np.array([[largest, 0], [largest, largest]], np.float32)
    for name in tensors:
        if name.endswith(".qkv"):
            tensors[name] = np.tile(np.array([[largest, -largest]]), (len(tensors[name]), 1))
    broken = Tiny(model, tensors=core_tensors(tensors))
    broken.kv = tiny.kv
    for first in range(0, tiny.kv.blocks, 16):
        blocks = range(first, min(first + 16, tiny.kv.blocks))
        assert np.isnan(broken.step([Share(text(16, model, seed=block), 0, (block,)) for block in blocks])).all()


def check(model: ModelSpec, format: WeightFormat, group: int, kv: KvType, isa: str) -> None:
    different = [way for way, found, expected in ways(model, format, group, kv, isa) if not same_bits(found, expected)]
    assert different == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize(("format", "group"), PRECISIONS)
def test_every_precision_gives_the_same_bits(format: WeightFormat, group: int, kv: KvType, isa: str) -> None:
    check(SPECS["everything"], format, group, kv, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", ["fp8", "int4"])
def test_keys_and_values_of_few_bits_give_the_same_bits(kv: KvType, isa: str) -> None:
    check(SPECS["everything"], "f32", 0, kv, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group", "kv"), [("f32", 0, "f32"), ("int8", 32, "int8"), ("int4", 0, "bf16")])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "everything"])
def test_every_feature_gives_the_same_bits(name: str, format: WeightFormat, group: int, kv: KvType, isa: str) -> None:
    check(SPECS[name], format, group, kv, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group", "kv"), [("f32", 0, "f32"), ("bf16", 0, "bf16"), ("int8", 64, "int8")])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_gives_the_same_bits_in_any_batch(
    name: str, format: WeightFormat, group: int, kv: KvType, isa: str
) -> None:
    model = ENCODERS[name]
    tokens = text(LENGTH, model)
    alone = Tiny(model, format, group, kv=kv, isa=isa).rows(tokens, IN_ORDER, hidden=True)
    for threads in (1, 2, 3):
        tiny = Tiny(model, format, group, kv=kv, isa=isa, threads=threads)
        spoil(tiny)
        shares = [Share(text(19, model), 0, (8, 9)), Share(tokens, 0, SCATTERED), Share(text(1, model), 0, (10,))]
        assert same_bits(tiny.step(shares, hidden=True)[19 : 19 + LENGTH], alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "group"), [("f32", 0), ("bf16", 0), ("int8", 64), ("int4", 0)])
@pytest.mark.parametrize("name", ["plain", "layer_norm", "experts", "soft_caps"])
def test_a_row_that_runs_to_infinity_touches_no_other(name: str, format: WeightFormat, group: int, isa: str) -> None:
    model = SPECS[name]
    tensors = dict(random_tensors(model))
    tensors["embed"] = tensors["embed"].copy()
    tensors["embed"][0, ::3] = np.inf
    tiny = Tiny(model, isa=isa, tensors=core_tensors(tensors, format, group, embed="f32"))
    tokens = [token or 1 for token in text(20, model)]
    alone = tiny.rows(tokens, (1, 2))
    beside = tiny.step([Share([0, 5, 0], 0, (0,)), Share(tokens, 0, (1, 2)), Share([3, 0], 0, (3,))])
    assert np.isnan(beside[0]).all()
    assert same_bits(beside[3:23], alone)
    # The rows that ran to infinity are the next step's rows of ours.
    assert same_bits(tiny.rows(tokens, (1, 2)), alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", [*KV_TYPES, "fp8", "int4"])
@pytest.mark.parametrize("name", ["plain", "window", "head_norms", "latents_of_64"])
def test_a_token_that_runs_to_infinity_touches_none_before_it(name: str, kv: KvType, isa: str) -> None:
    model = SPECS[name]
    tensors = dict(random_tensors(model))
    tensors["embed"] = tensors["embed"].copy()
    tensors["embed"][0, ::3] = np.inf
    tiny = Tiny(model, isa=isa, kv=kv, tensors=core_tensors(tensors))
    tokens = [token or 1 for token in text(LENGTH, model)]
    alone = tiny.rows(tokens, IN_ORDER)
    tokens[40] = 0
    found = tiny.rows(tokens, IN_ORDER)
    assert same_bits(found[:40], alone[:40])
    assert np.isnan(found[40]).all()
    decoded = tiny.rows(tokens, SCATTERED, chunk=1)
    assert np.array_equal(np.isnan(decoded), np.isnan(found))
    held = ~np.isnan(found)
    assert np.array_equal(decoded[held], found[held])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("format", "group", "kv"), [("bf16", 0, "bf16"), ("int8", 128, "int8"), ("int8", 0, "bf16"), ("int4", 32, "bf16")]
)
def test_a_long_step_gives_the_bits_of_short_ones(format: WeightFormat, group: int, kv: KvType, isa: str) -> None:
    """So many rows that kernels share them out in parts, the last of which is small."""
    model = SPECS["plain"]
    tokens = text(261, model)
    tiny = Tiny(model, format, group, kv=kv, isa=isa, threads=2, max_rows=261)
    whole = tiny.rows(tokens, range(17))
    assert same_bits(tiny.rows(tokens, range(20, 37), chunk=30), whole)
    assert same_bits(tiny.rows(tokens, range(20, 37), computed=250, chunk=1), whole[250:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["plain", "everything", "partial_rope", "latents"])
def test_wanting_fewer_rows_changes_none_of_them(name: str, isa: str) -> None:
    model = SPECS[name]
    tiny = Tiny(model, "int8", 64, kv="int8", isa=isa)
    shares = [
        Share(text(37, model), 0, (0, 1, 2)),
        Share(text(1, model), 0, (3,)),
        Share(text(50, model), 0, (4, 5, 6, 7)),
    ]
    everything = tiny.step(shares)
    hidden = tiny.step(shares, hidden=True)
    random = np.random.default_rng(3)
    choices: list[Iterable[int]] = [[0], [87], [37], [36, 37, 38], range(0, 88, 2), range(40, 88)]
    choices += [np.flatnonzero(random.random(88) < share).tolist() for share in (0.1, 0.5, 0.9)]
    for wanted in choices:
        rows = list(wanted)
        assert same_bits(tiny.step(shares, rows), everything[rows])
        assert same_bits(tiny.step(shares, rows, hidden=True), hidden[rows])


@pytest.mark.parametrize("isa", ISAS)
def test_a_step_that_wants_nothing_fills_the_blocks(isa: str) -> None:
    model = SPECS["everything"]
    tokens = text(LENGTH, model)
    alone = Tiny(model, isa=isa).rows(tokens, IN_ORDER)
    tiny = Tiny(model, isa=isa)
    assert tiny.step([Share(tokens[:50], 0, IN_ORDER)], wanted=[]).shape == (0, model.vocab_size)
    assert same_bits(tiny.rows(tokens, IN_ORDER, computed=50), alone[50:])


def test_many_rows_of_many_sequences_are_each_the_same_as_alone() -> None:
    model = SPECS["experts"]
    lengths = (1, 2, 3, 15, 16, 17, 31, 33, 1, 64, 5, 40, 1, 20)
    texts = [text(length, model, seed=length) for length in lengths]
    tables: list[range] = []
    for length in lengths:
        first = tables[-1].stop if tables else 0
        tables.append(range(first, first + -(-length // _core.BLOCK)))
    tiny = Tiny(model, "int4", 32, kv="int8", threads=2)
    shares = [Share(tokens, 0, table) for tokens, table in zip(texts, tables, strict=True)]
    together = np.split(tiny.step(shares), np.cumsum(lengths)[:-1])
    for tokens, found in zip(texts, together, strict=True):
        assert same_bits(found, Tiny(model, "int4", 32, kv="int8").rows(tokens, range(5)))
