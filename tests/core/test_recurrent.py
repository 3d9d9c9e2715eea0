"""Recurrent layers in the core: the same bits however sequences are cut, beside whatever, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import describe
from headrace.models.precision import WeightFormat
from headrace.models.spec import LayerSpec, ModelSpec, RecurrentSpec
from tests.core.tiny import ISAS, ROUNDS_ROWS, packed_model, spec

Floats = NDArray[np.float32]

RECURRENT = LayerSpec(mixer="recurrent")
MODELS: dict[str, ModelSpec] = {
    "short_conv": spec(
        layers=(RECURRENT, LayerSpec(), RECURRENT),
        recurrent=RecurrentSpec(kind="short_conv", taps=3, head_size=72, conv_bias=True, bias=True),
    ),
    "scan": spec(
        layers=(LayerSpec(mixer="recurrent", mlp=False),) * 2,
        recurrent=RecurrentSpec(
            kind="scan", taps=4, heads=6, groups=2, head_size=20, state_size=13, norm_groups=2, eps=1e-5, step_most=0.9
        ),
    ),
    "delta": spec(
        layers=(RECURRENT, LayerSpec(), LayerSpec(mixer="none"), RECURRENT),
        attention_gate=True,
        recurrent=RecurrentSpec(
            kind="delta",
            taps=2,
            heads=4,
            groups=2,
            head_size=25,
            state_size=18,
            norm_groups=4,
            shared_norm=True,
            norm_first=True,
            eps=1e-6,
        ),
    ),
}
SLOTS = 4


class Recurrent:
    """A model, its KV memory and its states. A sequence's slot is its number, and it has blocks of its own."""

    def __init__(self, model: ModelSpec, *, format: WeightFormat = "f32", isa: str = ISAS[0], threads: int = 1) -> None:
        self.spec = model
        self.pool = _core.Pool(threads)
        self.model = _core.Model(describe(model), packed_model(model, format), self.pool, 256, isa)
        self.kv = _core.Kv(model.kv_shapes, 8 * SLOTS, "f32")
        self.states = _core.States(SLOTS, model.state_floats)
        self.computed = [0] * SLOTS

    def step(self, *work: tuple[int, list[int]], wanted: list[int] | None = None, **changes: Any) -> Floats:
        """Compute tokens of sequences. Return the logits of the wanted rows, by default of all."""
        numbers = [number for number, _ in work]
        ends = np.cumsum([0, *(len(tokens) for _, tokens in work)])
        rows = np.array(range(ends[-1]) if wanted is None else wanted, dtype=np.int32)
        out = np.full((len(rows), self.spec.vocab_size), np.nan, dtype=np.float32)
        given = {"states": self.states, "state_slots": np.array(numbers, dtype=np.int32), **changes}
        self.model.step(
            self.kv,
            np.array([token for _, tokens in work for token in tokens], dtype=np.int32),
            ends.astype(np.int32),
            np.array([self.computed[number] for number in numbers], dtype=np.int32),
            np.array([range(8 * number, 8 * number + 8) for number in numbers], dtype=np.int32),
            np.zeros(len(work), dtype=np.int32),
            rows,
            out,
            **given,
        )
        for number, tokens in work:
            self.computed[number] += len(tokens)
        return out


def text(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 77, count).tolist()


