"""`headrace bench`: measure any OpenAI-compatible server, and compare two measurements.

Owns the commands' flags and how they become options. Everything that is measured is headrace.bench's.

Exit codes are those of every command; besides, 1 where more requests failed than --most-errors allows, or where the
server's counts of tokens are not to be believed.
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
    bounded,
    mix_of,
)
from headrace.bench.load_generator.trace_reader import TraceFormat
from headrace.bench.load_generator.workloads import PrefixKind
from headrace.bench.results.benchmark_result import BenchmarkResult
from headrace.errors import RequestError

_WIDE: Final = 160  # columns of a table that goes to no terminal
Many = Parameter(negative=(), consume_multiple=True)

bench = App(
    name="bench",
    help="Measure any OpenAI-compatible server over HTTP.",
    help_flags=["--help", "-h"],
    version_flags=[],
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """What is asked of the server, and how.

    Parameters
    ----------
    model
        Name of the model; the first that the server lists by default.
    endpoint
        chat or completions.
    stream
        Ask for streams; without them there is no TTFT and no ITL.
    temperature
        0 takes the likeliest token.
    ignore_eos
        Ask for answers of exactly the length that the workload draws, past the model's end-of-sequence tokens.
    body
        JSON object of further fields of each request.
    header
        NAME=VALUE of a header of each request.
    api_key_env
        Variable of the environment that holds the API key.
    surface
        Surface that the requests name, in Headrace's header.
    insecure
        Believe any certificate of an https server.
    timeout
        Seconds for a whole answer.
    connect_timeout
        Seconds for a connection.
    tokenizer
        Model folder, bundled model or hub id whose tokenizer counts tokens; the server's /tokenize by default, or else
        the usage that it tells.
    token_mismatch
        What to do where the server's count of output tokens and ours are more than 5 % apart: fail, warn or off.
    """

    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True
    body: str = "{}"
    header: Annotated[list[str] | None, Many] = None
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
    """When requests are sent, and how many.

    Parameters
    ----------
    concurrency
        Closed loop: so many users, each sends when its last answer has come. Several numbers are several stages. With
        --rate: most requests at once.
    rate
        Open loop: requests per second, whatever the server does. Several are several stages; inf sends all at once.
    arrivals
        Gaps of an open loop: constant, poisson or gamma.
    burstiness
        Shape of gamma gaps: below 1 in bursts, 1 is poisson, above 1 more even.
    ramp
        FROM..TO: a rate that rises over --seconds.
    sweep
        FROM..TO or FROM..: raise the rate stage by stage until the server does not keep up, and find the knee.
    sweep_factor
        Times that the rate is raised by.
    sweep_refine
        Stages between the last good rate and the first bad one.
    sweep_good
        Share of a stage's requests that must meet the objectives.
    sweep_latency
        Without objectives: times the first stage's p90 TTFT that is too long.
    sweep_stages
        Most stages.
    requests
        Requests of a stage.
    seconds
        Seconds of a stage in which requests are sent; 30 where neither is given.
    drain
        Seconds for answers that are under way when a stage's time is up.
    warmup
        Requests before the first stage that are in no figure.
    most_running
        Requests at once, at most; those past it fail without being sent.
    most_lag
        Milliseconds of p99 lag behind the schedule that are no matter.
    tenants
        TOML file of tenants that send at once, each with a key, a rate, a workload and a surface.
    """

    concurrency: Annotated[list[int] | None, Many] = None
    rate: Annotated[list[float] | None, Many] = None
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
    """What is asked.

    Parameters
    ----------
    workload
        fixed, chat, rag, agent, summarise or extract, or a mix such as chat=0.7,rag=0.3.
    input_tokens
        Tokens of a prompt by the server's count, chat template included; a shared prefix comes on top.
    output_tokens
        Tokens of an answer.
    spread
        Lengths are evenly between 1 - this and 1 + this of what is asked.
    scale
        Lengths of a workload with a name are so many times as long.
    prefixes
        Different beginnings that requests share; 0 is none.
    prefix_tokens
        Tokens of each.
    prefix_kind
        Where it stands: system (a system message), few-shot (pairs of messages) or documents (before the question).
    prefix_share
        Share of the conversations that have one.
    turns
        Turns of a conversation, such as 4 or 2-6.
    think
        Mean seconds between an answer and the next turn.
    trace
        JSONL file of requests: Headrace's, Mooncake's, or vLLM's custom data set.
    trace_format
        auto, headrace, mooncake or vllm.
    speed
        Times as fast as the trace says.
    seed
        Seed of lengths, arrivals and texts.
    reuse_prompts
        Send the same prompts as every run with this seed, which a server may have kept.
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
    """What is done with the figures.

    Parameters
    ----------
    goodput
        Objectives in milliseconds, such as ttft:300 tpot:50 e2el:2000, also ttfo.
    buckets
        Prompt lengths at which requests are told apart.
    most_errors
        Requests that may fail, as a number or a share such as 1%, before the exit code is 1.
    json
        File for the result, with the keys of vLLM's benchmark and all of ours.
    html
        File for a report that any browser shows.
    detail
        Keep a row for each request in the file.
    texts
        Keep the answers' texts in the file.
    label
        Name of the measurement.
    live
        Show the run while it goes on; by default where there is a terminal.
    """

    goodput: Annotated[list[str] | None, Many] = None
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
    """Measure any OpenAI-compatible server over HTTP.

    Parameters
    ----------
    url
        The server, such as http://localhost:8000.
    """
    options = options_of(url, server, load, work, output)
    options.check()
    allowed = _most_errors(output.most_errors)
    for path in (output.json, output.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"{path}: there is no such folder", parameter="json")
    from headrace.bench.load_generator.benchmark import run_benchmark
    from headrace.bench.load_generator.live_display import LiveDisplay
    from headrace.bench.load_generator.result_warnings import mismatch_of
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
        raise ConnectionError(f"{failed} of {requests} requests failed: {kinds}")
    if options.mismatch == "fail" and (said := mismatch_of(result)):
        raise ConnectionError(f"{said}; --token-mismatch warn lets it pass")


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
    """Say how one result differs from another, how sure that is, and where there is no difference.

    Parameters
    ----------
    a
        A result that --json wrote.
    b
        Another; its figures are shown as multiples of A's.
    rounds
        Results of further rounds, in turn of A and of B.
    margin
        Differences that are no matter: 0.02 is two per cent.
    confidence
        Of the interval of a ratio.
    resamples
        Times that the requests are drawn again for it.
    seed
        Seed of those draws.
    html
        File for a report of all results.
    json
        Print one JSON object in place of the table.
    """
    from headrace.bench.compare import compare_results as comparing
    from headrace.bench.compare import comparison
    from headrace.bench.results.benchmark_result import read

    if len(rounds) % 2:
        raise RequestError("rounds come in pairs: A B A B", parameter="rounds")
    results = [read(path) for path in (a, b, *rounds)]
    found = comparing.compare(
        results[::2], results[1::2], seed=seed, resamples=resamples, confidence=confidence, margin=margin
    )
    if html is not None:
        from headrace.bench.report.html_report import write_html

        write_html(results, html)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        comparison.show(_console(), found)


