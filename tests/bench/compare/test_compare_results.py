"""Comparisons: true differences are found with their size, chance is called no difference, unlike runs are named."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
from rich.console import Console

from headrace.bench.compare.bootstrap import (
    SLICES,
    cut_into_slices,
    group_draws,
    interval,
    percentile_draws,
    pick_rounds,
    rate_draws,
)
from headrace.bench.compare.compare_results import Comparison, compare, show
from headrace.bench.compare.comparison import Ratio
from headrace.bench.results.benchmark_result import BenchmarkResult
from headrace.errors import RequestError
from tests.support.benchmark_results import measured, swept


def ratios(found: Comparison, load: str = "") -> dict[str, Ratio]:
    return {ratio.figure: ratio for group in found.groups if group.name == load for ratio in group.ratios}


def test_a_result_is_no_different_from_itself() -> None:
    result = measured(objectives={"ttft": 300.0})
    found = compare(result, result, seed=1)
    assert found.warnings == []
    assert {ratio.verdict for ratio in ratios(found).values()} <= {"no difference", "too few"}
    assert all(ratio.ratio == 1.0 for ratio in ratios(found).values())
    assert {"ttft p50", "itl p99", "tpot mean", "e2el p95", "output tokens/s", "requests/s", "goodput/s"} <= set(
        ratios(found)
    )


def test_a_server_half_as_fast_again_is_found_with_the_size_of_the_difference() -> None:
    found = ratios(compare(measured(seed=1, requests=400), measured(seed=2, requests=400, slower=1.5), seed=3))
    for name in ("ttft p50", "ttft mean", "itl p50", "itl mean", "tpot p50", "e2el p90"):
        ratio = found[name]
        assert ratio.verdict == "worse"
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.low < 1.5 < ratio.high
        assert ratio.high / ratio.low < 1.5
    for name in ("output tokens/s", "requests/s"):
        ratio = found[name]
        assert ratio.verdict == "worse"
        assert ratio.ratio == pytest.approx(1 / 1.5, rel=0.05)
    assert {ratio.verdict for ratio in ratios(compare(measured(slower=1.5), measured(), seed=3)).values()} == {
        "better",
        "too few",
    }


def test_two_runs_of_the_same_server_seldom_seem_to_differ() -> None:
    apart = 0
    told = 0
    for seed in range(16):
        a, b = measured(seed=2 * seed + 100, requests=100), measured(seed=2 * seed + 101, requests=100)
        found = ratios(compare(a, b, seed=seed, resamples=400))
        for name in ("ttft p50", "ttft mean", "itl p50", "tpot p90", "output tokens/s"):
            told += 1
            apart += found[name].verdict != "no difference"
    assert apart / told < 0.12


def test_the_same_seed_says_the_same_and_another_nearly_so() -> None:
    a, b = measured(seed=1), measured(seed=2, slower=1.1)
    first, again, other = (compare(a, b, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    left, right = ratios(first)["ttft p50"], ratios(other)["ttft p50"]
    assert left.ratio == right.ratio
    assert left.low == pytest.approx(right.low, rel=0.05)


def test_a_margin_makes_small_differences_none() -> None:
    a, b = measured(seed=1, requests=1200), measured(seed=1, requests=1200, slower=1.04)
    assert ratios(compare(a, b))["itl p50"].verdict == "worse"
    assert ratios(compare(a, b, margin=0.05))["itl p50"].verdict == "no difference"
    assert ratios(compare(b, a, margin=0.05))["itl p50"].verdict == "no difference"


def test_few_values_are_called_too_few() -> None:
    found = ratios(compare(measured(requests=30), measured(seed=1, requests=30, slower=2.0)))
    assert found["ttft p50"].verdict == "worse"
    assert found["ttft p99"].verdict == "too few"
    assert found["ttft p99"].ratio is not None  # it is shown all the same
    few = ratios(compare(measured(requests=6), measured(requests=6, slower=3.0)))
    assert {ratio.verdict for ratio in few.values()} == {"too few"}


def test_interleaved_rounds_take_out_what_slowed_both_down() -> None:
    drifts = (1.0, 3.0, 1.4, 2.2, 1.0)
    left = [measured(seed=10 + place, drift=drift) for place, drift in enumerate(drifts)]
    right = [measured(seed=10 + place, slower=1.2, drift=drift) for place, drift in enumerate(drifts)]
    paired = compare(left, right, seed=1)
    alone = compare(left, right, seed=1, paired=False)
    assert paired.paired
    assert not alone.paired
    for name in ("ttft p50", "itl p50", "output tokens/s"):
        sure, unsure = ratios(paired)[name], ratios(alone)[name]
        assert sure.verdict == "worse"
        assert unsure.verdict == "no difference"
        assert sure.ratio == pytest.approx(1.2 if sure.unit == "ms" else 1 / 1.2, rel=0.05)
        assert ratios(paired)[name].a == pytest.approx(np.median([_figure(result, name) for result in left]))


def _figure(result: BenchmarkResult, name: str) -> float:
    total = result.figures
    spread = {"ttft p50": total.ttft, "itl p50": total.itl}.get(name)
    return total.output_throughput if spread is None else spread.p50


def test_sides_may_have_different_numbers_of_rounds() -> None:
    found = compare([measured(seed=1), measured(seed=2)], measured(seed=3))
    assert (found.rounds_a, found.rounds_b, found.paired) == (2, 1, False)
    with pytest.raises(RequestError, match="as many"):
        compare([measured(seed=1), measured(seed=2)], measured(seed=3), paired=True)


def test_sweeps_are_compared_load_by_load_as_far_as_both_went() -> None:
    found = compare(swept(), swept(seed=9, slower=2.0, rates=(1.0, 2.0, 4.0)), seed=1)
    assert [group.name for group in found.groups] == ["1 requests/s", "2 requests/s", "4 requests/s"]
    assert (found.knees_a, found.knees_b) == (["4 requests/s"], ["2 requests/s"])
    assert ratios(found, "2 requests/s")["ttft p50"].ratio == pytest.approx(2.0, rel=0.2)


def test_what_makes_runs_unlike_is_named() -> None:
    a = measured(seed=1)
    b = measured(
        seed=2, tokens=32, failing=0.2, model="other", workload="chat", warnings=["a lag of 90 ms"], load="open"
    )
    said = "\n".join(compare(a, b).warnings)
    for part in (
        "workload",
        "model",
        "kind of load",
        "seeds",
        "output tokens per request differ",
        "B failed",
        "a lag of 90 ms",
    ):
        assert part in said
    mixed = compare([a, measured(seed=1, model="other")], [a, a]).warnings
    assert any("model" in warning for warning in mixed)


def test_no_goodput_at_all_has_no_ratio() -> None:
    a = measured(objectives={"ttft": 0.001})
    found = compare(a, measured(seed=1, objectives={"ttft": 1000.0}))
    ratio = ratios(found)["goodput/s"]
    assert (ratio.a, ratio.ratio, ratio.low, ratio.high, ratio.verdict) == (0.0, None, None, None, "unknown")
    assert b"NaN" not in msgspec.json.encode(found)
    other = ratios(compare(measured(objectives={"ttft": 1000.0}), a))["goodput/s"]
    assert (other.ratio, other.verdict) == (0.0, "worse")


def test_runs_without_reasoning_have_no_figures_of_it() -> None:
    assert not any(name.startswith("ttfo") for name in ratios(compare(measured(), measured(seed=1))))


def test_results_without_rows_are_refused() -> None:
    with pytest.raises(RequestError, match="no rows"):
        compare(measured(), msgspec.structs.replace(measured(), rows=[]))


@pytest.mark.parametrize("wrong", [{"resamples": 10}, {"confidence": 1.0}, {"confidence": 0.1}, {"margin": -0.1}])
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        compare(measured(), measured(), **wrong)  # pyright: ignore[reportArgumentType]


def test_runs_in_which_everything_failed_can_be_compared() -> None:
    found = compare(measured(failing=1.0), measured(seed=1))
    assert found.groups[0].failed_a == 120
    assert ratios(found)["requests/s"].verdict == "unknown"
    assert "ttft p50" not in ratios(found)


def test_the_table_shows_ratio_interval_and_verdict_and_no_markup_of_a_server() -> None:
    a, b = measured(seed=1), measured(seed=2, slower=1.5, label="[red]theirs[/red]\x1b[2J")
    out = io.StringIO()
    show(Console(file=out, width=140, highlight=False), compare(a, b))
    text = out.getvalue()
    assert "[red]theirs[/red]" in text
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.strip().startswith("TTFT p50"))
    assert "worse" in row
    assert " to " in row
    assert "Between two equal servers" in text


def test_json_has_everything() -> None:
    found = compare(measured(seed=1), measured(seed=2))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


# The resampling


def test_percentiles_are_drawn_as_if_values_had_been() -> None:
    rng = np.random.default_rng(1)
    values = np.exp(rng.standard_normal(150))
    picks = pick_rounds(rng, 1, 20_000)
    for share in (0.5, 0.9, 0.99):
        quick = percentile_draws(rng, [values], picks, share)[:, 0]
        slow = np.percentile(rng.choice(values, (20_000, values.size)), 100 * share, axis=1)
        assert quick.mean() == pytest.approx(slow.mean(), rel=0.01)
        assert quick.std() == pytest.approx(slow.std(), rel=0.05)
        for value in np.percentile(slow, [5, 50, 95]):
            assert (quick <= value).mean() == pytest.approx((slow <= value).mean(), abs=0.02)


def test_one_value_is_always_drawn() -> None:
    rng = np.random.default_rng(1)
    drawn = percentile_draws(rng, [np.array([3.0])], pick_rounds(rng, 1, 100), 0.99)
    assert set(drawn.ravel()) == {3.0}


def test_means_of_many_requests_vary_as_they_should() -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal(20_000) + 5.0
    mean, _ = group_draws(rng, [values], [np.arange(values.size)], pick_rounds(rng, 1, 2000), ())
    assert mean.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert mean.std() == pytest.approx(values.std() / np.sqrt(values.size), rel=0.15)


def test_gaps_that_are_alike_within_a_request_make_less_sure() -> None:
    rng = np.random.default_rng(3)
    owner = np.repeat(np.arange(200), 50)
    alike = np.repeat(np.exp(0.5 * rng.standard_normal(200)), 50) * np.exp(0.05 * rng.standard_normal(owner.size))
    shuffled = rng.permutation(alike)
    picks = pick_rounds(rng, 1, 1000)
    widths: list[float] = []
    for values in (alike, shuffled):
        mean, (p50,) = group_draws(rng, [values], [owner], picks, (0.5,))
        low, high = interval(p50, 0.95)
        assert low < float(np.median(values)) < high
        widths.append(high - low)
        assert mean.mean() == pytest.approx(values.mean(), rel=0.01)
    assert widths[0] > 3.0 * widths[1]


def test_gaps_that_are_all_the_same_have_that_percentile() -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate((np.zeros(300), np.full(700, 20.0)))
    _, (p50, p90) = group_draws(rng, [values], [rng.permutation(1000) % 50], pick_rounds(rng, 1, 200), (0.5, 0.9))
    assert set(p50.ravel()) == {20.0}
    assert set(p90.ravel()) == {20.0}


def test_blocks_are_as_long_as_what_hangs_together() -> None:
    at = np.linspace(0.0, 100.0, 1001)
    short = cut_into_slices(0.0, 100.0, [(at, np.ones(at.size))], lasting=0.1, seconds=100.0)
    long = cut_into_slices(0.0, 100.0, [(at, np.ones(at.size))], lasting=10.0, seconds=100.0)
    longest = cut_into_slices(0.0, 100.0, [(at, np.ones(at.size))], lasting=500.0, seconds=100.0)
    assert short.block == 6
    assert long.block == SLICES // 10
    assert longest.blocks == 5
    assert long.counts.sum() == at.size


def test_rates_of_seconds_that_hang_together_are_less_sure() -> None:
    rng = np.random.default_rng(5)
    slices = np.arange(SLICES, dtype=np.float64) + 0.5
    waves = 10.0 + 5.0 * np.sign(np.sin(2 * np.pi * slices / 80.0))  # forty seconds fast, forty slow
    picks = pick_rounds(rng, 1, 2000)
    spreads: list[float] = []
    for lasting in (40.0, 1.0):
        round_ = cut_into_slices(0.0, float(SLICES), [(slices, waves)], lasting=lasting, seconds=float(SLICES))
        drawn = rate_draws(rng, [round_], picks)[:, 0, 0]
        assert drawn.mean() == pytest.approx(waves.mean(), rel=0.03)
        spreads.append(float(drawn.std()))
    assert spreads[0] > 1.3 * spreads[1]
