"""Features of images: what rows begin with and what the first layers add to them, and outcomes of layers that are
kept beside the last one's."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.models.shorter_model import shorter_spec, shorter_tensors
from headrace.models.spec import LayerSpec, ModelSpec
from tests.core.tiny import ISAS, Floats, Tiny, packed_model, same_bits, spec, text

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
def test_outcomes_of_layers_are_kept(isa: str) -> None:
    layers = tuple(LayerSpec(kept=layer < 2) for layer in range(3))
    kept = np.full((2 * COUNT, BASE.hidden_size), np.nan, dtype=np.float32)
    found = outcome(msgspec.structs.replace(BASE, layers=layers), isa, kept=kept)
    assert same_bits(found, outcome(BASE, isa))
    for layer in range(2):
        skipped = set(range(layer + 1, 3))
        first = msgspec.structs.replace(shorter_spec(BASE, skipped), final_norm=False)
        own = {name: each for name, each in shorter_tensors(BASE, TENSORS, skipped).items() if name != "norm"}
        assert same_bits(kept[layer * COUNT : (layer + 1) * COUNT], outcome(first, isa, own))


def test_what_does_not_fit_is_refused() -> None:
    adding = msgspec.structs.replace(BASE, feature_layers=1)
    with pytest.raises(ValueError, match="features must have rows of 144"):
        outcome(adding, features=features(1), feature_rows=IMAGE)
    with pytest.raises(ValueError, match="feature_layers out of range"):
        outcome(msgspec.structs.replace(BASE, feature_layers=65))
    last = msgspec.structs.replace(BASE, layers=(LayerSpec(), LayerSpec(), LayerSpec(kept=True)))
    with pytest.raises(ValueError, match=r"layers\.2 is the last one"):
        outcome(last)
    first = msgspec.structs.replace(BASE, layers=(LayerSpec(kept=True), LayerSpec(), LayerSpec()))
    with pytest.raises(ValueError, match=r"kept must be \[40, 72\]"):
        outcome(first, kept=np.empty((1, BASE.hidden_size), dtype=np.float32))