def options_of(
    url: str, server: ServerFlags, load: LoadFlags, work: WorkFlags, output: OutputFlags
) -> BenchmarkOptions:
    asked = WorkloadOptions(
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
    mix = mix_of(asked)
    bounded("burstiness", load.burstiness, 1e-3)
    if load.burstiness != 1.0 and load.arrivals not in (None, "gamma"):
        raise RequestError(f"{load.arrivals} arrivals have no burstiness; gamma ones do", parameter="burstiness")
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
        raise RequestError(f"the environment has no {variable}", parameter="api-key-env")
    return found or None


def _body(text: str) -> dict[str, Any]:
    try:
        found: object = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"body must be a JSON object, not '{text}'", parameter="body")
    return cast("dict[str, Any]", found)


def _headers(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise RequestError(f"a header is NAME=VALUE, not '{each}'", parameter="header")
        found[name.strip()] = value.strip()
    return found


def _range(text: str, name: str, *, open_end: bool = False) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        if not dots or not (high or open_end):
            raise ValueError
        return float(low), float(high) if high else math.inf
    except ValueError:
        raise RequestError(f"{name} must be FROM..TO, not '{text}'", parameter=name) from None


def _objectives(given: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in given:
        name, _, value = each.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            raise RequestError(f"an objective is NAME:MILLISECONDS, not '{each}'", parameter="goodput") from None
    return found


def _buckets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise RequestError(f"buckets are numbers with commas between, not '{text}'", parameter="buckets") from None


def _most_errors(text: str) -> float:
    """Below 1 a share, from 1 on a number."""
    try:
        found = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < math.inf or (text.endswith("%") and found > 1.0):
        raise RequestError(f"most-errors must be a number or a share such as 1%, not '{text}'", parameter="most-errors")
    return min(found, 1.0 - 1e-12) if text.endswith("%") else found


def _failures(result: BenchmarkResult) -> tuple[int, int]:
    """A sweep's stages past the knee are there to fail."""
    rows = [stage.figures for stage in result.stages if stage.kept_up] if result.load == "sweep" else [result.figures]
    return sum(figures.failed for figures in rows), sum(figures.requests for figures in rows)


def _arguments(url: str, *flags: ServerFlags | LoadFlags | WorkFlags | OutputFlags) -> dict[str, Any]:
    """Those that differ from what they are by default; headers and fields of the body without their values."""
    found: dict[str, Any] = {"url": url}
    for each, usual in zip(flags, (SERVER, LOAD, WORK, OUTPUT), strict=True):
        for name in each.__dataclass_fields__:
            value = getattr(each, name)
            if value == getattr(usual, name):
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
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
