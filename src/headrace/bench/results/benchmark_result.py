"""What a benchmark came to: a row for each request, figures of groups of them, stages of a sweep, and the JSON file.

Owns Row, Spread, Figures, Stage, Result and their file, and Snapshot, which a run shows while it goes on. Knows neither
how requests are sent nor how figures are computed.

Times of rows are seconds, from the run's start or from the request's; those of figures are milliseconds. The file has
the keys of `vllm bench serve` at its top, and all of a Result under "headrace".
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import RequestError

VERSION: Final = 1  # of the file's part under "headrace"
MOST_FILE: Final = 2 * 1024**3  # bytes of a result that is read: 2 GiB
PERCENTILES: Final = (50, 90, 95, 99)


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run while it goes on; warm-up requests are in none of it."""

    seconds: float  # since the run's start, 0 during warm-up
    stage: int = 0  # which one, from 0
    stages: int | None = None  # how many; None: a sweep that does not know yet
    load: str = ""  # of the stage, in words: "8 at once", "4 requests/s"
    doing: str = "running"  # warming up, running, finishing
    planned: int = 0  # requests that should have been sent by now
    sent: int = 0
    running: int = 0
    done: int = 0  # ended well
    failed: int = 0
    most_requests: int | None = None  # bound of the stage; with most_seconds what a progress bar goes by
    most_seconds: float | None = None
    stage_seconds: float = 0.0  # since the stage's start
    stage_done: int = 0  # of the stage's requests, ended well or not
    ttft_p50: float | None = None  # milliseconds; of the latest requests, as the others
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    tokens_per_s: float = 0.0  # output tokens that came in the last second; a chunk counts as one until its usage came
    lag_ms: float = 0.0  # the longest lag behind the schedule in the last second


class RequestRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Seconds; None is what the server did not show."""

    number: int  # in the order in which requests were made
    stage: int = 0  # place in Result.stages
    tenant: str = ""
    surface: str = ""
    workload: str = ""
    session: int = 0  # requests of one conversation have the same
    turn: int = 0  # of a conversation, from 0
    planned: float = 0.0  # from the run's start: when it should have been sent; its start in a closed loop
    start: float = 0.0  # from the run's start: when it was sent, before a new connection is made
    lag: float = 0.0  # from plan to hand-over: the client's own delay
    waited: float = 0.0  # for a place below --concurrency, where a rate is given too
    connect: float = 0.0  # making the connection, which is part of ttft and e2el; 0 on one that was kept
    ok: bool = False
    error: str = ""  # its kind: refused, unreachable, tls, reset, timeout, http 429, malformed, stream, cut, empty, ...
    why: str = ""  # the error's text, cut short
    status: int = 0  # HTTP; 0: none came
    finish: str = ""  # the server's finish_reason
    asked_input: int = 0  # tokens that the prompt was made to have; 0: unknown
    asked_output: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    tokens_from: str = ""  # usage, text (re-tokenised) or chunks: where output_tokens comes from
    ttft: float | None = None  # to the first content, reasoning or tool delta; None where nothing was streamed
    ttfo: float | None = None  # to the first that is no reasoning
    e2el: float | None = None  # to the last byte, or to the failure; None where it was not sent
    gaps: list[float] = []  # between streamed outputs
    chunks: int = 0  # streamed outputs
    together: int = 0  # of them, those that came in one read with the one before
    queue_ms: float | None = None  # as the server says; milliseconds, as it says them
    prefill_ms: float | None = None
    decode_ms: float | None = None
    text: str = ""  # the answer, where texts are kept

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None for answers of one token and those not streamed."""
        if self.e2el is None or self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def end(self) -> float:
        """From the run's start; its start where it never ended."""
        return self.start + (self.e2el or 0.0)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of `count` values; times are milliseconds. Percentiles interpolate linearly between neighbours."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    least: float
    most: float


class RequestStats(msgspec.Struct, kw_only=True):
    """Of a group of requests. Times are of those that ended well."""

    name: str
    requests: int = 0
    completed: int = 0
    failed: int = 0
    seconds: float = 0.0  # from the first start to the last end
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them; 0 as well where the server does not say
    output_tokens: int = 0
    request_throughput: float = 0.0  # a second, as the four below
    output_throughput: float = 0.0
    total_throughput: float = 0.0  # tokens of prompts and answers
    good: int | None = None  # met every objective; None where there is none
    goodput: float | None = None
    peak_running: int = 0
    peak_output_per_s: float = 0.0  # tokens of the best second
    ttft: Distribution | None = None
    ttfo: Distribution | None = None
    itl: Distribution | None = None
    tpot: Distribution | None = None
    e2el: Distribution | None = None
    queue: Distribution | None = None
    prefill: Distribution | None = None
    decode: Distribution | None = None
    lag: Distribution | None = None  # of all requests of an open loop
    chunk_tokens: Distribution | None = None  # tokens for each streamed output, a mean for each request
    together: float = 0.0  # share of the streamed outputs that came in one read with the one before
    errors: dict[str, int] = {}  # by kind


class StageResult(msgspec.Struct, kw_only=True):
    """A part of the run with one load."""

    name: str  # "4 requests/s", "8 at once"
    rate: float | None = None  # requests per second that were planned; None in a closed loop
    concurrency: int | None = None  # None: no bound but the client's own
    began: float = 0.0  # seconds from the run's start
    ended: float = 0.0
    figures: RequestStats
    kept_up: bool = True  # in a sweep: the server did
    why: str = ""  # why it did not


class TokenCheck(msgspec.Struct, kw_only=True):
    """The server's count of output tokens beside ours, on a sample of answers."""

    answers: int
    usage: int
    counted: int
    by: str  # tokenizer or server: who counted
    difference: float  # 0.05: five per cent of the server's count
    past_ends: float | None = None  # the same of answers that went on past their ends, where others decided


