"""The table fits 100 columns, says how it was measured, and shows no empty column."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from headrace.bench.evaluation.evaluation_report import Distance, Estimate, EvaluatedVariant, EvaluationReport
from headrace.bench.evaluation.evaluation_table import markdown, show
from headrace.bench.evaluation.token_scores import Speed


def row(weights: str, distance: Distance | None = None, speed: Speed | None = None) -> EvaluatedVariant:
    return EvaluatedVariant(
        model="/models/large-model",
        weights=weights,
        kv="bf16",
        keep=(),
        weight_bytes=15_231_233_536,
        kv_bytes_per_token=1024,
        loss=Estimate(2.0, 1.9, 2.1),
        perplexity=Estimate(12345.678, 11345.6, 14345.6),
        distance=distance,
        speed=speed,
    )


WIDEST = Distance(
    kl=Estimate(0.01402, 0.01311, 0.01523),
    kl_p99=0.2,
    kl_max=1.0,
    top1=Estimate(0.9221, 0.9134, 0.9312),
    perplexity_change=Estimate(0.1056, -0.0704, 0.1409),
)
SPEED = Speed(12345.0, 2137.0)


def report(*variants: EvaluatedVariant, chunks: int = 30) -> EvaluationReport:
    return EvaluationReport(
        source="notes.txt",
        tokens=4859,
        chunks=chunks,
        window=512,
        stride=256,
        seed=3,
        cpu="AMD EPYC 9655 96-Core Processor",
        isa="avx512bf16",
        threads=2,
        speed_prompt=512 if variants[0].speed else None,
        variants=list(variants),
    )


def shown(found: EvaluationReport) -> str:
    file = io.StringIO()
    show(found, Console(file=file, width=100))
    return file.getvalue()


def test_the_widest_table_fits_100_columns_and_cuts_nothing() -> None:
    text = shown(report(row("f32", speed=SPEED), row("int8-channel", WIDEST, SPEED)))
    assert max(map(len, text.splitlines())) <= 100
    for value in ("int8-channel", "15,231.2", "12,300", "+10.56", "-7.04…+14.09", "0.0140", "0.0131…0.0152", "92.2"):
        assert value in text
    assert "91.3…93.1" in text
    assert "12,345" in text
    assert "large-model on notes.txt: 4,859 tokens scored in 30 chunks" in text
    assert "Windows of 512 tokens, of which each scores its last 256" in text
    assert "95% intervals, by resampling chunks (seed 3)" in text


def test_disjoint_windows_are_named_so() -> None:
    text = shown(msgspec.structs.replace(report(row("bf16")), stride=512))
    assert "Disjoint windows of 512 tokens." in text


def test_columns_without_a_value_are_left_out() -> None:
    text = shown(report(row("bf16")))
    assert "perplexity" in text
    for heading in ("change", "KL", "top-1", "prompt", "decode", "reference"):
        assert heading not in text
    assert "| weights | MB | perplexity |\n|---|---:|---:|\n" in markdown(report(row("bf16")))


def test_few_chunks_are_marked() -> None:
    assert "only a hint with fewer than 10" in shown(report(row("bf16"), chunks=9))
    assert "One chunk has no interval" in shown(report(row("bf16"), chunks=1))
    assert "hint" not in shown(report(row("bf16"), chunks=10))


def test_markdown_has_the_same_values_in_one_line_per_variant() -> None:
    text = markdown(report(row("f32", speed=SPEED), row("int8-channel", WIDEST, SPEED)))
    lines = text.splitlines()
    assert lines[0].startswith("large-model on notes.txt: 4,859 tokens")
    assert lines[2].startswith("| weights | MB | perplexity | change % | KL per token |")
    assert "| int8-channel | 15,231.2 | 12,300 (11,300…14,300) | +10.56 (-7.04…+14.09) | 0.0140 (0.0131" in lines[5]
    assert lines[4].count("|") == lines[5].count("|") == lines[2].count("|")
