"""`headrace replay`: sends recorded requests to a server or a model and keeps the answers beside the originals."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from headrace.bench.results.formatting import milliseconds, seconds
from headrace.errors import RequestError
from headrace.lab.answering.model_server import parse_spec
from headrace.lab.recording.recorded_request import read_trace, write_trace
from headrace.lab.replay.replay import ReplayOptions, ReplaySummary
from headrace.lab.replay.replay import replay as replay_records
from headrace.models.formats.atomic_file import new_file


def replay(
    trace: Path,
    /,
    *,
    against: str,
    speed: float = 1.0,
    concurrency: Annotated[int | None, Parameter(name=["--concurrency", "-c"])] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    key_env: str | None = None,
    json: bool = False,
) -> None:
    """Send recorded requests again, to a server or a model, and keep the answers beside the originals.

    Usage: headrace replay acme.jsonl --against http://localhost:8000 --output answers.jsonl

    Each request is sent at its recorded time, so bursts come as they came. The exit code is 1 if a request failed.

    Parameters
    ----------
    trace
        A recording, as `headrace recordings export` writes it.
    against
        Server (URL, or URL#MODEL) or model (a folder, a GGUF file or a name, with a precision as in mini@int8).
    speed
        2 sends the requests in half of their time.
    concurrency
        Keep so many requests under way, instead of sending them at their times.
    output
        File for the requests with the old and the new answers; `headrace gate --recorded` reads it.
    key_env
        Environment variable with the server's API key.
    json
        Print the summary as JSON.
    """
    if not trace.is_file():
        raise RequestError(f"There is no file {trace}.", parameter="trace")
    records = read_trace(trace)
    target = parse_spec(against, parameter="against")
    key = api_key(key_env)
    options = ReplayOptions(speed=speed, concurrency=concurrency, key=key)
    replayed, summary = asyncio.run(replay_records(records, target, options, watch=show_progress))
    if output is not None:
        with new_file(output) as file:
            for line in write_trace(replayed):
                file.write(line)
        output.chmod(0o600)
    if json:
        print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    else:
        _print(summary)
    if summary.failed:
        sys.exit(1)


def api_key(variable: str | None) -> str:
    """Return an API key from the environment. RequestError if the variable is not set."""
    if variable is None:
        return ""
    value = os.environ.get(variable)
    if not value:
        raise RequestError(f"The environment variable {variable} is not set or empty.", parameter="key-env")
    return value


def show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} answers", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _print(summary: ReplaySummary) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{summary.requests:,} requests in {seconds(summary.seconds)}, {summary.failed:,} failed.")
    if summary.similarity is not None:
        console.print(f"Answers as recorded: {summary.exact:,}; mean {summary.similarity_by} {summary.similarity:.3f}.")
    if summary.ttft_p50_s is not None and summary.e2el_p50_s is not None:
        before = summary.original_e2el_p50_s
        beside = "" if before is None else f" (recorded: {milliseconds(before * 1e3)})"
        console.print(
            f"TTFT p50 {milliseconds(summary.ttft_p50_s * 1e3)}, E2EL p50 {milliseconds(summary.e2el_p50_s * 1e3)}"
            f"{beside}."
        )
    if summary.late_s > 0.05:
        console.print(f"The latest request was sent {seconds(summary.late_s)} after its time.")
