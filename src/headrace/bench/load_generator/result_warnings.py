"""Warnings about a result: late requests, prompts of the wrong length, miscounted tokens.

Pure: takes a result, returns sentences.
"""

from __future__ import annotations

from typing import Final

from headrace.bench.load_generator.benchmark_options import MOST_REQUESTS
from headrace.bench.load_generator.load_driver import MOST_GAPS
from headrace.bench.load_generator.token_check import MOST_DIFFERENCE
from headrace.bench.results.benchmark_result import BenchmarkResult

_OFF: Final = 0.05  # difference from the requested prompt tokens that is worth a warning


def collect_warnings(result: BenchmarkResult, *, most_lag: float, ignore_eos: bool) -> list[str]:
    """`most_lag`: acceptable p99 lag in milliseconds; `ignore_eos`: answers were requested at a fixed length."""
    warnings: list[str] = []
    ok_rows = [row for row in result.rows if row.ok]
    lag = result.figures.lag
    if lag is not None and lag.p99 > most_lag:
        warnings.append(
            f"Requests were sent late: the p99 lag behind the schedule is {lag.p99:.1f} ms, above {most_lag:g} ms. "
            "The client or this machine is the bottleneck."
        )
    made = [row for row in ok_rows if row.asked_input and row.prompt_tokens]
    asked, came = sum(row.asked_input for row in made), sum(row.prompt_tokens for row in made)
    if asked and abs(came - asked) / asked > _OFF:
        warnings.append(
            f"Prompts have {came / asked - 1.0:+.1%} tokens compared with the requested length, by the server's count."
        )
    if ignore_eos:
        short = sum(row.output_tokens < row.asked_output for row in ok_rows if row.tokens_from == "usage")
        if short:
            warnings.append(
                f"{short} of {len(ok_rows)} answers are shorter than requested: the server ignores ignore_eos, "
                "or its context was full."
            )
    counted = {row.tokens_from for row in ok_rows}
    if "chunks" in counted:
        warnings.append(
            "The server reports no usage and no tokenizer is known: each streamed chunk counts as one token."
        )
    elif "text" in counted:
        warnings.append("The server reports no usage: output tokens are counted from the texts.")
    token_check = result.token_check
    if token_check is not None and token_check.difference > MOST_DIFFERENCE:
        warnings.append(describe_mismatch(result))
    elif token_check is not None and token_check.past_ends is not None:
        warnings.append(
            f"{token_check.past_ends:.1%} of the output tokens are not in the text: with ignore_eos the model went "
            "on past its end tokens, which servers do not print."
        )
    if result.gaps_left_out:
        warnings.append(f"ITL leaves out {result.gaps_left_out} answers: at most {MOST_GAPS:,} gaps are kept.")
    if len(result.rows) >= MOST_REQUESTS:
        warnings.append(f"The run ended at its limit of {MOST_REQUESTS:,} requests.")
    return warnings


def describe_mismatch(result: BenchmarkResult) -> str:
    """Describe token counts that differ too much; empty if they agree."""
    token_check = result.token_check
    if token_check is None or token_check.difference <= MOST_DIFFERENCE:
        return ""
    return (
        f"The server reports {token_check.usage:,} output tokens where the {token_check.by} counts "
        f"{token_check.counted:,} in the texts of {token_check.answers} answers, "
        f"a difference of {token_check.difference:.1%}"
    )
