"""The hidden states that a step hands out with its logits: what they are, and that they change nothing."""

from __future__ import annotations

import numpy as np
import pytest

import headrace._core as _core
from headrace.models.packing import pack_matrix
from headrace.models.precision import parse_precision
from tests.core.tiny import ISAS, SPECS, Floats, Tiny, same_bits, text

LENGTH = 21


def step(
    tiny: Tiny, *, states: Floats | None = None, hidden: bool = False, answered: list[int] | None = None
) -> Floats:
    rows = LENGTH if answered is None else len(answered)
    out = np.full((rows, tiny.spec.hidden_size if hidden else tiny.spec.vocab_size), np.nan, dtype=np.float32)
    tiny.model.step(
        tiny.kv,
        np.array(text(LENGTH, tiny.spec), dtype=np.int32),
        np.array([0, LENGTH], dtype=np.int32),
        np.zeros(1, dtype=np.int32),
        np.array([[0, 1]], dtype=np.int32),
        np.zeros(1, dtype=np.int32),
        np.arange(LENGTH, dtype=np.int32),
        out,
        hidden,
        final_states=states,
        answered=None if answered is None else np.array(answered, dtype=np.int32),
    )
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["f32", "int8"])
@pytest.mark.parametrize("name", ["plain", "soft_caps"])
def test_they_are_the_hidden_states_and_the_logits_stay_the_same_bits(name: str, format: str, isa: str) -> None:
    tiny = Tiny(SPECS[name], format, isa=isa)  # pyright: ignore[reportArgumentType]
    states = np.full((LENGTH, tiny.spec.hidden_size), np.nan, dtype=np.float32)
    assert same_bits(step(tiny, states=states), step(tiny))
    assert same_bits(states, step(tiny, hidden=True))


@pytest.mark.parametrize("answered", [[], [4], [0, 1, 7, LENGTH - 1], list(range(LENGTH))])
def test_logits_of_some_rows_are_those_of_all(answered: list[int]) -> None:
    tiny = Tiny(SPECS["soft_caps"], "int8")
    states = np.full((LENGTH, tiny.spec.hidden_size), np.nan, dtype=np.float32)
    assert same_bits(step(tiny, states=states, answered=answered), step(tiny)[answered])
    assert same_bits(states, step(tiny, hidden=True))


@pytest.mark.parametrize("answered", [[-1], [LENGTH], [3, 3], [4, 2]])
def test_rows_that_cannot_be_answered_are_refused(answered: list[int]) -> None:
    tiny = Tiny(SPECS["plain"])
    states = np.zeros((LENGTH, tiny.spec.hidden_size), np.float32)
    with pytest.raises(ValueError, match="answered must be ascending places in wanted"):
        step(tiny, states=states, answered=answered)
    with pytest.raises(ValueError, match="answered needs final_states"):
        step(tiny, answered=[1])


@pytest.mark.parametrize("width", [3, 64])
def test_arrays_of_another_shape_are_refused(width: int) -> None:
    tiny = Tiny(SPECS["plain"])
    with pytest.raises(ValueError, match="final_states"):
        step(tiny, states=np.zeros((LENGTH - 1, width), np.float32))
    with pytest.raises(ValueError, match="final_states must be an array"):
        step(tiny, states=np.zeros((LENGTH, tiny.spec.hidden_size), np.float64))  # pyright: ignore[reportArgumentType]


def test_hidden_states_have_none_beside_them() -> None:
    tiny = Tiny(SPECS["plain"])
    with pytest.raises(ValueError, match="hidden states have no final states beside them"):
        step(tiny, hidden=True, states=np.zeros((LENGTH, tiny.spec.hidden_size), np.float32))


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4-g32"])
def test_single_rows_of_a_matrix_are_those_of_all(precision: str) -> None:
    values = np.random.default_rng(0).standard_normal((70, 64)).astype(np.float32)
    packed = pack_matrix(values, parse_precision(precision), _core.Pool(1))
    rows = np.array([69, 0, 33, 33], dtype=np.int32)
    assert same_bits(packed.unpack_rows(rows), packed.unpack()[rows])
    for wrong in (-1, 70):
        with pytest.raises(ValueError, match=f"row {wrong} does not exist"):
            packed.unpack_rows(np.array([wrong], dtype=np.int32))
    between = np.frombuffer(b"\0" + rows.tobytes(), np.uint8)[1:].view(np.int32)
    for unnatural in (np.repeat(rows, 2)[::2], between):
        with pytest.raises((ValueError, TypeError)):
            packed.unpack_rows(unnatural)
