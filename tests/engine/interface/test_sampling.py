"""The choice of tokens: each wish against plain numpy, frequencies of draws, and bounds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.sampler import Sampler
from headrace.engine.interface.sampling import NoTokenError, SampleRow, SamplingParams
from headrace.errors import RequestError

VOCAB = 1003  # not a multiple of any vector
DRAWS = 3000

Floats = NDArray[np.float32]


@pytest.fixture(scope="module", params=_core.isa_available())
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(VOCAB, _core.Pool(2), request.param)


def logits_of(seed: int = 0, spread: float = 2.0) -> Floats:
    return np.random.default_rng(seed).normal(0.0, spread, VOCAB).astype(np.float32)


def choose(sampler: Sampler, row: Floats, sampling: SamplingParams, position: int = 0, **wishes: object) -> int:
    return sampler.choose(row[None].copy(), [SampleRow(sampling, position, **wishes)])[0].token  # type: ignore[arg-type]


def draws(sampler: Sampler, row: Floats, sampling: SamplingParams, count: int = DRAWS) -> NDArray[np.int64]:
    rows = [SampleRow(sampling, position) for position in range(count)]
    tokens = [chosen.token for chosen in sampler.choose(np.tile(row, (count, 1)), rows)]
    return np.bincount(tokens, minlength=VOCAB)


def softmax(row: Floats, temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    return weights / weights.sum()


def assert_frequencies(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> None:
    # Within five standard deviations for every token; a token of no probability is never drawn.
    total = counts.sum()
    slack = 5 * np.sqrt(total * probabilities * (1 - probabilities)) + 1
    assert (np.abs(counts - total * probabilities) <= slack).all()
    assert counts[probabilities == 0].sum() == 0


def test_without_temperature_the_likeliest_token_is_taken(sampler: Sampler) -> None:
    row = logits_of()
    assert choose(sampler, row, SamplingParams()) == row.argmax()


def test_of_equal_tokens_the_lowest_is_taken(sampler: Sampler) -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    row[[700, 17, 1002]] = 4.0
    assert choose(sampler, row, SamplingParams()) == 17


def test_draws_have_the_frequencies_of_the_softmax(sampler: Sampler) -> None:
    row = logits_of()
    assert_frequencies(draws(sampler, row, SamplingParams(temperature=0.7, seed=1)), softmax(row, 0.7))


def test_top_k_draws_among_the_likeliest(sampler: Sampler) -> None:
    row = logits_of()
    kept = np.argsort(-row, kind="stable")[:5]
    expected = np.zeros(VOCAB)
    expected[kept] = softmax(row)[kept] / softmax(row)[kept].sum()
    assert_frequencies(draws(sampler, row, SamplingParams(temperature=1.0, top_k=5, seed=2)), expected)


@pytest.mark.parametrize("spread", [0.01, 2.0, 30.0])
@pytest.mark.parametrize("top_p", [0.0001, 0.3, 0.9, 0.9999])
def test_top_p_draws_among_the_nucleus(sampler: Sampler, top_p: float, spread: float) -> None:
    row = logits_of(3, spread)
    probabilities = softmax(row)
    order = np.argsort(-row, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    drawn = draws(sampler, row, SamplingParams(temperature=1.0, top_p=top_p, seed=3), 500)
    assert drawn[order[count + 1 :]].sum() == 0  # one token of slack for the rounding of the sum
    assert drawn[order[0]] > 0 or count > 20


def test_min_p_draws_among_tokens_near_the_likeliest(sampler: Sampler) -> None:
    row = logits_of()
    probabilities = softmax(row)
    kept = np.where(probabilities >= 0.2 * probabilities.max(), probabilities, 0)
    assert_frequencies(draws(sampler, row, SamplingParams(temperature=1.0, min_p=0.2, seed=4)), kept / kept.sum())


def test_cuts_apply_together(sampler: Sampler) -> None:
    row = logits_of()
    drawn = draws(sampler, row, SamplingParams(temperature=2.0, top_k=10, top_p=0.5, min_p=0.05, seed=5), 500)
    assert 1 <= (drawn > 0).sum() <= 10
    assert drawn[np.argsort(-row)[10:]].sum() == 0


def test_penalties_change_the_choice_as_their_formulas_say(sampler: Sampler) -> None:
    row = np.full(VOCAB, -5.0, dtype=np.float32)
    row[[10, 20, 30]] = [4.0, 3.0, 2.5]
    seen = {10: 2, 20: 0, 500: 1}
    assert choose(sampler, row, SamplingParams(repetition_penalty=2.0), seen=seen) == 30  # 4 / 2, 3 / 2
    assert (
        choose(sampler, row, SamplingParams(frequency_penalty=0.6), seen=seen) == 20
    )  # 4 - 2 * 0.6; the prompt's is kept
    assert choose(sampler, row, SamplingParams(presence_penalty=0.9), seen=seen) == 10  # 4 - 0.9
    assert choose(sampler, row, SamplingParams(presence_penalty=1.1), seen=seen) == 20
    assert choose(sampler, row, SamplingParams(frequency_penalty=-1.0), seen={30: 3}) == 30


def test_a_penalty_pushes_negative_logits_down(sampler: Sampler) -> None:
    row = np.full(VOCAB, -50.0, dtype=np.float32)
    row[[1, 2]] = [-1.0, -1.5]
    assert choose(sampler, row, SamplingParams(repetition_penalty=2.0), seen={1: 1}) == 2


def test_a_bias_lifts_or_bans_a_token(sampler: Sampler) -> None:
    row = logits_of()
    best = int(row.argmax())
    assert choose(sampler, row, SamplingParams(logit_bias={123: 100.0})) == 123
    assert choose(sampler, row, SamplingParams(logit_bias={best: -100.0})) == np.argsort(-row)[1]


def test_a_mask_leaves_only_what_it_allows(sampler: Sampler) -> None:
    row = logits_of()
    allowed = [5, 64, 999]
    mask = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    expected = allowed[int(np.argmax(row[allowed]))]
    assert choose(sampler, row, SamplingParams(), mask=mask) == expected
    assert {choose(sampler, row, SamplingParams(temperature=9.0), p, mask=mask) for p in range(99)} == set(allowed)


@pytest.mark.parametrize("bad", ["mask", "nan", "infinity"])
def test_a_row_without_a_choice_is_an_error(sampler: Sampler, bad: str) -> None:
    row = logits_of()
    mask = None
    if bad == "mask":
        mask = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    else:
        row[77] = np.nan if bad == "nan" else np.inf
    for temperature in (0.0, 1.0):
        with pytest.raises(NoTokenError):
            choose(sampler, row, SamplingParams(temperature=temperature), mask=mask)


def test_log_probabilities_are_the_models_and_not_the_wishes(sampler: Sampler) -> None:
    row = logits_of()
    expected = np.log(softmax(row))
    order = np.argsort(-row, kind="stable")
    sampling = SamplingParams(temperature=0.5, logit_bias={9: 50.0}, logprobs=4)
    (chosen,) = sampler.choose(row[None].copy(), [SampleRow(sampling, 0)])
    assert chosen.token == 9
    assert chosen.logprob == pytest.approx(expected[9], abs=1e-4)
    assert [token for token, _ in chosen.top] == order[:4].tolist()
    assert [value for _, value in chosen.top] == pytest.approx(expected[order[:4]].tolist(), abs=1e-4)


def test_top_log_probabilities_of_equal_tokens_come_in_token_order(sampler: Sampler) -> None:
    row = np.zeros((1, VOCAB), dtype=np.float32)
    (chosen,) = sampler.choose(row, [SampleRow(SamplingParams(logprobs=200), 0)])
    assert [token for token, _ in chosen.top] == list(range(200))


def test_a_draw_follows_from_seed_and_position_and_not_from_company(sampler: Sampler) -> None:
    table = np.stack([logits_of(seed) for seed in range(6)])
    wishes = [
        SamplingParams(temperature=1.5, seed=8),
        SamplingParams(temperature=1.5, top_p=0.8, seed=8),
        SamplingParams(temperature=0.9, top_k=40, seed=2**63 + 5),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=3.0, min_p=0.01, frequency_penalty=0.5),
        SamplingParams(temperature=1.0),
    ]
    rows = [SampleRow(wish, 40 + i, {i: 1, 500: 2}) for i, wish in enumerate(wishes)]
    together = [chosen.token for chosen in sampler.choose(table.copy(), rows)]
    alone = [sampler.choose(table[i : i + 1].copy(), [rows[i]])[0].token for i in range(6)]
    assert together == alone
    assert len({choose(sampler, table[0], wishes[0], position) for position in range(20)}) > 5


def test_peaks_that_come_with_the_logits_change_nothing(sampler: Sampler) -> None:
    table = np.stack([logits_of(seed) for seed in range(8)])
    allowed = np.random.default_rng(5).integers(0, 2**32, -(-VOCAB // 32), dtype=np.uint32)
    rows = [
        SampleRow(SamplingParams(), 0),
        SampleRow(SamplingParams(temperature=1.0, seed=1), 1),
        SampleRow(SamplingParams(temperature=1.0, top_p=0.7, seed=1, logprobs=3), 2),
        SampleRow(SamplingParams(top_k=7, temperature=2.0, logit_bias={5: 9.0, 900: 30.0}, logprobs=0), 3),
        SampleRow(SamplingParams(repetition_penalty=3.0, temperature=1.0), 4, seen={n: 1 for n in range(0, 1000, 3)}),
        SampleRow(SamplingParams(presence_penalty=2.0), 5, seen={int(table[5].argmax()): 2}),
        SampleRow(SamplingParams(temperature=1.0, min_p=0.1), 6, mask=allowed),
        SampleRow(SamplingParams(logprobs=2), 7, forbidden=[int(table[7].argmax())]),
    ]
    padded = np.full((8, -(-VOCAB // 32) * 32), -np.inf, dtype=np.float32)
    padded[:, :VOCAB] = table
    peaks = padded.reshape(8, -1, 32).max(axis=2)
    laid_out = sampler.lay_out(rows)
    tokens = sampler.choose_laid_out(table.copy(), laid_out, peaks)
    with_peaks = [laid_out.chosen(row) for row in range(8)]
    assert with_peaks == sampler.choose(table.copy(), rows)
    assert tokens == [chosen.token for chosen in with_peaks]
    assert tokens[3] == 900
    assert (peaks == padded.reshape(8, -1, 32).max(axis=2)).all()


@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.97])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_a_nucleus_of_thousands_is_that_of_the_sorted_tokens(spread: float, top_p: float) -> None:
    vocab = 20_011
    large = Sampler(vocab, _core.Pool(2), _core.isa_default())
    row = np.random.default_rng(4).normal(0.0, spread, vocab).astype(np.float32) if spread else np.zeros(vocab, "f4")
    probabilities = softmax(row)
    order = np.argsort(-row, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    rows = [SampleRow(SamplingParams(temperature=1.0, top_p=top_p, seed=6), position) for position in range(400)]
    drawn = np.array([chosen.token for chosen in large.choose(np.tile(row, (400, 1)), rows)])
    ranks = np.empty(vocab, dtype=np.int64)
    ranks[order] = np.arange(vocab)
    assert ranks[drawn].max() <= count + 1  # a token of slack for the rounding of the sum
    # Of 400 draws, the share beyond any rank is that of the nucleus beyond it, within five deviations.
    inside = np.cumsum(probabilities[order])[:count]
    for rank in (count // 4, count // 2, 3 * count // 4):
        expected = inside[rank] / inside[-1]
        deviation = np.sqrt(expected * (1 - expected) / 400)
        assert abs((ranks[drawn] <= rank).mean() - expected) <= 5 * deviation + 1e-9


def test_a_draw_from_all_tokens_reaches_the_last_one() -> None:
    vocab = 5003
    large = Sampler(vocab, _core.Pool(1), _core.isa_default())
    row = np.full(vocab, -200.0, dtype=np.float32)
    row[[0, vocab - 1]] = 0.0
    rows = [SampleRow(SamplingParams(temperature=1.0, seed=2), position) for position in range(200)]
    drawn = [chosen.token for chosen in large.choose(np.tile(row, (200, 1)), rows)]
    assert set(drawn) == {0, vocab - 1}
    assert 60 <= drawn.count(0) <= 140


def test_all_instruction_sets_draw_the_same() -> None:
    table = np.stack([logits_of(seed) for seed in range(50)])
    wishes = [{"top_p": 0.95}, {}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.9, "logprobs": 4}]
    rows = [SampleRow(SamplingParams(temperature=1.2, seed=3, **wishes[i % 5]), i) for i in range(50)]  # type: ignore[arg-type]
    drawn = [
        [chosen.token for chosen in Sampler(VOCAB, _core.Pool(1), isa).choose(table.copy(), rows)]
        for isa in _core.isa_available()
    ]
    assert all(tokens == drawn[0] for tokens in drawn)


@pytest.mark.parametrize(
    ("wish", "parameter"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"presence_penalty": 1e9}, "presence_penalty"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 5000}, "logprobs"),
    ],
)
def test_a_wish_out_of_bounds_is_refused_by_name(wish: dict[str, object], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wish).check(VOCAB)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


def test_the_core_refuses_arrays_that_do_not_agree() -> None:
    core = _core.Sampler(VOCAB, _core.Pool(1), _core.isa_default())

    def call(**changes: object) -> None:
        arrays: dict[str, object] = {
            "logits": np.zeros((1, VOCAB), dtype=np.float32),
            "numbers": np.array([[1, 1, 0, 1, 0, 0]], dtype=np.float32),
            "counts": np.array([[0, -1]], dtype=np.int32),
            "keys": np.zeros((1, 2), dtype=np.uint64),
            "seen": np.zeros(0, dtype=np.int32),
            "seen_counts": np.zeros(0, dtype=np.int32),
            "seen_offsets": np.zeros(2, dtype=np.int32),
            "bias_tokens": np.zeros(0, dtype=np.int32),
            "biases": np.zeros(0, dtype=np.float32),
            "bias_offsets": np.zeros(2, dtype=np.int32),
            "masks": np.zeros((0, 32), dtype=np.uint32),
            "mask_rows": np.array([-1], dtype=np.int32),
            "tokens": np.zeros(1, dtype=np.int32),
            "logprobs": np.zeros(1, dtype=np.float32),
            "top": np.zeros((1, 0), dtype=np.int32),
            "top_logprobs": np.zeros((1, 0), dtype=np.float32),
        }
        core.choose(**(arrays | changes))  # type: ignore[arg-type]

    call()
    for changes in (
        {"logits": np.zeros((1, VOCAB + 1), dtype=np.float32)},
        {"seen_offsets": np.array([0, 1], dtype=np.int32)},
        {"seen_offsets": np.array([0, -1], dtype=np.int32)},
        {
            "bias_tokens": np.array([VOCAB], dtype=np.int32),
            "biases": np.ones(1, dtype=np.float32),
            "bias_offsets": np.array([0, 1], dtype=np.int32),
        },
        {"mask_rows": np.array([0], dtype=np.int32)},
        {"counts": np.array([[0, 3]], dtype=np.int32)},
        {"numbers": np.array([[1, 0, 0, 1, 0, 0]], dtype=np.float32)},
        {"tokens": np.zeros(2, dtype=np.int32)},
    ):
        with pytest.raises(ValueError, match=r"shape|offsets|vocabulary|mask|logprobs|top_p"):
            call(**changes)
