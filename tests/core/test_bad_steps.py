"""Steps that the core refuses: every wrong shape, type and number, with a reason and before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace._core as _core
from tests.core.tiny import ENCODER, ENCODERS, SPECS, Floats, Share, Tiny, same_bits, text
from tests.core.wrong_arrays import REFUSED, floats, frozen, int32, off_by_one_byte

MODEL = SPECS["everything"]


def good_step(tiny: Tiny) -> dict[str, Any]:
    """Arguments of a step that the core accepts: two sequences, one of them with 20 tokens computed."""
    tokens = text(23, tiny.spec)
    return {
        "kv": tiny.kv,
        "tokens": int32(*tokens),
        "offsets": int32(0, 18, 23),
        "computed": int32(0, 20),
        "block_tables": int32([0, 1, -1], [2, 3, 9999]),
        "rope_variants": int32(0, 1),
        "wanted": int32(2, 17, 22),
        "out": np.full((3, tiny.spec.vocab_size), 7.0, np.float32),
    }


Change = Callable[[dict[str, Any]], dict[str, Any]]


def put(name: str, index: int | tuple[int, int], value: int) -> Change:
    """One number of one argument made wrong."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        array = arguments[name].copy()
        array[index] = value
        return {name: array}

    return change


def replaced(name: str, value: Any) -> Change:
    return lambda arguments: {name: value(arguments[name]) if callable(value) else value}


def both(*changes: Change) -> Change:
    return lambda arguments: {name: value for change in changes for name, value in change(arguments).items()}


def own_spans() -> np.ndarray[Any, np.dtype[np.int32]]:
    """Each row of `good_step` in a span of its own."""
    positions = np.concatenate([np.arange(18), np.arange(20, 25)])
    return np.stack([positions, positions + 1], axis=1).astype(np.int32)


def features(rows: Any, places: Any) -> Change:
    return lambda _: {"features": rows, "feature_rows": places}


WRONG_STEPS: dict[str, Change] = {
    "a negative token": put("tokens", 5, -1),
    "a token past the vocabulary": put("tokens", 22, MODEL.vocab_size),
    "offsets that start late": put("offsets", 0, 1),
    "offsets that start before the rows": put("offsets", 0, -1),
    "offsets that end early": put("offsets", 2, 22),
    "offsets that end late": put("offsets", 2, 24),
    "an empty sequence": put("offsets", 1, 0),
    "an empty last sequence": put("offsets", 1, 23),
    "offsets that go back": put("offsets", 1, 40),
    "a negative offset": put("offsets", 1, -(2**31)),
    "a negative computed": put("computed", 1, -1),
    "more computed than blocks hold": put("computed", 1, 28),
    "far more computed than blocks hold": put("computed", 1, 2**31 - 1),
    "a block that does not exist": put("block_tables", (0, 1), 40),
    "a negative block": put("block_tables", (1, 0), -1),
    "a rope variant that does not exist": put("rope_variants", 0, 2),
    "a negative rope variant": put("rope_variants", 1, -1),
    "a negative wanted row": put("wanted", 0, -1),
    "a wanted row past the last": put("wanted", 2, 23),
    "wanted rows that descend": put("wanted", 1, 1),
    "a row wanted twice": put("wanted", 1, 2),
    "no tokens": replaced("tokens", int32()),
    "no sequences": both(
        *(replaced(name, int32()) for name in ("computed", "rope_variants")),
        replaced("offsets", int32(0)),
        replaced("block_tables", np.zeros((0, 3), np.int32)),
    ),
    "no offsets": replaced("offsets", int32()),
    "an offset too few": replaced("offsets", int32(0, 23)),
    "a table too few": replaced("block_tables", lambda a: a[:1].copy()),
    "a variant too many": replaced("rope_variants", int32(0, 0, 0)),
    "tables too short": replaced("block_tables", lambda a: a[:, :1].copy()),
    "tables of no blocks": replaced("block_tables", lambda a: a[:, :0].copy()),
    "more rows than the model takes": both(
        replaced("tokens", np.zeros(257, np.int32)), replaced("offsets", int32(0, 2, 257))
    ),
    "an output row too few": replaced("out", lambda a: a[:2].copy()),
    "an output column too few": replaced("out", lambda a: a[:, :-1].copy()),
    "an output column too many": replaced("out", floats(3, MODEL.vocab_size + 1)),
    "an output of another type": replaced("out", lambda a: a.astype(np.float64)),
    "an output of integers": replaced("out", lambda a: a.astype(np.int32)),
    "an output in another order": replaced("out", np.asfortranarray),
    "an output of one dimension": replaced("out", lambda a: a.reshape(-1)),
    "an output that is a view with gaps": replaced("out", floats(6, MODEL.vocab_size)[::2]),
    "an output that may not be written": replaced("out", frozen),
    "an output between addresses": replaced("out", off_by_one_byte),
    "no output": replaced("out", None),
    "tokens of 64 bits": replaced("tokens", lambda a: a.astype(np.int64)),
    "tokens that are not whole": replaced("tokens", lambda a: a.astype(np.float32)),
    "tokens of the other byte order": replaced("tokens", lambda a: a.astype(">i4")),
    "tokens with gaps": replaced("tokens", lambda a: np.repeat(a, 2)[::2]),
    "tokens between addresses": replaced("tokens", off_by_one_byte),
    "tokens in a list": replaced("tokens", lambda a: a.tolist()),
    "tokens in two dimensions": replaced("tokens", lambda a: a[None]),
    "offsets of 64 bits": replaced("offsets", lambda a: a.astype(np.int64)),
    "computed that are not whole": replaced("computed", lambda a: a.astype(np.float64)),
    "tables of 64 bits": replaced("block_tables", lambda a: a.astype(np.int64)),
    "tables in another order": replaced("block_tables", np.asfortranarray),
    "tables of one dimension": replaced("block_tables", lambda a: a.reshape(-1)),
    "wanted of 64 bits": replaced("wanted", lambda a: a.astype(np.int64)),
    "variants of 64 bits": replaced("rope_variants", lambda a: a.astype(np.int64)),
    "KV of fewer layers": replaced("kv", _core.Kv([(2, 24, 24)], 8, "f32")),
    "KV of other heads": replaced("kv", _core.Kv([(2, 24, 24), (4, 24, 24)], 8, "f32")),
    "KV of other head sizes": replaced("kv", _core.Kv([(2, 24, 24), (2, 32, 24)], 8, "f32")),
    "KV of other values": replaced("kv", _core.Kv([(2, 24, 20), (2, 24, 24)], 8, "f32")),
    "KV of too few blocks": replaced("kv", _core.Kv([(2, 24, 24)] * 2, 3, "f32")),
    "no KV": replaced("kv", None),
    "a second text too few": replaced("second_texts", int32(-1)),
    "second texts that are not whole": replaced("second_texts", floats(2, 1)[:, 0]),
    "a second text of a model without types": replaced("second_texts", int32(-1, 3)),
    "features without places": replaced("features", floats(1, MODEL.hidden_size)),
    "places without features": replaced("feature_rows", np.zeros(23, np.int32)),
    "a feature that does not exist": features(floats(1, MODEL.hidden_size), np.ones(23, np.int32)),
    "a negative feature": features(floats(1, MODEL.hidden_size), np.full(23, -2, np.int32)),
    "features of another width": features(floats(1, MODEL.hidden_size + 1), np.zeros(23, np.int32)),
    "places of features too few": features(floats(1, MODEL.hidden_size), np.zeros(22, np.int32)),
    "spans too few": replaced("spans", own_spans()[1:]),
    "spans of one number": replaced("spans", own_spans()[:, :1].copy()),
    "spans of 64 bits": replaced("spans", own_spans().astype(np.int64)),
    "a row before its span": replaced("spans", own_spans() + int32([1, 1])),
    "a row behind its span": replaced("spans", own_spans() - int32([0, 1])),
    "a span that is not computed": replaced("spans", own_spans() + int32([0, 20])),
    "a negative span": replaced("spans", own_spans() - int32([30, 0])),
    "rope places too few": replaced("places", np.zeros((22, 3), np.int32)),
    "rope places of two numbers": replaced("places", np.zeros((23, 2), np.int32)),
    "rope places that are not whole": replaced("places", floats(23, 3)),
    "places of features of 64 bits": features(floats(1, MODEL.hidden_size), np.zeros(23, np.int64)),
}


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_wrong_step_is_refused_and_computes_nothing(wrong: str) -> None:
    tiny = Tiny(MODEL, "int8", 64, kv="bf16")
    tokens = text(40, MODEL)
    before = tiny.rows(tokens, (2, 3, 4))
    arguments = good_step(tiny)
    arguments |= WRONG_STEPS[wrong](arguments)
    out = arguments["out"].copy() if isinstance(arguments["out"], np.ndarray) else None
    with pytest.raises(REFUSED):
        tiny.model.step(**arguments)
    if out is not None:
        assert np.array_equal(arguments["out"], out)
    # Nothing was written into the blocks that the step named, and the model still works.
    assert same_bits(tiny.rows(tokens, (2, 3, 4), computed=35), before[35:])
    tiny.model.step(**good_step(tiny))


