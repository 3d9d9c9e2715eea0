"""Latencies of any slice, over any time, with a bounded number of slices."""

from __future__ import annotations

import random

import pytest

from headrace.observe.latency.latency_book import (
    LatencyBook,
    RequestSample,
    Row,
    Slice,
    group,
    length_bucket,
)
from headrace.observe.latency.sketch import ERROR
from tests.support.clock import Clock


def sample(model: str = "mini", tenant: str = "red", ttft: float = 0.1, **fields: object) -> RequestSample:
    made = RequestSample(Slice(model, "chat", tenant, "/v1/x", "<=128", "direct"), {"ttft": ttft, "e2e": 2 * ttft})
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def ttft_of(row: Row) -> dict[str, float]:
    return row.percentiles()["ttft"]


def test_any_slice_is_as_right_as_its_parts() -> None:
    clock = Clock()
    book = LatencyBook(clock)
    chance = random.Random(3)
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(5000):
        model, tenant = chance.choice(["mini", "draft"]), chance.choice(["red", "blue", "-"])
        ttft = chance.lognormvariate(-3.0, 1.0) * (2.0 if model == "mini" else 1.0)
        values.setdefault((model, tenant), []).append(ttft)
        book.record(sample(model, tenant, ttft))
        clock.now += 0.01
    rows = list(book.total())
    for key, row in group(rows, ("model", "tenant")).items():
        assert row.requests == len(values[key[0], key[1]])
    for name in ("mini", "draft"):
        every = sorted(value for (model, _), some in values.items() if model == name for value in some)
        found = ttft_of(group(rows, ("model",))[name,])
        for share, at in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99)):
            exact = every[int(at * (len(every) - 1))]
            assert found[share] / 1e3 == pytest.approx(exact, rel=ERROR + 1e-4)


def test_the_window_forgets_and_the_total_does_not() -> None:
    clock = Clock()
    book = LatencyBook(clock)
    book.record(sample(ttft=5.0))
    clock.now += 3600.0
    book.record(sample(ttft=0.1))
    (recent,) = group(book.window(300.0), ()).values()
    (total,) = group(book.total(), ()).values()
    assert (recent.requests, total.requests) == (1, 2)
    assert ttft_of(recent)["p99_ms"] < 110.0
    assert ttft_of(total)["p99_ms"] < 110.0 or total.sketches["ttft"].count == 2


def test_an_hour_is_taken_once() -> None:
    clock = Clock()
    book = LatencyBook(clock)
    for number in range(10):
        book.record(sample())
        clock.now += 45.0
        if number == 4:
            assert sum(row.requests for row in book.take().values()) == 5
    assert sum(row.requests for row in book.take().values()) == 5
    assert book.take() == {}
    assert sum(row.requests for _, row in book.total()) == 10


def test_the_number_of_slices_is_bounded_under_a_hostile_client() -> None:
    clock = Clock()
    book = LatencyBook(clock, most_slices=20)
    for number in range(5000):
        book.record(sample(f"model{number % 70}", f"tenant{number}"))
    assert len({slice for slice, _ in book.total()}) <= 41
    assert sum(row.requests for _, row in book.total()) == 5000
    assert len(book._known) <= 41  # pyright: ignore[reportPrivateUsage]


def test_the_past_of_a_tenant_without_a_label_counts_as_former() -> None:
    clock = Clock()
    book = LatencyBook(clock)
    for tenant in ("acme", "zeta", "acme"):
        book.record(sample(tenant=tenant))
        clock.now += 61.0
    book.forget_tenant("acme")
    counted = {tenant: row.requests for (tenant,), row in group(book.total(), ("tenant",)).items()}
    assert counted == {"former": 2, "zeta": 1}
    book.forget_tenant("zeta")
    book.record(sample(tenant="acme"))
    counted = {tenant: row.requests for (tenant,), row in group(book.total(), ("tenant",)).items()}
    assert counted == {"former": 3, "acme": 1}


def test_savings_and_stages_add_up() -> None:
    clock = Clock()
    book = LatencyBook(clock)
    for _ in range(2):
        book.record(sample(cache="exact", saved_s=1.5, saved_micros=20, stages={"shape": 0.25, "replay": 0.5}))
        clock.now += 61.0
    (row,) = group(book.total(), ()).values()
    assert row.saved == {"exact": [2, 3.0, 40]}
    assert row.stages == {"shape": 0.5, "replay": 1.0}
    again = Row.unpack(row.pack())
    assert again.percentiles() == row.percentiles()
    assert (again.saved, again.stages, again.requests) == (row.saved, row.stages, 2)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, "<=0"), (1, "<=128"), (128, "<=128"), (129, "<=512"), (10**6, ">32768")]
)
def test_prompts_fall_into_buckets(tokens: int, bucket: str) -> None:
    assert length_bucket(tokens) == bucket
