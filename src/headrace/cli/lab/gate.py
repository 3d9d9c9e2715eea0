"""`headrace gate`: judges a candidate against a baseline on your own prompts. Exit code 0: pass, 1: fail, 2: usage."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console

from headrace.cli.lab.replay import api_key, show_progress
from headrace.errors import RequestError
from headrace.lab.answering.encoder import open_encoder
from headrace.lab.answering.model_server import AnswererSpec, parse_spec
from headrace.lab.cases.case import Case
from headrace.lab.cases.prompt_file import DEFAULT_TOKENS, cases_of_records, read_cases
from headrace.lab.cases.red_team import red_team_cases
from headrace.lab.comparison.answer import Answer
from headrace.lab.gate.gate import GateOptions, GateResult, run_gate
from headrace.lab.gate.gate_report import write_gate_report
from headrace.lab.gate.gate_table import show
from headrace.lab.gate.thresholds import read_thresholds, thresholds_toml
from headrace.lab.recording.recorded_request import read_trace
from headrace.models.formats.atomic_file import new_file

RECORDED: Final = "recorded"  # in place of a baseline
REPLAYED: Final = "replayed"  # in place of a candidate
_COLUMNS: Final = 110
_RED_TEAM: Final = 60


def gate(
    candidate: str | None = None,
    baseline: str | None = None,
    /,
    *,
    prompts: Path | None = None,
    recorded: Path | None = None,
    thresholds: Path | None = None,
    red_team: int | None = None,
    weights: str | None = None,
    keep: Annotated[list[str] | None, Parameter(negative=())] = None,
    kv: str | None = None,
    encoder: str | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    concurrency: Annotated[int, Parameter(name=["--concurrency", "-c"])] = 1,
    key_env: str | None = None,
    threads: Annotated[int | None, Parameter(name=["--threads", "-t"])] = None,
    html: Path | None = None,
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    print_thresholds: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Judge whether a candidate may take a baseline's place, on your own prompts.

    Usage: headrace gate mini@int8 mini --prompts prompts.jsonl --html gate.html

    Candidate and baseline are models, with a precision as in mini@int8, or servers (URL, or URL#MODEL). The exit code
    is 0 if the candidate passes, 1 if it fails, and 2 for wrong usage.

    Parameters
    ----------
    candidate
        Model or server to judge; `replayed` takes the answers that `headrace replay --output` put into --recorded.
    baseline
        Model or server to compare with; `recorded` takes the recorded answers.
    prompts
        JSONL file of prompts, an lm-eval task (YAML), or a promptfoo file (YAML).
    recorded
        Recording, as `headrace recordings export` or `headrace replay --output` writes it.
    thresholds
        TOML file with limits. Default: those that --print-thresholds prints.
    red_team
        Prompts of the red-team set to add, of 356. Default: 60, and none with `replayed`.
    weights
        Precision of the candidate's weights, in place of MODEL@WEIGHTS.
    keep
        PATTERN=PRECISION for tensors of the candidate, as in headrace evaluate. Repeatable.
    kv
        Precision of the candidate's KV cache.
    encoder
        Embedding model that measures similarity. Default: shared words.
    max_tokens
        Output tokens of prompts that set no limit.
    concurrency
        Prompts under way at once. Above 1, latencies include waiting for each other.
    key_env
        Environment variable with the API key of servers.
    threads
        Threads of each local model. Default: the machine's cores.
    html
        Write a report to this file, the worst differences first.
    json
        Write the result to this file as JSON; `-` prints it instead of the table.
    print_thresholds
        Print a thresholds file with every default, and end.
    """
    if print_thresholds:
        print(thresholds_toml(), end="")
        return
    if candidate is None or baseline is None:
        raise RequestError("Name a candidate and a baseline: headrace gate mini@int8 mini --prompts FILE.")
    limits = read_thresholds(thresholds)
    cases, replayed = _cases(prompts, recorded, max_tokens, candidate)
    if red_team is None:
        red_team = 0 if replayed is not None or baseline == RECORDED else _RED_TEAM
    if red_team and baseline == RECORDED:
        raise RequestError(
            "Recorded answers have none to the red-team set. Pass --red-team 0 or another baseline.",
            parameter="red-team",
        )
    cases += red_team_cases(red_team)
    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    given = {"weights": weights, "kv": kv, "keep": tuple(keep or ()) or None}
    own = options | {name: value for name, value in given.items() if value is not None}
    judged = (
        AnswererSpec(name=REPLAYED)
        if replayed is not None
        else parse_spec(candidate, parameter="candidate", options=own)
    )
    against = None if baseline == RECORDED else parse_spec(baseline, parameter="baseline", options=options)
    if replayed is not None and against is not None:
        raise RequestError(f"Replayed answers are compared with '{RECORDED}' ones.", parameter="baseline")
    with open_encoder(encoder, threads) as similarity:
        result = asyncio.run(
            run_gate(
                cases,
                judged,
                against,
                limits,
                GateOptions(concurrency=concurrency, key=api_key(key_env)),
                replayed=replayed,
                similarity=similarity,
                watch=show_progress,
            )
        )
    _write(result, html, json)
    if not result.passed:
        sys.exit(1)


def _cases(
    prompts: Path | None, recorded: Path | None, max_tokens: int, candidate: str
) -> tuple[list[Case], Mapping[str, Answer] | None]:
    """Return the cases, and the candidate's answers if they were replayed."""
    if (prompts is None) == (recorded is None):
        raise RequestError("Pass your prompts: either --prompts FILE or --recorded FILE.", parameter="prompts")
    if prompts is not None:
        if candidate == REPLAYED:
            raise RequestError(f"'{REPLAYED}' needs --recorded with a replay's output.", parameter="candidate")
        return read_cases(prompts, max_tokens=max_tokens), None
    assert recorded is not None
    if not recorded.is_file():
        raise RequestError(f"There is no file {recorded}.", parameter="recorded")
    records = read_trace(recorded)
    if candidate != REPLAYED:
        return cases_of_records(records), None
    answers = {record.id: record.replayed for record in records if record.replayed is not None}
    if len(answers) < len(records):
        raise RequestError(
            f"{recorded} has requests without a replayed answer. Write it with headrace replay --output.",
            parameter="recorded",
        )
    return cases_of_records(records), answers


def _write(result: GateResult, html: Path | None, json: Path | None) -> None:
    if html is not None:
        write_gate_report(result, html)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    if json is not None and str(json) == "-":
        print(encoded.decode(), end="")
        return
    if json is not None:
        with new_file(json) as file:
            file.write(encoded)
    show(result, Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS))