def test_the_step_that_the_wrong_ones_are_made_from_is_right() -> None:
    tiny = Tiny(MODEL)
    arguments = good_step(tiny)
    tiny.model.step(**arguments)
    assert (arguments["out"] != 7.0).all()


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_random_steps_never_do_harm(data: st.DataObject) -> None:
    small = st.integers(-2, 40)
    number = st.one_of(small, st.integers(-(2**31), 2**31 - 1))
    integers = st.lists(number, max_size=6).map(lambda values: np.array(values, dtype=np.int32))
    tiny, expected = _shared()
    arguments = good_step(tiny)
    for name in ("tokens", "offsets", "computed", "rope_variants", "wanted"):
        if data.draw(st.booleans()):
            arguments[name] = data.draw(integers)
    rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    if data.draw(st.booleans()):
        arguments["block_tables"] = np.array(
            data.draw(st.lists(number, min_size=rows * columns, max_size=rows * columns)), dtype=np.int32
        ).reshape(rows, columns)
    arguments["out"] = floats(len(arguments["wanted"]), MODEL.vocab_size)
    with suppress(ValueError):  # most are refused; what is not must be a step that exists
        tiny.model.step(**arguments)
    tokens = text(20, MODEL)
    assert same_bits(tiny.rows(tokens, (30, 31)), expected)


_held: list[tuple[Tiny, Floats]] = []


def _shared() -> tuple[Tiny, Floats]:
    if not _held:
        tiny = Tiny(MODEL, "int4", 32, kv="int8")
        _held.append((tiny, tiny.rows(text(20, MODEL), (30, 31))))
    return _held[0]


def test_an_encoder_takes_a_sequence_only_whole_and_within_its_positions() -> None:
    tiny = Tiny(ENCODER)
    with pytest.raises(ValueError, match="in one piece"):
        tiny.step([Share([1, 2], 3, (0,))], hidden=True)
    with pytest.raises(ValueError, match="learned positions"):
        tiny.rows(text(101, ENCODER), range(7), hidden=True)
    with pytest.raises(ValueError, match="no token type"):
        Tiny(ENCODERS["windows"]).rows([1, 2], (0,), hidden=True, second=1)
    with pytest.raises(ValueError, match="no output head"):
        tiny.rows(text(5, ENCODER), (0,))