class BenchmarkResult(msgspec.Struct, kw_only=True):
    version: int = VERSION
    headrace: str = ""  # version of the program
    label: str = ""
    url: str = ""
    endpoint: str = ""  # /v1/chat/completions, /v1/completions
    model: str = ""
    tokenizer: str = ""  # a folder, or how lengths were found: "the server's /tokenize", "usage"
    streamed: bool = True
    started_at: str = ""  # ISO 8601, UTC
    ended_at: str = ""
    duration: float = 0.0  # seconds of all stages
    seed: int = 0
    nonce: str = ""  # in the first words of each prompt; empty: prompts are those of every run with this seed
    workload: str = ""  # in words
    load: str = ""  # closed, open, ramp, sweep or trace
    arrivals: str = ""  # constant, poisson, gamma; of a trace: trace
    burstiness: float = 1.0
    ramp: tuple[float, float] | None = None  # requests/s
    arguments: dict[str, Any] = {}  # of the command; without keys
    objectives: dict[str, float] = {}  # milliseconds by ttft, ttfo, tpot, e2el
    figures: RequestStats
    stages: list[StageResult] = []
    knee: int | None = None  # place in stages of the highest load that the server kept up with; of a sweep
    tenants: list[RequestStats] = []  # each where there is more than one
    surfaces: list[RequestStats] = []
    workloads: list[RequestStats] = []
    lengths: list[RequestStats] = []  # by prompt tokens
    warmup: int = 0  # requests that are in no figure
    token_check: TokenCheck | None = None
    warnings: list[str] = []
    rows: list[RequestRow] = []  # none where details are left out
    gaps_left_out: int = 0  # rows without their gaps, past the bound


def write(result: BenchmarkResult, path: Path) -> None:
    """vLLM's keys at the top, all of the result under "headrace". The rows' gaps and texts are in the file once."""
    bare = [msgspec.structs.replace(row, gaps=[], text="") for row in result.rows]
    own = msgspec.to_builtins(msgspec.structs.replace(result, rows=bare))
    path.write_bytes(msgspec.json.encode(vllm_keys(result) | {"headrace": own}) + b"\n")


def read(path: Path) -> BenchmarkResult:
    """RequestError where the file is none of ours."""
    with path.open("rb") as file:
        raw = file.read(MOST_FILE + 1)
    try:
        if len(raw) > MOST_FILE:
            raise msgspec.ValidationError(f"it is longer than {MOST_FILE} bytes")
        found = msgspec.json.decode(raw, type=_File)
        if found.headrace.version != VERSION:
            raise msgspec.ValidationError(f"its version is {found.headrace.version}, and this program reads {VERSION}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not a result of headrace bench: {error}") from None
    for row, gaps, text in itertools.zip_longest(found.headrace.rows, found.itls, found.generated_texts):
        if row is not None:
            row.gaps = gaps or []
            row.text = text or ""
    return found.headrace


class _File(msgspec.Struct):
    headrace: BenchmarkResult
    itls: list[list[float]] = []
    generated_texts: list[str] = []


def vllm_keys(result: BenchmarkResult) -> dict[str, Any]:
    """The keys that `vllm bench serve` writes, with their units: seconds in lists, milliseconds in `..._ms`."""
    total = result.figures
    stage = result.stages[0] if len(result.stages) == 1 else None
    rate = stage.rate if stage is not None else None
    found: dict[str, Any] = {
        "date": result.started_at,
        "endpoint_type": "openai-chat" if result.endpoint.endswith("/chat/completions") else "openai",
        "backend": "openai-chat" if result.endpoint.endswith("/chat/completions") else "openai",
        "label": result.label or None,
        "model_id": result.model,
        "tokenizer_id": result.tokenizer or None,
        "num_prompts": total.requests,
        "request_rate": "inf" if rate is None else rate,
        "burstiness": result.burstiness,
        "max_concurrency": stage.concurrency if stage is not None else None,
    }
    if result.ramp is not None:
        low, high = result.ramp
        found |= {"ramp_up_strategy": "linear", "ramp_up_start_rps": low, "ramp_up_end_rps": high}
    found |= {
        "duration": result.duration,
        "completed": total.completed,
        "failed": total.failed,
        "total_input_tokens": total.prompt_tokens,
        "total_output_tokens": total.output_tokens,
        "request_throughput": total.request_throughput,
        "request_goodput": total.goodput,
        "output_throughput": total.output_throughput,
        "total_token_throughput": total.total_throughput,
        "max_output_tokens_per_s": total.peak_output_per_s,
        "max_concurrent_requests": total.peak_running,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        spread: Distribution | None = getattr(total, name)
        if spread is None:
            continue
        found[f"mean_{name}_ms"] = spread.mean
        found[f"median_{name}_ms"] = spread.p50
        found[f"std_{name}_ms"] = spread.std
        found |= {f"p{percent}_{name}_ms": getattr(spread, f"p{percent}") for percent in PERCENTILES}
    if result.rows:
        found |= {
            "input_lens": [row.prompt_tokens for row in result.rows],
            "output_lens": [row.output_tokens for row in result.rows],
            "ttfts": [row.ttft or 0.0 for row in result.rows],
            "itls": [row.gaps for row in result.rows],
            "latencies": [row.e2el or 0.0 for row in result.rows],
            "start_times": [row.start for row in result.rows],
            "queue_times": [row.waited for row in result.rows],
            "generated_texts": [row.text for row in result.rows],
            "errors": [f"{row.error}: {row.why}" if row.error else "" for row in result.rows],
        }
    return found
