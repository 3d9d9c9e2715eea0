"""The peaks that a step hands out with its logits: what they are, that they change nothing, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace._core as _core
from tests.core.tiny import ISAS, SPECS, Floats, Tiny, same_bits, text

LENGTH = 21


def peaks_of(logits: Floats) -> Floats:
    rows, vocab = logits.shape
    padded = np.full((rows, -(-vocab // 32) * 32), -np.inf, dtype=np.float32)
    padded[:, :vocab] = logits
    return padded.reshape(rows, -1, 32).max(axis=2)


def step(tiny: Tiny, *, peaks: Floats | None, hidden: bool = False, wanted: int = LENGTH) -> Floats:
    tokens = text(LENGTH, tiny.spec)
    out = np.full((wanted, tiny.spec.hidden_size if hidden else tiny.spec.vocab_size), np.nan, dtype=np.float32)
    tiny.model.step(
        tiny.kv,
        np.array(tokens, dtype=np.int32),
        np.array([0, LENGTH], dtype=np.int32),
        np.zeros(1, dtype=np.int32),
        np.array([[0, 1]], dtype=np.int32),
        np.zeros(1, dtype=np.int32),
        np.arange(LENGTH - wanted, LENGTH, dtype=np.int32),
        out,
        hidden,
        peaks,
    )
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", ["plain", "many_logits", "soft_caps", "narrow"])
@pytest.mark.parametrize("wanted", [1, LENGTH])
def test_a_peak_is_the_largest_of_32_logits(spec: str, isa: str, wanted: int) -> None:
    tiny = Tiny(SPECS[spec], "int8" if spec in ("plain", "many_logits") else "f32", 32, isa=isa, threads=2)
    peaks = np.full((wanted, -(-tiny.spec.vocab_size // 32)), np.nan, dtype=np.float32)
    logits = step(tiny, peaks=peaks, wanted=wanted)
    assert same_bits(logits, step(tiny, peaks=None, wanted=wanted))
    assert np.array_equal(peaks, peaks_of(logits))


def test_peaks_of_another_shape_or_of_hidden_states_are_refused() -> None:
    tiny = Tiny(SPECS["plain"])
    blocks = -(-tiny.spec.vocab_size // 32)
    for wrong in (
        np.zeros((LENGTH, blocks + 1), dtype=np.float32),
        np.zeros((LENGTH - 1, blocks), dtype=np.float32),
        np.zeros((LENGTH, blocks), dtype=np.float64),
    ):
        with pytest.raises(ValueError, match="peaks"):
            step(tiny, peaks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="peaks"):
        step(tiny, peaks=np.zeros((LENGTH, blocks), dtype=np.float32), hidden=True)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_is_spoiled_anywhere_has_no_choice_with_its_peaks_or_without(isa: str) -> None:
    vocab = 1003
    sampler = _core.Sampler(vocab, _core.Pool(1), isa)
    for place in (0, 31, 32, 500, 991, 1002):
        for bad in (np.nan, np.inf):
            logits = np.random.default_rng(1).normal(size=(1, vocab)).astype(np.float32)
            logits[0, place] = bad
            tokens = np.zeros(1, dtype=np.int32)
            arguments: list[Any] = [
                np.array([[0, 1, 0, 1, 0, 0]], dtype=np.float32),
                np.array([[0, -1]], dtype=np.int32),
                np.zeros((1, 2), dtype=np.uint64),
                *(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(2, dtype=np.int32)),
                *(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(2, dtype=np.int32)),
                np.zeros((0, 32), dtype=np.uint32),
                np.array([-1], dtype=np.int32),
                tokens,
                np.zeros(1, dtype=np.float32),
                np.zeros((1, 0), dtype=np.int32),
                np.zeros((1, 0), dtype=np.float32),
            ]
            sampler.choose(logits, *arguments)
            assert tokens[0] == -1
