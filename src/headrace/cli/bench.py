"""`headrace bench`: benchmark any OpenAI-compatible server, and compare results.

Maps flags to options; headrace.bench does the measuring. In addition to the usual exit codes, it exits with 1 if more
requests fail than --most-errors allows, or if the server's token counts differ from ours.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from headrace.bench.load_generator.arrivals import ArrivalProcess
from headrace.bench.load_generator.benchmark_options import (
    BenchmarkOptions,
    LoadTenant,
    SweepOptions,
    WorkloadOptions,
    build_mix,
    check_minimum,
)
from headrace.bench.load_generator.trace_reader import TraceFormat
from headrace.bench.load_generator.workloads import PrefixKind
from headrace.bench.results.benchmark_result import BenchmarkResult
from headrace.errors import RequestError

_WIDTH: Final = 160  # columns of a table that does not go to a terminal
Repeatable = Parameter(negative=(), consume_multiple=(1, 64))

bench = App(name="bench", help="Benchmark any OpenAI-compatible server over HTTP.", version_flags=[])


bench.command("headrace.cli.bench_reference:reference", name="reference")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The server and the requests.

    Parameters
    ----------
    model
        Model name. Default: the first that the server lists.
    endpoint
        Endpoint: chat or completions.
    stream
        Stream responses. Without streaming there is no TTFT and no ITL.
    temperature
        Sampling temperature; 0 always takes the most likely token.
    ignore_eos
        Generate exactly as many tokens as the workload asks for, past the model's end-of-sequence tokens.
    body
        JSON object with additional fields for each request.
    header
        Header for each request, as NAME=VALUE.
    api_key_env
        Environment variable with the API key.
    surface
        Surface to name in Headrace's x-headrace-surface header.
    insecure
        Accept any TLS certificate.
    timeout
        Seconds to wait for a whole response.
    connect_timeout
        Seconds to wait for a connection.
    tokenizer
        Model folder, GGUF file, bundled model or hub id whose tokenizer counts tokens. Default: the server's
        /tokenize, or else the usage it reports.
    token_mismatch
        What to do if the server's count of output tokens differs from ours by more than 5 %: fail, warn or off.
    """

    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True
    body: str = "{}"
    header: Annotated[list[str] | None, Repeatable] = None
    api_key_env: str = "OPENAI_API_KEY"
    surface: str = ""
    insecure: Annotated[bool, Parameter(negative=())] = False
    timeout: float = 600.0
    connect_timeout: float = 10.0
    tokenizer: str | None = None
    token_mismatch: Literal["fail", "warn", "off"] = "fail"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How many requests are sent, and when.

    Parameters
    ----------
    concurrency
        Closed loop: the number of users; each sends its next request when the previous response is complete. Several
        numbers run as several stages. With --rate: maximum concurrent requests.
    rate
        Open loop: requests per second, however slow the server is. Several numbers run as several stages; inf sends
        everything at once.
    arrivals
        Distribution of the gaps in an open loop: constant, poisson or gamma.
    burstiness
        Shape of gamma gaps: below 1 is burstier than poisson, above 1 is more even.
    ramp
        FROM..TO: increase the rate over --seconds.
    sweep
        FROM..TO or FROM..: raise the rate stage by stage until the server falls behind, and find the knee.
    sweep_factor
        Factor between the rates of two stages.
    sweep_refine
        Stages between the last rate the server keeps up with and the first it does not.
    sweep_good
        Share of a stage's requests that must meet the objectives.
    sweep_latency
        Without objectives: the server falls behind at this multiple of the first stage's p90 TTFT.
    sweep_stages
        Maximum stages.
    requests
        Requests per stage.
    seconds
        Seconds per stage in which requests are sent. Default: 30 if --requests is not given either.
    drain
        Seconds to wait for running requests when a stage's time is up.
    warmup
        Requests before the first stage that are not measured.
    most_running
        Maximum concurrent requests; more fail without being sent.
    most_lag
        p99 lag behind the schedule, in milliseconds, above which a warning is printed.
    tenants
        TOML file of tenants that send concurrently, each with a key, rate, workload and surface.
    """

    concurrency: Annotated[list[int] | None, Repeatable] = None
    rate: Annotated[list[float] | None, Repeatable] = None
    arrivals: ArrivalProcess | None = None
    burstiness: float = 1.0
    ramp: str | None = None
    sweep: str | None = None
    sweep_factor: float = 2.0
    sweep_refine: int = 2
    sweep_good: float = 0.9
    sweep_latency: float = 5.0
    sweep_stages: int = 12
    requests: int | None = None
    seconds: float | None = None
    drain: float = 60.0
    warmup: int = 4
    most_running: int = 4096
    most_lag: float = 10.0
    tenants: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkFlags:
    """The prompts and answers.

    Parameters
    ----------
    workload
        Workload: fixed, chat, rag, agent, summarise or extract, or a mix such as chat=0.7,rag=0.3.
    input_tokens
        Tokens per prompt by the server's count, including the chat template and excluding a shared prefix.
    output_tokens
        Tokens per answer.
    spread
        Draw lengths uniformly between 1 - spread and 1 + spread times the length.
    scale
        Factor for the lengths of a named workload.
    prefixes
        Number of different shared prefixes; 0 is none.
    prefix_tokens
        Tokens per shared prefix.
    prefix_kind
        Position of the prefix: system (a system message), few-shot (pairs of messages) or documents (before the
        question).
    prefix_share
        Share of the conversations with a shared prefix.
    turns
        Turns per conversation, such as 4 or 2-6.
    think
        Mean seconds between an answer and the next turn.
    trace
        JSONL file of requests in Headrace's, Mooncake's or vLLM's custom format.
    trace_format
        Trace format: auto, headrace, mooncake or vllm.
    speed
        Replay the trace this many times faster.
    seed
        Seed for lengths, arrivals and texts.
    reuse_prompts
        Send the same prompts in every run with this seed, so that the server may have them cached.
    """

    workload: str = "fixed"
    input_tokens: int | None = None
    output_tokens: int | None = None
    spread: float = 0.0
    scale: float = 1.0
    prefixes: int | None = None
    prefix_tokens: int | None = None
    prefix_kind: PrefixKind | None = None
    prefix_share: float | None = None
    turns: str | None = None
    think: float | None = None
    trace: Path | None = None
    trace_format: TraceFormat = "auto"
    speed: float = 1.0
    seed: int = 0
    reuse_prompts: Annotated[bool, Parameter(negative=())] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Objectives and output.

    Parameters
    ----------
    goodput
        Objectives in milliseconds for ttft, ttfo, tpot and e2el, such as ttft:300 tpot:50.
    buckets
        Prompt lengths, in tokens, by which requests are grouped.
    most_errors
        Failed requests allowed, as a number or a share such as 1%. With more, the exit code is 1.
    json
        Write the result to this JSON file, with vLLM's benchmark keys and our own.
    html
        Write a report to this HTML file.
    detail
        Store each request in the JSON file.
    texts
        Store the answers' texts in the JSON file.
    label
        Label of the result.
    live
        Show progress during the run. Default: on in a terminal.
    """

    goodput: Annotated[list[str] | None, Repeatable] = None
    buckets: str = "128,512,2048,8192"
    most_errors: str = "0"
    json: Path | None = None
    html: Path | None = None
    detail: bool = True
    texts: Annotated[bool, Parameter(negative=())] = False
    label: str = ""
    live: bool | None = None


