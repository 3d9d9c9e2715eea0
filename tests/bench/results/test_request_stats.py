"""Figures of timelines made by hand, whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.bench.results.benchmark_result import RequestRow
from headrace.bench.results.request_stats import (
    compute_stats,
    distribution,
    is_good,
    peak_output,
    peak_running,
    stats_by,
    stats_by_length,
)


def row(start: float = 0.0, **fields: Any) -> RequestRow:
    """Ten tokens in five chunks: the first after 0.2 s, the others 0.1 s apart; it ends at 0.65 s."""
    usual: dict[str, Any] = {
        "number": 0,
        "start": start,
        "ok": True,
        "status": 200,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "ttft": 0.2,
        "ttfo": 0.2,
        "e2el": 0.65,
        "gaps": [0.1, 0.1, 0.1, 0.1],
        "chunks": 5,
    }
    return RequestRow(**(usual | fields))


def failed(start: float = 0.0, error: str = "http 503") -> RequestRow:
    return RequestRow(number=1, start=start, error=error, status=503, e2el=0.01)


def test_tpot_is_the_time_after_the_first_token_by_the_tokens_after_it() -> None:
    assert row().tpot == pytest.approx(0.45 / 9)
    assert row(output_tokens=1).tpot is None
    assert row(ttft=None).tpot is None


def test_percentiles_are_numpys_linear_ones() -> None:
    values = [float(value) for value in np.random.default_rng(0).exponential(size=137)]
    found = distribution(values, scale=1e3)
    assert found is not None
    assert found.p95 == pytest.approx(1e3 * np.percentile(values, 95, method="linear"))
    assert (found.count, found.least, found.most) == (137, 1e3 * min(values), 1e3 * max(values))
    assert found.mean == pytest.approx(1e3 * np.mean(values))
    small = distribution([1.0, 2.0, 3.0, 4.0])
    assert small is not None
    assert (small.p50, small.p90) == (2.5, pytest.approx(3.7))
    assert distribution([]) is None


def test_throughput_is_of_the_time_from_the_first_start_to_the_last_end() -> None:
    found = compute_stats("all", [row(1.0), row(2.0), row(2.35)], {})
    assert found.seconds == pytest.approx(2.0)
    assert found.request_throughput == pytest.approx(1.5)
    assert found.output_throughput == pytest.approx(15.0)
    assert found.total_throughput == pytest.approx(165.0)
    assert (found.requests, found.completed, found.failed, found.good, found.goodput) == (3, 3, 0, None, None)


def test_gaps_are_pooled_and_chunks_have_tokens() -> None:
    found = compute_stats("all", [row(), row(gaps=[0.4], chunks=2)], {})
    assert found.itl is not None
    assert found.chunk_tokens is not None
    assert (found.itl.count, found.itl.most) == (5, 400.0)
    assert (found.chunk_tokens.least, found.chunk_tokens.most) == (2.0, 5.0)
    assert compute_stats("all", [row(together=2)], {}).together == 0.4


def test_failed_requests_are_in_no_time_but_in_the_counts() -> None:
    found = compute_stats("all", [row(), failed(), failed(error="reset"), failed()], {"ttft": 300.0})
    assert (found.completed, found.failed, found.errors) == (1, 3, {"http 503": 2, "reset": 1})
    assert found.e2el is not None
    assert found.e2el.count == 1
    assert found.good == 1


def test_a_good_request_meets_every_objective() -> None:
    assert is_good(row(), {"ttft": 200.0, "tpot": 50.0, "e2el": 650.0})
    assert not is_good(row(), {"ttft": 199.0})
    assert not is_good(row(), {"tpot": 49.0})
    assert not is_good(row(), {"e2el": 649.0})
    assert not is_good(row(ttfo=None), {"ttfo": 1e9})
    assert is_good(row(output_tokens=1, chunks=1, gaps=[]), {"tpot": 1e-3})
    assert not is_good(failed(), {"ttft": 1e9})


def test_goodput_is_a_rate_of_good_requests() -> None:
    found = compute_stats("all", [row(0.0), row(1.35), row(0.5, ttft=0.5)], {"ttft": 300.0})
    assert (found.good, found.goodput) == (2, pytest.approx(1.0))


def test_the_peak_is_of_requests_that_overlap() -> None:
    assert peak_running([row(0.0), row(0.3), row(0.6), row(0.65)]) == 3
    assert peak_running([row(0.0), row(0.65)]) == 1
    assert peak_running([RequestRow(number=0, error="not sent")]) == 0


def test_the_best_second_counts_tokens_when_they_came() -> None:
    # Chunks of two tokens at 0.2, 0.3, 0.4, 0.5 and 0.6 s, and again 0.8 s later: 1.0 to 1.4.
    assert peak_output([row(0.0), row(0.8)]) == pytest.approx(10.0)
    assert peak_output([row(0.0), row(0.1)]) == pytest.approx(20.0)
    whole = row(ttft=None, ttfo=None, gaps=[], chunks=0)
    assert peak_output([whole]) == 10.0
    assert peak_output([]) == 0.0


def test_what_the_server_tells_and_the_lag_have_figures() -> None:
    found = compute_stats("all", [row(queue_ms=1.0, prefill_ms=2.0, lag=0.003), row(queue_ms=3.0, lag=0.001)], {})
    assert found.queue is not None
    assert found.prefill is not None
    assert found.lag is not None
    assert (found.queue.mean, found.prefill.count, found.decode) == (2.0, 1, None)
    assert found.lag.most == pytest.approx(3.0)
    assert compute_stats("all", [row()], {}).lag is None


def test_groups_are_told_apart_where_there_is_more_than_one() -> None:
    rows = [row(tenant="a"), row(tenant="b"), row(tenant="b", ttft=0.4)]
    found = stats_by(rows, lambda each: each.tenant, {}, seconds=2.0)
    assert [(group.name, group.requests, group.request_throughput) for group in found] == [("a", 1, 0.5), ("b", 2, 1.0)]
    assert stats_by(rows, lambda each: each.surface, {}, seconds=2.0) == []


def test_buckets_are_of_prompt_tokens() -> None:
    rows = [row(prompt_tokens=tokens) for tokens in (1, 128, 129, 5000)]
    found = stats_by_length(rows, (128, 512, 2048), {}, seconds=1.0)
    assert [(group.name, group.requests) for group in found] == [
        ("to 128 tokens", 2),
        ("to 512 tokens", 1),
        ("over 2,048 tokens", 1),
    ]


def test_nothing_has_no_figures() -> None:
    found = compute_stats("all", [], {"ttft": 1.0})
    assert (found.requests, found.seconds, found.ttft, found.goodput) == (0, 0.0, None, 0.0)
