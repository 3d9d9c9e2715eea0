"""What a reader should know before the figures: late requests, lengths that are not those asked for, tokens miscounted.

Owns the bounds beyond which something is said, and the sentences. Pure: a result in, sentences out.
"""

from __future__ import annotations

from typing import Final

from headrace.bench.load_generator.benchmark_options import MOST_REQUESTS
from headrace.bench.load_generator.load_driver import MOST_GAPS
from headrace.bench.load_generator.token_check import MOST_DIFFERENCE
from headrace.bench.results.benchmark_result import BenchmarkResult

_OFF: Final = 0.05  # of the asked prompt tokens, beyond which the workload is not what was asked


def caveats(found: BenchmarkResult, *, most_lag: float, ignore_eos: bool) -> list[str]:
    """`most_lag`: milliseconds of p99 lag that are no matter; `ignore_eos`: answers were to have a given length."""
    said: list[str] = []
    well = [row for row in found.rows if row.ok]
    lag = found.figures.lag
    if lag is not None and lag.p99 > most_lag:
        said.append(
            f"requests were sent late: p99 of the lag behind the schedule is {lag.p99:.1f} ms, more than "
            f"{most_lag:g} ms; the client or this machine is the bottleneck"
        )
    made = [row for row in well if row.asked_input and row.prompt_tokens]
    asked, came = sum(row.asked_input for row in made), sum(row.prompt_tokens for row in made)
    if asked and abs(came - asked) / asked > _OFF:
        said.append(f"prompts have {came / asked - 1.0:+.1%} tokens of what was asked, by the server's own count")
    if ignore_eos:
        short = sum(row.output_tokens < row.asked_output for row in well if row.tokens_from == "usage")
        if short:
            said.append(
                f"{short} of {len(well)} answers are shorter than asked: the server does not know ignore_eos, or its "
                "context was full"
            )
    counted = {row.tokens_from for row in well}
    if "chunks" in counted:
        said.append("the server tells no usage and nothing here counts its tokens: each streamed chunk counts as one")
    elif "text" in counted:
        said.append("the server tells no usage: output tokens are counted from the texts")
    token_check = found.token_check
    if token_check is not None and token_check.difference > MOST_DIFFERENCE:
        said.append(mismatch_of(found))
    elif token_check is not None and token_check.past_ends is not None:
        said.append(
            f"{token_check.past_ends:.1%} of the output tokens are in no text: the model went on past its ends, as "
            "ignore_eos asks, and those are not written"
        )
    if found.gaps_left_out:
        said.append(f"{found.gaps_left_out} answers are in no ITL: {MOST_GAPS:,} gaps are kept")
    if len(found.rows) >= MOST_REQUESTS:
        said.append(f"the run ended at {MOST_REQUESTS:,} requests, the most that it keeps")
    return said


def mismatch_of(found: BenchmarkResult) -> str:
    """The sentence on token counts that are too far apart; empty where they are not."""
    token_check = found.token_check
    if token_check is None or token_check.difference <= MOST_DIFFERENCE:
        return ""
    return (
        f"the server says {token_check.usage:,} output tokens where the {token_check.by} counts "
        f"{token_check.counted:,} in the texts of {token_check.answers} answers: {token_check.difference:.1%} apart"
    )