@pytest.mark.parametrize("format", ["f32", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_company_and_threads_change_no_bit(name: str, format: WeightFormat) -> None:
    tokens = text(70)
    whole = Recurrent(MODELS[name], format=format).step((0, tokens))
    assert np.isfinite(whole).all()
    assert np.abs(whole).max() > 0.1
    cut = Recurrent(MODELS[name], format=format, threads=2)
    found: list[Floats] = []
    for start, end in ((0, 1), (1, 3), (3, 20), (20, 64), (64, 65), (65, 70)):
        other = text(end - start, seed=start)
        found.append(cut.step((2, other), (1, tokens[start:end]))[len(other) :])
    assert np.concatenate(found).tobytes() == whole.tobytes()
    few = Recurrent(MODELS[name], format=format)
    assert few.step((0, tokens), wanted=[3, 69]).tobytes() == whole[[3, 69]].tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_begins_anew_with_its_sequence_and_can_be_copied(name: str) -> None:
    tokens = text(40)
    model = Recurrent(MODELS[name])
    whole = model.step((0, tokens))
    model.computed[0] = 0
    assert model.step((0, tokens[:16])).tobytes() == whole[:16].tobytes()
    model.states.copy(0, 3)
    model.step((0, text(20, seed=5)))
    model.states.copy(3, 0)
    model.computed[0] = 16
    assert model.step((0, tokens[16:])).tobytes() == whole[16:].tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_the_state_after_a_row_is_kept_in_another_slot_too(name: str) -> None:
    tokens = text(12)
    model = Recurrent(MODELS[name], threads=2)
    whole = model.step((0, tokens))
    for count, kept in ((5, 0), (5, 4), (9, 2)):
        # Rows of another sequence lie before, and only one row of two leaves its state.
        model.computed[0] = model.computed[1] = 0
        trails = np.full(3 + count, -1, dtype=np.int32)
        trails[3 + kept] = 2
        trails[1] = 3
        found = model.step((1, text(3)), (0, tokens[:count]), state_trails=trails)
        assert found[3:].tobytes() == whole[:count].tobytes()
        model.states.copy(2, 0)
        model.computed[0] = kept + 1
        assert model.step((0, tokens[kept + 1 :])).tobytes() == whole[kept + 1 :].tobytes()
        model.computed[1] = 2
        model.states.copy(3, 1)
        rest = model.step((1, text(3)[2:]))
        assert rest.tobytes() == found[2:3].tobytes()


@pytest.mark.parametrize("format", ["f32", "bf16", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_instruction_sets_give_the_same_bits(name: str, format: WeightFormat) -> None:
    own = ROUNDS_ROWS if format == "bf16" else ()
    found = {isa: Recurrent(MODELS[name], format=format, isa=isa).step((0, text(50))) for isa in ISAS if isa not in own}
    assert len({logits.tobytes() for logits in found.values()}) == 1, found.keys()


def test_states_that_do_not_fit_are_refused() -> None:
    model = Recurrent(MODELS["scan"])
    slots = np.array([0], dtype=np.int32)
    for changes, message in (
        ({"states": None, "state_slots": None}, "no states"),
        ({"states": None}, "given together"),
        ({"state_slots": None}, "given together"),
        ({"states": 4}, "must be States"),
        ({"states": _core.States(2, 16)}, "another shape"),
        ({"state_slots": np.array([4], dtype=np.int32)}, "slot 4 does not exist"),
        ({"state_slots": np.array([-1], dtype=np.int32)}, "slot -1 does not exist"),
        ({"state_slots": np.array([0, 1], dtype=np.int32)}, "one entry a sequence"),
        ({"state_slots": slots.astype(np.int64)}, "array of i32"),
        ({"state_trails": np.array([1, -1], dtype=np.int32)}, "one entry a row"),
        ({"state_trails": np.array([1, -1, 4], dtype=np.int32)}, "slot 4 does not exist"),
        ({"state_trails": np.array([1, -1, -2], dtype=np.int32)}, "slot -2 does not exist"),
        ({"state_trails": np.array([1, -1, 1], dtype=np.int32)}, "slot 1 is used twice"),
        ({"state_trails": np.array([0, -1, -1], dtype=np.int32)}, "slot 0 is used twice"),
    ):
        with pytest.raises(ValueError, match=message):
            model.step((0, text(3)), **changes)
    with pytest.raises(ValueError, match="two sequences have state slot 0"):
        model.step((0, text(3)), (1, text(3)), state_slots=np.array([0, 0], dtype=np.int32))
    with pytest.raises(ValueError, match="out of range"):
        _core.States(0, 5)
    with pytest.raises(ValueError, match="does not exist"):
        model.states.copy(0, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"taps": 9}, "expected"),
        ({"heads": 5}, "expected"),
        ({"state_size": 0}, "expected"),
        ({"norm_size": 7}, "norms do not cover"),
        ({"kind": "loop"}, "unknown kind"),
        ({"step_least": 2.0}, "no bounds"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    model = MODELS["scan"]
    description = describe(model)
    description["recurrent"] = {**description["recurrent"], **change}
    with pytest.raises(ValueError, match=message):
        _core.Model(description, packed_model(model), _core.Pool(1), 16, ISAS[0])