SERVER: Final = ServerFlags()
LOAD: Final = LoadFlags()
WORK: Final = WorkFlags()
OUTPUT: Final = OutputFlags()


@bench.default
def measure(
    url: str = "http://localhost:8000",
    /,
    *,
    server: ServerFlags = SERVER,
    load: LoadFlags = LOAD,
    work: WorkFlags = WORK,
    output: OutputFlags = OUTPUT,
) -> None:
    """Benchmark any OpenAI-compatible server over HTTP.

    Usage: headrace bench http://localhost:8000 --concurrency 1 8 --seconds 30 --html report.html

    Parameters
    ----------
    url
        URL of the server.
    """
    options = build_options(url, server, load, work, output)
    options.check()
    allowed = _most_errors(output.most_errors)
    for path in (output.json, output.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"Cannot write {path}: its folder does not exist.", parameter="json")
    from headrace.bench.load_generator.benchmark import run_benchmark
    from headrace.bench.load_generator.live_display import LiveDisplay
    from headrace.bench.load_generator.result_warnings import describe_mismatch
    from headrace.bench.results.result_table import show

    live = output.live if output.live is not None else sys.stderr.isatty()
    with LiveDisplay(quiet=not live) as view:
        result = run_benchmark(options, watch=view.watch if live else None)
    result.arguments = _arguments(url, server, load, work, output)
    _write(result, output)
    show(result, _console())
    if any("interrupted" in warning for warning in result.warnings):
        raise KeyboardInterrupt
    failed, requests = _failures(result)
    if failed > (allowed * requests if allowed < 1.0 else allowed):
        kinds = ", ".join(f"{kind} ({count})" for kind, count in result.figures.errors.items())
        raise ConnectionError(f"{failed} of {requests} requests failed: {kinds}.")
    if options.mismatch == "fail" and (mismatch := describe_mismatch(result)):
        raise ConnectionError(f"{mismatch}. Pass --token-mismatch warn to accept it.")


