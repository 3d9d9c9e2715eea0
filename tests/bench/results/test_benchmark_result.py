"""A result's file: what was written is read again, and other programs find vLLM's keys in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.results.benchmark_result import BenchmarkResult, RequestRow, StageResult, read, vllm_keys, write
from headrace.bench.results.request_stats import compute_stats
from headrace.errors import RequestError

ROWS = [
    RequestRow(
        number=0,
        ok=True,
        status=200,
        start=0.5,
        prompt_tokens=100,
        output_tokens=3,
        ttft=0.2,
        e2el=0.4,
        gaps=[0.1, 0.1],
        chunks=3,
        text="a b c",
    ),
    RequestRow(number=1, error="http 503", why="busy", status=503, start=0.6, e2el=0.01),
]


def result(rows: list[RequestRow] | None = None) -> BenchmarkResult:
    found = compute_stats("all", ROWS, {"ttft": 300.0})
    stage = StageResult(name="4 requests/s", rate=4.0, figures=found)
    return BenchmarkResult(
        model="m",
        endpoint="/v1/chat/completions",
        started_at="2026-01-31T12:00:00+00:00",
        duration=2.0,
        figures=found,
        stages=[stage],
        rows=ROWS if rows is None else rows,
        arguments={"rate": [4.0]},
        ramp=(1.0, 2.0),
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(result(), path)
    assert read(path) == result()


def test_rows_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(result([]), path)
    assert read(path) == result([])
    assert "ttfts" not in json.loads(path.read_text())


def test_gaps_and_texts_are_in_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(result(), path)
    assert path.read_text().count("a b c") == 1


def test_other_programs_find_the_keys_of_vllm() -> None:
    found = vllm_keys(result())
    expected = {
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
        "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
        "total_output_tokens", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
        "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts",
        "errors", "max_output_tokens_per_s", "max_concurrent_requests",
        "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
        *(
            f"{part}_{name}_ms"
            for name in ("ttft", "tpot", "itl", "e2el")
            for part in ("mean", "median", "std", "p50", "p90", "p95", "p99")
        ),
    }  # fmt: skip
    assert set(found) == expected
    assert (found["backend"], found["request_rate"], found["num_prompts"]) == ("openai-chat", 4.0, 2)
    assert (found["median_ttft_ms"], found["ttfts"], found["itls"]) == (200.0, [0.2, 0.0], [[0.1, 0.1], []])
    assert found["errors"] == ["", "http 503: busy"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"headrace": {"figures": {}}}', '{"mean_ttft_ms": 3}'])
def test_a_file_of_others_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=r"other\.json"):
        read(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    other = result()
    other.version = 99
    write(other, path)
    with pytest.raises(RequestError, match="99"):
        read(path)
