"""Features of images: what rows begin with and what the first layers add to them, and outcomes of layers that are
kept beside the last one's."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.models.shorter_model import shorter_spec, shorter_tensors
from headrace.models.spec import LayerSpec, ModelSpec
from tests.core.tiny import ISAS, Floats, Tiny, core_tensors, packed_model, random_tensors, same_bits, spec, text

BASE = spec(layers=(LayerSpec(), LayerSpec(), LayerSpec()))
TENSORS = packed_model(BASE)
COUNT = 40  # tokens
IMAGE = np.where((np.arange(COUNT) > 9) & (np.arange(COUNT) < 30), np.arange(COUNT) - 10, -1).astype(np.int32)


def outcome(
    model: ModelSpec, isa: str = ISAS[0], tensors: Any = TENSORS, *, ends: tuple[int, ...] = (), **given: Any
) -> Floats:
    """The hidden states of all rows of one sequence, in steps that end at `ends` and at its end."""
    tiny = Tiny(model, isa=isa, threads=2, tensors=tensors)
    tokens, found, start = np.array(text(COUNT, model), dtype=np.int32), [], 0
    for end in (*ends, COUNT):
        out = np.empty((end - start, model.hidden_size), dtype=np.float32)
        rows = {name: value[start:end] if name == "feature_rows" else value for name, value in given.items()}
        tiny.model.step(
            tiny.kv,
            tokens[start:end],
            np.array([0, end - start], dtype=np.int32),
            np.array([start], dtype=np.int32),
            np.arange(10, dtype=np.int32)[None],
            np.zeros(1, dtype=np.int32),
            np.arange(end - start, dtype=np.int32),
            out,
            True,
            **rows,
        )
        found.append(out)
        start = end
    return np.concatenate(found)


def features(parts: int) -> Floats:
    return np.random.default_rng(3).standard_normal((20, parts * BASE.hidden_size)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_the_first_layers_add_their_parts_of_features(isa: str) -> None:
    adding = msgspec.structs.replace(BASE, feature_layers=2)
    given = features(3)
    found = outcome(adding, isa, features=given, feature_rows=IMAGE)
    # The same by hand: each layer alone, with the parts added between.
    rows = np.empty((COUNT, BASE.hidden_size), dtype=np.float32)
    for layer in range(3):
        skipped = {0, 1, 2} - {layer}
        alone = msgspec.structs.replace(shorter_spec(BASE, skipped), final_norm=layer == 2)
        own = {
            name: each for name, each in shorter_tensors(BASE, TENSORS, skipped).items() if layer == 2 or name != "norm"
        }
        begins = given[:, : BASE.hidden_size] if layer == 0 else rows
        numbers = IMAGE if layer == 0 else np.arange(COUNT, dtype=np.int32)
        rows = outcome(alone, isa, own, features=np.ascontiguousarray(begins), feature_rows=numbers)
        if layer < 2:
            rows[IMAGE >= 0] += given[:, (layer + 1) * BASE.hidden_size : (layer + 2) * BASE.hidden_size]
    assert same_bits(found, rows)
    # Steps that cut the image apart add the same.
    assert same_bits(outcome(adding, isa, ends=(5, 17), features=given, feature_rows=IMAGE), found)
    assert same_bits(outcome(adding, isa), outcome(BASE, isa))  # nothing without features


@pytest.mark.parametrize("isa", ISAS)
def test_what_layers_begin_with_is_kept(isa: str) -> None:
    kept = np.full((3 * COUNT, BASE.hidden_size), np.nan, dtype=np.float32)
    found = outcome(BASE, isa, kept=kept, kept_layers=np.arange(3, dtype=np.int32))
    assert same_bits(found, outcome(BASE, isa))
    one = np.empty((COUNT, BASE.hidden_size), dtype=np.float32)
    outcome(BASE, isa, kept=one, kept_layers=np.array([2], dtype=np.int32))
    assert same_bits(one, kept[2 * COUNT :])
    embed = TENSORS["embed"].unpack_rows(np.array(text(COUNT, BASE), dtype=np.int32))
    assert same_bits(kept[:COUNT], embed)
    for layer in (1, 2):
        skipped = set(range(layer, 3))
        first = msgspec.structs.replace(shorter_spec(BASE, skipped), final_norm=False)
        own = {name: each for name, each in shorter_tensors(BASE, TENSORS, skipped).items() if name != "norm"}
        assert same_bits(kept[layer * COUNT : (layer + 1) * COUNT], outcome(first, isa, own))


def test_what_does_not_fit_is_refused() -> None:
    adding = msgspec.structs.replace(BASE, feature_layers=1)
    with pytest.raises(ValueError, match="features must have rows of 144"):
        outcome(adding, features=features(1), feature_rows=IMAGE)
    with pytest.raises(ValueError, match="feature_layers out of range"):
        outcome(msgspec.structs.replace(BASE, feature_layers=65))
    room = np.empty((COUNT, BASE.hidden_size), dtype=np.float32)
    for layers, reason in (
        ([3], "must be ascending layers"),
        ([-1], "must be ascending"),
        ([1, 1], r"must be \[80, 72\]"),
    ):
        with pytest.raises(ValueError, match=reason):
            outcome(BASE, kept=room, kept_layers=np.array(layers, dtype=np.int32))
    with pytest.raises(ValueError, match="given together"):
        outcome(BASE, kept=room)
    pairs = {"features": features(2), "feature_rows": np.zeros(COUNT, dtype=np.int32)}
    with pytest.raises(ValueError, match="every row needs a feature"):
        outcome(PAIRED, tensors=PAIRED_TENSORS, **pairs | {"feature_rows": IMAGE})
    with pytest.raises(ValueError, match="features must have rows of 144"):
        outcome(PAIRED, tensors=PAIRED_TENSORS, **pairs | {"features": features(1)})
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.qkv"):
        outcome(PAIRED, tensors=TENSORS, **pairs)


PAIRED = spec(layers=(LayerSpec(paired=True), LayerSpec()))
PAIRED_TENSORS = packed_model(PAIRED)


@pytest.mark.parametrize("isa", ISAS)
def test_a_paired_layer_reads_the_second_part_beside_the_residual(isa: str) -> None:
    plain = spec(layers=(LayerSpec(), LayerSpec()))
    size = plain.hidden_size
    weights = random_tensors(plain)
    begun, beside = (np.random.default_rng(seed).standard_normal((COUNT, size)).astype(np.float32) for seed in (3, 4))
    rows = np.arange(COUNT, dtype=np.int32)
    given = {"features": np.concatenate([begun, beside], axis=1), "feature_rows": rows}
    own = weights["layers.0.attn.qkv"]
    for left, alike in ((np.zeros_like(own), True), (own[:, ::-1].copy(), False)):
        wide = {**weights, "layers.0.attn.qkv": np.concatenate([left, own], axis=1)}
        found = outcome(PAIRED, isa, core_tensors(wide, "f32", 0), **given)
        expected = outcome(plain, isa, core_tensors(weights, "f32", 0), features=begun, feature_rows=rows)
        assert np.allclose(found, expected, rtol=1e-3, atol=1e-3) == alike
    for precision in ("f32", "int8"):
        tensors = packed_model(PAIRED, precision)
        whole = outcome(PAIRED, isa, tensors, **given)
        assert same_bits(outcome(PAIRED, isa, tensors, ends=(1, 17), **given), whole)