@bench.command
def compare(
    a: Path,
    b: Path,
    /,
    *rounds: Path,
    margin: float = 0.0,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    html: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compare two results: ratios, their confidence intervals, and where there is no difference.

    Usage: headrace bench compare before.json after.json

    Parameters
    ----------
    a
        A result that `headrace bench --json` wrote.
    b
        Another result, shown as a multiple of A.
    rounds
        Results of further rounds, alternating between A and B.
    margin
        Ignore differences up to this share: 0.02 is two per cent.
    confidence
        Confidence of the intervals.
    resamples
        Bootstrap resamples.
    seed
        Seed for the resampling.
    html
        Write a report of all results to this HTML file.
    json
        Print one JSON object instead of the table.
    """
    from headrace.bench.compare.compare_results import compare as compare_results
    from headrace.bench.compare.comparison import show
    from headrace.bench.results.benchmark_result import read

    if len(rounds) % 2:
        raise RequestError("Rounds come in pairs: A B A B.", parameter="rounds")
    results = [read(path) for path in (a, b, *rounds)]
    comparison = compare_results(
        results[::2], results[1::2], seed=seed, resamples=resamples, confidence=confidence, margin=margin
    )
    if html is not None:
        from headrace.bench.report.html_report import write_html

        write_html(results, html)
    if json:
        print(msgspec.json.encode(comparison).decode())
    else:
        show(_console(), comparison)


def build_options(
    url: str, server: ServerFlags, load: LoadFlags, work: WorkFlags, output: OutputFlags
) -> BenchmarkOptions:
    workload = WorkloadOptions(
        workload=work.workload,
        input_tokens=work.input_tokens,
        output_tokens=work.output_tokens,
        spread=work.spread,
        scale=work.scale,
        prefixes=work.prefixes,
        prefix_tokens=work.prefix_tokens,
        prefix_kind=work.prefix_kind,
        prefix_share=work.prefix_share,
        turns=work.turns,
        think=work.think,
    )
    mix = build_mix(workload)
    check_minimum("burstiness", load.burstiness, 1e-3)
    if load.burstiness != 1.0 and load.arrivals not in (None, "gamma"):
        raise RequestError(f"Burstiness needs gamma arrivals, not {load.arrivals}.", parameter="burstiness")
    arrivals = load.arrivals or ("gamma" if load.burstiness != 1.0 else "poisson")
    key = _key(server.api_key_env)
    tenants = (LoadTenant(key=key, surface=server.surface, mix=mix, arrivals=arrivals, burstiness=load.burstiness),)
    if load.tenants is not None:
        from headrace.bench.load_generator.tenant_file import read_tenants

        tenants = read_tenants(load.tenants, os.environ, mix)
    sweep = None
    if load.sweep is not None:
        low, high = _range(load.sweep, "sweep", open_end=True)
        sweep = SweepOptions(
            low=low,
            high=high,
            factor=load.sweep_factor,
            refine=load.sweep_refine,
            good_share=load.sweep_good,
            latency=load.sweep_latency,
            stages=load.sweep_stages,
        )
    return BenchmarkOptions(
        url=url,
        model=server.model,
        endpoint=server.endpoint,
        stream=server.stream,
        temperature=server.temperature,
        ignore_eos=server.ignore_eos,
        body=_body(server.body),
        headers=_headers(server.header or ()),
        insecure=server.insecure,
        timeout=server.timeout,
        connect_timeout=server.connect_timeout,
        tenants=tenants,
        concurrency=tuple(load.concurrency or ()),
        rates=tuple(load.rate or ()),
        ramp=None if load.ramp is None else _range(load.ramp, "ramp"),
        sweep=sweep,
        trace=work.trace,
        trace_format=work.trace_format,
        speed=work.speed,
        requests=load.requests,
        seconds=load.seconds,
        drain=load.drain,
        warmup=load.warmup,
        running=load.most_running,
        most_lag=load.most_lag,
        seed=work.seed,
        nonce="" if work.reuse_prompts else None,
        tokenizer=server.tokenizer,
        mismatch=server.token_mismatch,
        objectives=_objectives(output.goodput or ()),
        buckets=_buckets(output.buckets),
        texts=output.texts,
        label=output.label,
    )


def _key(variable: str) -> str | None:
    found = os.environ.get(variable)
    if found is None and variable != SERVER.api_key_env:
        raise RequestError(f"Environment variable {variable} is not set.", parameter="api-key-env")
    return found or None


def _body(text: str) -> dict[str, Any]:
    try:
        found: object = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"body must be a JSON object, not '{text}'.", parameter="body")
    return cast("dict[str, Any]", found)


def _headers(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise RequestError(f"Invalid header '{each}'. Expected NAME=VALUE.", parameter="header")
        found[name.strip()] = value.strip()
    return found


def _range(text: str, name: str, *, open_end: bool = False) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        if not dots or not (high or open_end):
            raise ValueError
        return float(low), float(high) if high else math.inf
    except ValueError:
        raise RequestError(f"{name} must be FROM..TO, not '{text}'.", parameter=name) from None


def _objectives(given: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in given:
        name, _, value = each.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            raise RequestError(
                f"Invalid objective '{each}'. Expected NAME:MILLISECONDS.", parameter="goodput"
            ) from None
    return found


def _buckets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise RequestError(f"buckets must be numbers separated by commas, not '{text}'.", parameter="buckets") from None


def _most_errors(text: str) -> float:
    """Parse the allowed failures: below 1 a share, from 1 on a number."""
    try:
        found = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < math.inf or (text.endswith("%") and found > 1.0):
        raise RequestError(f"most-errors must be a number or a share like 1%, not '{text}'.", parameter="most-errors")
    return min(found, 1.0 - 1e-12) if text.endswith("%") else found


def _failures(result: BenchmarkResult) -> tuple[int, int]:
    """Count failed and all requests, without a sweep's stages past the knee, which are expected to fail."""
    rows = [stage.figures for stage in result.stages if stage.kept_up] if result.load == "sweep" else [result.figures]
    return sum(figures.failed for figures in rows), sum(figures.requests for figures in rows)


def _arguments(url: str, *flags: ServerFlags | LoadFlags | WorkFlags | OutputFlags) -> dict[str, Any]:
    """Collect the arguments that differ from their defaults, headers without their values."""
    found: dict[str, Any] = {"url": url}
    for each, defaults in zip(flags, (SERVER, LOAD, WORK, OUTPUT), strict=True):
        for name in each.__dataclass_fields__:
            value = getattr(each, name)
            if value == getattr(defaults, name):
                continue
            if name == "header":
                value = [header.partition("=")[0] for header in value]
            found[name.replace("_", "-")] = str(value) if isinstance(value, Path) else value
    return found


def _write(result: BenchmarkResult, output: OutputFlags) -> None:
    from headrace.bench.results.benchmark_result import write

    if output.json is not None:
        write(result if output.detail else msgspec.structs.replace(result, rows=[]), output.json)
    if output.html is not None:
        from headrace.bench.report.html_report import write_html

        write_html(result, output.html)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
