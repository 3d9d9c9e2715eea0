"""Advice from a server's figures: each finding has its figures, a gain and a command; quiet servers get none."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.bench.advice import Observed, advise


def row(requests: int = 1000, **fields: Any) -> dict[str, Any]:
    return {"requests": requests, "good": requests, "prompt_tokens": 100 * requests, "draft_acceptance": None, **fields}


def percentiles(**milliseconds: float) -> dict[str, Any]:
    return {name: {"count": 1000, "p95_ms": value} for name, value in milliseconds.items()}


CALM = Observed(
    live={
        "engines": [
            {
                "model": "mini",
                "answers": True,
                "admitted": 1000,
                "preempted": 0,
                "steps": 5000,
                "rows": 40_000,
                "device_seconds": 100.0,
                "between_seconds": 5.0,
            }
        ],
        "caches": [{"cache": "prefix", "prompt_tokens": 100_000, "cached_tokens": 60_000, "hit_ratio": 0.6}],
    },
    by_model=[row(model="mini", draft_acceptance=0.6, percentiles=percentiles(queue=20.0, ttft=200.0))],
    by_surface=[row(surface="chat", percentiles=percentiles(queue=20.0))],
    by_tenant=[
        row(500, tenant="a", machine_s_per_1000_requests=10.0),
        row(500, tenant="b", machine_s_per_1000_requests=10.0),
    ],
    by_length=[row(900, length="<=128"), row(100, length=">8192")],
)


def engine(**changes: Any) -> dict[str, Any]:
    return {**CALM.live, "engines": [{**CALM.live["engines"][0], **changes}]}


def cache(**fields: Any) -> dict[str, Any]:
    return {**CALM.live, "caches": [{"hits": 10, "saved_s": 5.0, "entries": 500, "bytes": 2_000_000, **fields}]}


def test_a_server_without_trouble_or_traffic_gets_no_advice() -> None:
    assert advise(CALM) == []
    few = replace(CALM, by_model=[row(10, model="mini", draft_acceptance=0.01)])
    assert advise(few) == []


@pytest.mark.parametrize(
    ("seen", "subject", "texts"),
    [
        (
            replace(CALM, by_model=[row(model="mini", percentiles=percentiles(queue=900.0, ttft=1000.0))]),
            "replicas",
            ("wait 900 ms", "about 550 ms", "headrace plan mini"),
        ),
        (replace(CALM, live=engine(preempted=100)), "KV memory", ("100 preemptions", "10%", "--kv int8")),
        (
            replace(CALM, by_length=[row(980, length="<=512"), row(20, length=">8192", prompt_tokens=200_000)]),
            "context",
            ("2.0% of the requests", "67%", '"context": 8192'),
        ),
        (
            replace(CALM, by_model=[row(model="mini", draft_acceptance=0.1)]),
            "speculation",
            ("10%", "90%", "--level speculation"),
        ),
        (replace(CALM, by_model=[row(model="mini", draft_acceptance=0.9)]), "speculation", ("longer drafts", "10.0")),
        (
            replace(
                CALM,
                by_tenant=[
                    row(500, tenant="loud", machine_s_per_1000_requests=90.0),
                    row(500, tenant="quiet", machine_s_per_1000_requests=10.0, good=300),
                ],
            ),
            "tenants",
            ("loud takes 90%", "60% of the other", "change-tenant loud"),
        ),
        (
            replace(CALM, by_surface=[row(surface="chat", good=500, percentiles=percentiles(queue=5000.0))]),
            "batch surface",
            ("50% of the requests", "5.0 s", "/v1/batches"),
        ),
        (
            replace(
                CALM, live={**CALM.live, "caches": [{"cache": "prefix", "prompt_tokens": 500_000, "hit_ratio": 0.01}]}
            ),
            "prefix cache",
            ("1% of the prompt tokens", "what differs last"),
        ),
        (
            replace(CALM, live=cache(cache="exact", hit_ratio=0.1, recent_hit_ratio=0.4)),
            "cache TTL",
            ("40% of recent", "0.50 s"),
        ),
        (
            replace(CALM, live=cache(cache="semantic", hit_ratio=0.001, recent_hit_ratio=0.0)),
            "cache TTL",
            ("500 entries", "2.0 MB"),
        ),
        (replace(CALM, live=engine(between_seconds=100.0)), "host", ("50%", "8.0 rows")),
    ],
)
def test_each_finding_names_its_figures_and_what_to_do(seen: Observed, subject: str, texts: tuple[str, ...]) -> None:
    (found,) = advise(seen)
    assert found.subject == subject
    said = " ".join((found.finding, found.change, found.gain, found.command))
    for text in texts:
        assert text in said, said


def test_figures_that_are_missing_are_no_findings() -> None:
    bare = Observed(
        live={},
        by_model=[{"model": "m", "requests": 500}],
        by_surface=[{"surface": "chat", "requests": 500}],
        by_tenant=[{"tenant": "a", "requests": 500}],
        by_length=[{"length": "<=128", "requests": 500}],
    )
    assert advise(bare) == []
    frozen = replace(CALM, live={"engines": [{"model": "mini", "answers": False}], "caches": []})
    assert advise(frozen) == []
