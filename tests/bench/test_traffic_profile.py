"""What a plan needs to know of traffic: lengths, percentiles, reuse, rate, and the context that follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.objectives import missed, parse_objectives
from headrace.bench.traffic_profile import of_lengths, of_trace
from headrace.errors import RequestError


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_context_is_the_p95_of_prompt_and_answer(tmp_path: Path) -> None:
    lines = [{"at": float(number), "prompt": 100, "answer": 20} for number in range(95)]
    lines += [{"at": 95.0 + number, "prompt": 5000, "answer": 1000} for number in range(3)]
    found = of_trace(write(tmp_path / "trace.jsonl", lines))
    assert found.context == 256
    assert found.beyond == pytest.approx(3 / 98)
    assert found.total_most == 6000
    assert found.rate == pytest.approx(1.0)
    assert found.prompt == pytest.approx((95 * 100 + 3 * 5000) / 98)


def test_a_shared_prefix_is_reused_within_its_tenant_only(tmp_path: Path) -> None:
    shared = {"prompt": 100, "answer": 1, "prefix": "rules", "prefix_tokens": 60}
    lines = [{"at": 0.0, "tenant": "a", **shared}, {"at": 1.0, "tenant": "a", **shared}]
    lines.append({"at": 2.0, "tenant": "b", **shared})
    assert of_trace(write(tmp_path / "trace.jsonl", lines)).reused == pytest.approx(60 / 300)


def test_blocks_are_reused_from_the_front(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 1024, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 9, "input_length": 1024, "output_length": 5, "hash_ids": [4, 2]},
    ]
    assert of_trace(write(tmp_path / "trace.jsonl", lines)).reused == pytest.approx(512 / 3072)


def test_lengths_are_a_profile_too() -> None:
    assert of_lengths(1000, 200).context == 1280


def test_a_trace_of_texts_or_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has texts"):
        of_trace(write(tmp_path / "texts.jsonl", [{"prompt": "Hello"}]))
    with pytest.raises(RequestError, match="has no requests"):
        of_trace(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(RequestError, match="There is no trace"):
        of_trace(tmp_path / "missing.jsonl")


def test_objectives_are_in_seconds_and_default_to_p95() -> None:
    assert parse_objectives(["ttft=300, itl_p99=0.05s", "e2el_p50=2s"]) == {
        "ttft_p95": 0.3,
        "itl_p99": 0.05,
        "e2el_p50": 2.0,
    }
    assert missed({"ttft_p95": 0.3, "itl_p95": 0.1}, {"ttft_p95": 0.2, "itl_p95": 0.11}) == ["itl_p95"]
    for wrong in ("ttft", "ttft_p42=3", "ttft_p95=0ms", "ttft=1.2.3"):
        with pytest.raises(RequestError):
            parse_objectives(wrong)
