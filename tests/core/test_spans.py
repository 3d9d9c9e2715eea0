"""Spans and places of rows: an image's tokens that see each other, windows of its patches, and ropes that turn by rows
and columns."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.models.spec import LayerSpec, ModelSpec
from tests.core.tiny import ISAS, SPECS, Floats, Tiny, packed_model, same_bits, text

BASE = SPECS["gated_biases"]
COUNT = 150  # tokens: in three chunks of attention
IMAGE = (40, 130)  # first token and end


def placed(spec: ModelSpec) -> ModelSpec:
    """The same model with ropes that turn by three numbers."""
    ropes = tuple(
        msgspec.structs.replace(rope, axes=tuple(pair % 3 for pair in range(len(rope.inv_freq)))) for rope in spec.ropes
    )
    return msgspec.structs.replace(spec, ropes=ropes)


def hidden(
    spec: ModelSpec, isa: str, kv: Any = "f32", *, ends: tuple[int, ...] = (COUNT,), **given: NDArray[np.int32] | None
) -> Floats:
    """All rows of one sequence, in steps that end at `ends`."""
    tiny = Tiny(spec, isa=isa, kv=kv, threads=2, tensors=packed_model(BASE))
    tokens, blocks = np.array(text(COUNT, spec), dtype=np.int32), np.arange(10, dtype=np.int32)[None]
    found: list[Floats] = []
    start = 0
    for end in ends:
        out = np.empty((end - start, spec.hidden_size), dtype=np.float32)
        tiny.model.step(
            tiny.kv,
            tokens[start:end],
            np.array([0, end - start], dtype=np.int32),
            np.array([start], dtype=np.int32),
            blocks,
            np.zeros(1, dtype=np.int32),
            np.arange(end - start, dtype=np.int32),
            out,
            True,
            **{name: None if rows is None else np.ascontiguousarray(rows[start:end]) for name, rows in given.items()},
        )
        found.append(out)
        start = end
    return np.concatenate(found)


def spans_of(*images: tuple[int, int]) -> NDArray[np.int32]:
    spans = np.stack([np.arange(COUNT), np.arange(COUNT) + 1], axis=1).astype(np.int32)
    for start, end in images:
        spans[start:end] = start, end
    return spans


@pytest.mark.parametrize("isa", ISAS)
def test_tokens_of_a_span_see_each_other(isa: str) -> None:
    spec = msgspec.structs.replace(BASE, image_span=COUNT)
    both_ways = msgspec.structs.replace(BASE, causal=False)
    whole = hidden(spec, isa, spans=spans_of((0, COUNT)))
    assert same_bits(whole, hidden(both_ways, isa))
    causal = hidden(spec, isa)
    assert same_bits(hidden(spec, isa, spans=spans_of()), causal)
    assert same_bits(hidden(BASE, isa, spans=spans_of(IMAGE)), causal)  # of a model that knows no spans
    mixed = hidden(spec, isa, spans=spans_of(IMAGE))
    assert same_bits(mixed[: IMAGE[0]], causal[: IMAGE[0]])
    assert not np.isclose(mixed[IMAGE[0] :], causal[IMAGE[0] :]).all(axis=1).any()


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_spans_give_the_same_bits_however_the_rest_is_cut(isa: str, kv: str) -> None:
    spec = placed(msgspec.structs.replace(BASE, image_span=COUNT))
    places = np.random.default_rng(3).integers(0, 40, (COUNT, 3)).astype(np.int32)
    expected = hidden(spec, isa, kv, spans=spans_of(IMAGE), places=places)
    cut = hidden(spec, isa, kv, ends=(7, *IMAGE, 131, COUNT), spans=spans_of(IMAGE), places=places)
    assert same_bits(cut, expected)
    if _core.isa_arithmetic(isa) == "portable":
        assert same_bits(hidden(spec, "portable", kv, spans=spans_of(IMAGE), places=places), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_see_their_span_alone_are_sequences_of_their_own(isa: str) -> None:
    layers = (LayerSpec(spans=True),) * len(BASE.layers)
    spec = placed(msgspec.structs.replace(BASE, causal=False, layers=layers))
    own = np.repeat(np.concatenate([np.arange(40), np.arange(COUNT - 40)])[:, None], 3, axis=1).astype(np.int32)
    found = hidden(spec, isa, spans=spans_of((0, 40), (40, COUNT)), places=own)
    tiny = Tiny(msgspec.structs.replace(BASE, causal=False), isa=isa, tensors=packed_model(BASE))
    tokens = text(COUNT, BASE)
    apart = np.concatenate([tiny.rows(part, range(10), hidden=True) for part in (tokens[:40], tokens[40:])])
    assert np.allclose(found, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_places_that_are_positions_change_nothing(isa: str) -> None:
    positions = np.repeat(np.arange(COUNT, dtype=np.int32)[:, None], 3, axis=1)
    expected = hidden(BASE, isa)
    assert same_bits(hidden(placed(BASE), isa, places=positions), expected)
    for axis in range(3):
        moved = positions.copy()
        moved[80, axis] = 3
        assert not same_bits(hidden(placed(BASE), isa, places=moved)[80:], expected[80:])
        assert same_bits(hidden(BASE, isa, places=moved), expected) == (axis > 0)  # others turn by the first
